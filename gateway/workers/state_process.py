"""The process that keeps the state of all workers: Watch streams, indices, limits and policies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from gateway.app import check_settings
from gateway.background import in_background
from gateway.dashboard.gather import together
from gateway.dashboard.messages import Requests
from gateway.discovery import Discovery
from gateway.live_policy import ACTIVE, MakePolicy
from gateway.members import Members
from gateway.metrics import GatewayMetrics
from gateway.state.starting import redis_store
from gateway.state.sync import StateSync
from gateway.upstream import HttpUpstream
from gateway.workers.dashboard import DashboardPart
from gateway.workers.everyone import Counted
from gateway.workers.files import good_copies, members_copy
from gateway.workers.hub_store import HubPrefixes, HubStore, WorkersSent
from gateway.workers.messages import MembersAre, ToWorker
from gateway.workers.place import Place
from gateway.workers.siblings import Ask, AskDashboard, Siblings
from gateway.workers.state_server import StateServer
from gateway.workers.told_view import ToldView
from gateway.workers.watching import Watching
from prfaas.clock import Clock
from prfaas.dialling import ends_at, open_files
from prfaas.errors import ConfigError
from prfaas.settings import Settings

logger = logging.getLogger(__name__)


class StateProcess:
    """Owns every part of it. Use `running`, which starts and stops it."""

    def __init__(
        self, place: Place, settings: Settings, make_policy: MakePolicy, clock: Clock
    ) -> None:
        """Raises ConfigError."""
        kept = members_copy(place.directory)
        check_settings(_with_kept(settings, kept))
        gateway, limits = settings.gateway, settings.limits
        files = open_files(gateway.tls, "client", "gateway.tls")
        self._limits = limits
        self.metrics = GatewayMetrics()
        self.metrics.certificate_end.set_function(partial(ends_at, files))
        self.metrics.workers.watch(place.name, place.generation, None)
        self.counted = Counted(self.metrics, place)
        self.siblings = Siblings(place, self._said)
        self.copies = good_copies(gateway, place.directory, make_policy, self.metrics)
        self.view = ToldView(gateway, limits, clock, self._tell)
        self.discovery = Discovery(gateway, limits, self._members_changed, self.metrics, kept)
        beyond = gateway.state.redis is not None
        self.store = HubStore(clock, place.workers, self.view.neighbours, beyond=beyond)
        self.sync = self._sync_with(settings, place, clock) if beyond else None
        self.server = StateServer(
            place.state_socket, self.store, self.view, lambda: self.watching.members, clock
        )
        self.watching = Watching(
            self.discovery.members,
            self.view,
            files,
            limits,
            lambda: self.server.leaving,
            lambda members: self._tell(MembersAre.of(members)),
        )

    def _sync_with(self, settings: Settings, place: Place, clock: Clock) -> StateSync:
        """With the store beyond, for all workers as one. Raises ConfigError."""
        gateway, workers = settings.gateway, place.workers
        state = gateway.state
        self.view.sent = WorkersSent(self.store)
        policy = self.copies.get(ACTIVE)
        if state.share_policy and policy is None:
            raise ConfigError(
                "gateway.state.share_policy: with workers it needs gateway.policy.file",
                field="gateway.state.share_policy",
            )
        sync = StateSync(
            state.model_copy(update={"expected_gateways": state.expected_gateways * workers}),
            redis_store(state),
            self.view,
            self.store,
            tuple,
            policy if state.share_policy else None,
            self.metrics.state,
            clock,
            HubPrefixes(self.store) if state.share_prefixes else None,
            workers,
        )
        sync.address = f"{gateway.host}:{place.port}"
        sync.sent.pass_on = self.store.pass_on
        return sync

    @asynccontextmanager
    async def running(self) -> AsyncIterator[StateProcess]:
        """Listen, and follow agents and files."""
        runs = {"watching": self.watching.run, "keeping what is counted": self.counted.run}
        runs |= {f"following the file of {what}": copy.run for what, copy in self.copies.items()}
        if self.sync is not None:
            runs["the exchange of state"] = self.sync.run
        if self.discovery.follows:
            runs["discovery"] = self.discovery.run
        await self.siblings.start()
        await self.server.start()
        tasks = [in_background(what, run) for what, run in runs.items()]
        try:
            yield self
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.siblings.close()
            await self.server.close()
            if self.sync is not None:
                await self.sync.close()
            await self.watching.close()

    def _tell(self, message: ToWorker) -> None:
        self.server.tell(message)

    def _said(self, ask: Ask) -> object:
        """This process is asked for metrics, and how it stands with other gateways."""
        if isinstance(ask, AskDashboard):
            return DashboardPart(Requests([]), together=together(self.sync))
        return self.counted.families()

    async def _members_changed(self, members: Members) -> None:
        for engine in members.engines:  # what workers could not take over is refused here
            HttpUpstream.to(engine, self._limits)
        await self.watching.apply(members)


def _with_kept(settings: Settings, kept: Path) -> Settings:
    """With the copy of who was here before, if any: the file may be no good by now."""
    gateway = settings.gateway
    if gateway.discovery.file is None or not kept.exists():
        return settings
    discovery = gateway.discovery.model_copy(update={"file": kept})
    return settings.model_copy(
        update={"gateway": gateway.model_copy(update={"discovery": discovery})}
    )
