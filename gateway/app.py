"""Wiring of one gateway: what it is made of, how it starts, and the order in which it stops."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from aiohttp import web

from gateway.abilities import Abilities
from gateway.admission import Admission, FallbackBudget
from gateway.background import in_background
from gateway.cluster_view import ClusterView
from gateway.dashboard.gather import Sources
from gateway.dashboard.routes import Dashboard
from gateway.discovery import Discovery
from gateway.engines import Engine, Engines
from gateway.front import Front
from gateway.generation import Generation
from gateway.handlers import Handlers
from gateway.ids import Ids
from gateway.live_policy import Effective, LivePolicy, MakePolicy
from gateway.long_way import LongWay
from gateway.member_file import read_members
from gateway.members import Members, merged, require_key
from gateway.membership import Membership
from gateway.metrics import GatewayMetrics, LiveSources
from gateway.passing import Passing
from gateway.records import RecordBook
from gateway.request_spans import RequestSpans
from gateway.state.metrics import StateMetrics
from gateway.state.starting import prefixes_of, state_of
from gateway.tenancy.tenancy import tenancy_of
from gateway.tokenise import PromptTokenizer, Tokeniser
from gateway.tokenizer_check import TokenizerCheck
from gateway.workers.everyone import Everyone, Parts, Worker
from gateway.workers.link import Hearers
from prfaas.clock import SYSTEM_CLOCK, Clock
from prfaas.cluster_state import ClusterStore
from prfaas.dialling import ends_at, open_files
from prfaas.errors import ConfigError
from prfaas.http_log import server_logger
from prfaas.interfaces import RoutingPolicy
from prfaas.settings import GatewaySettings, Settings
from prfaas.snapshot import Outcome
from prfaas.tokens import Tokenizer
from prfaas.tracing_on import open_spans

logger = logging.getLogger(__name__)

IDLE_CLIENT_S = 75.0
"""Keep-alive connections of clients are closed after so long without a request."""


LINGER_S = 1.0
"""How long the rest of a refused body is still read, so that the client sees the answer."""

YOUNG_OBJECTS = 20_000
"""New objects between two looks for garbage in circles; Python looks after 700."""

WORKER_PAUSE_S = 0.1
"""Between two tries of a worker to reach the process that keeps the state, at most."""

CUT_S = 0.5
"""What still runs after the drain, or without one, is cancelled after so long."""


class Gateway:
    """Owns every part of one gateway process. Use `running`, which starts and stops it."""

    def __init__(
        self,
        settings: Settings,
        policy: RoutingPolicy[Any],
        tokenizer: PromptTokenizer | None,
        clock: Clock = SYSTEM_CLOCK,
        make_policy: MakePolicy | None = None,
        store: ClusterStore | None = None,
        effective: Effective | None = None,
        worker: Worker | None = None,
    ) -> None:
        """`make_policy` makes canary and shadow, and what changed files name; `store` is where it
        meets other gateways, in place of the Redis that settings name; `effective` reads policy
        files for the log; `worker`: this is one of several processes, and another one feeds it.
        """
        self._worker = worker
        if worker is None:
            check_settings(settings)
        else:
            store = worker.link
        gateway, limits = settings.gateway, settings.limits
        files = open_files(gateway.tls, "client", "gateway.tls")
        self._settings, self._limits = gateway, limits
        self.metrics = GatewayMetrics()
        self.metrics.certificate_end.set_function(partial(ends_at, files))
        self.view = ClusterView(gateway, limits, clock)
        self.admission = Admission(limits.gateway_max_in_flight)
        self.budget = FallbackBudget(limits.fallback_budget_tokens)
        self.records = RecordBook(limits.outcome_history, clock)
        self._tokeniser = Tokeniser(tokenizer, limits.max_prompt_tokens)
        prefixes = prefixes_of(gateway, clock, store)
        self.engines = Engines({}, self.view, limits, clock, self._engine_changed, prefixes)
        self.tokenizer_check = TokenizerCheck(
            self._tokeniser, self.engines.any_upstream, gateway.tokenize_check_every, limits
        )
        self.policy = LivePolicy(gateway, policy, make_policy, self.metrics, effective)
        self.tenancy = tenancy_of(gateway, limits, self.metrics.tenants, clock)
        self._door = None if self.tenancy is None else self.tenancy.door
        self._spans = open_spans(settings.tracing, "gateway")
        spans = RequestSpans(self._spans) if self._spans is not None else None
        self._ids = Ids(settings.tracing.sample)
        self.generation = Generation(
            gateway,
            limits,
            self.policy,
            self.view,
            self._tokeniser,
            self.tokenizer_check,
            self.engines,
            self.records,
            self.metrics,
            self.budget,
            self._ids,
            clock,
            spans,
        )
        self.state = state_of(
            gateway.state,
            self.view,
            self.tenancy,
            self.policy,
            self.metrics.state if worker is None else StateMetrics(None),
            clock,
            store,
            prefixes,
        )
        self.abilities = Abilities(limits, clock)
        self.discovery = Discovery(gateway, limits, self._members_changed, self.metrics)
        self.membership = Membership(
            self.discovery.members,
            self.view,
            self.engines,
            self.abilities,
            files,
            limits,
            self._outcome,
            self.metrics.engine_left,
            watches=worker is None,
        )
        self.passing = Passing(
            gateway,
            limits,
            self.engines,
            self.abilities,
            self.records,
            self.metrics,
            self._ids,
            clock,
            spans,
        )
        self.metrics.watch(
            LiveSources(
                self.view,
                self.admission,
                self.budget,
                self.engines,
                self.tokenizer_check,
                clock,
                self._tokeniser.memory,
            )
        )
        self._everyone: Everyone | None = None
        if worker is not None:
            parts = Parts(self.metrics, self.records, self.view, self.budget, self.admission)
            self._everyone = Everyone(worker, parts, os.getpid())
            place = worker.place
            self.metrics.workers.watch(place.name, place.generation, worker.link)
            if self.state is not None:
                self.state.max_pause_s = WORKER_PAUSE_S
                self.state.tells_links = False
        self.dashboard = Dashboard(
            Sources(
                gateway,
                self.view,
                self.engines,
                self.records,
                self.metrics,
                self.policy,
                self.admission,
                clock,
                limits.watch_stale_s,
                self.state,
            ),
            limits,
            None if self._everyone is None else self._everyone.dashboard,
        )
        self.port = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Gateway]:
        """Listen, follow the agents and probe the engine; on leaving, cancel what still runs."""
        handlers = Handlers(
            self._settings.model,
            self._limits,
            self.generation,
            self.passing,
            self.admission,
            self.budget,
            self.view,
            self.engines,
            self.records,
            self.metrics,
            self._ids,
            self._door,
            self._everyone,
        )
        app = handlers.app()
        self.dashboard.add_routes(app.router)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=CUT_S)
        front = self.front = Front(
            self._limits,
            self.generation,
            self.admission,
            self.metrics,
            self._ids,
            partial(_long_way, runner, self._ids),
            IDLE_CLIENT_S,
            self._door,
        )
        self.membership.start()
        if self._worker is not None:
            self._worker.link.start(
                Hearers(
                    self.view,
                    self.budget,
                    self._members_changed,
                    self._outcome,
                    lambda: self.membership.leaving,
                )
            )
        tasks = [
            in_background("following the policies", self.policy.run),
            in_background("the dashboard", self.dashboard.run),
        ]
        if self.discovery.follows:
            tasks.append(in_background("discovery", self.discovery.run))
        if self.tenancy is not None:
            tasks.append(in_background("following the tenants", self.tenancy.run))
        if self._everyone is not None:
            await self._everyone.start()
            tasks.append(in_background("keeping what is counted", self._everyone.run))
        try:
            await runner.setup()
            self.port = await self._listen(front)
            logger.info("listening on %s:%d", self._settings.host, self.port)
            if self.state is not None:
                self.state.address = f"{self._settings.host}:{self.port}"
                if self._worker is not None:
                    self.state.address = self._worker.place.name
                tasks.append(in_background("the exchange of state", self.state.run))
            yield self
        finally:
            self.dashboard.close()
            await asyncio.gather(front.close(CUT_S), runner.cleanup())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._everyone is not None:
                await self._everyone.close()
            await self.tokenizer_check.close()
            if self.state is not None:
                await self.state.close()
            self.generation.close()
            if self.tenancy is not None:
                self.tenancy.close()
            self.passing.close()
            await self.membership.close()
            self._tokeniser.close()
            if self._spans is not None:
                await asyncio.to_thread(self._spans.close)

    async def _listen(self, front: Front) -> int:
        """The port. Raises ConfigError."""
        host, port = self._settings.host, self._settings.port
        try:
            return await front.start(host, port, shared=self._worker is not None)
        except OSError as exc:
            raise ConfigError(
                f"gateway.port: cannot listen on {host}:{port}: {exc.strerror}",
                field="gateway.port",
            ) from exc

    async def drain(self) -> bool:
        """Refuse new requests and wait for those under way; False when the limit ended it."""
        self.admission.draining = True
        try:
            async with asyncio.timeout(self._limits.drain_timeout_s):
                await self.admission.wait_empty()
        except TimeoutError:
            logger.warning("%d requests are cut by the drain limit", self.admission.in_flight)
            return False
        return True

    async def _members_changed(self, members: Members) -> None:
        await self.membership.apply(members)

    def _outcome(self, outcome: Outcome) -> None:
        self.generation.outcome(outcome)

    def _engine_changed(self, engine: Engine) -> None:
        if engine.probe.reachable:
            self.tokenizer_check.start(self._settings.model)


def _long_way(runner: web.AppRunner, ids: Ids) -> asyncio.Protocol:
    """For one connection; the runner is set up."""
    assert runner.server is not None
    return LongWay(
        runner.server,
        ids,
        access_log=None,
        logger=server_logger(),
        keepalive_timeout=IDLE_CLIENT_S,
        lingering_time=LINGER_S,
    )


def check_settings(settings: Settings) -> None:
    """What the types of the settings cannot say. Raises ConfigError naming the key."""
    gateway = settings.gateway
    found = gateway.discovery
    if not (gateway.engines or found.engines or found.file is not None):
        raise ConfigError("gateway.engines: there must be at least one", field="gateway.engines")
    parts = [Members(gateway.engines, gateway.peers)]
    if found.file is not None:
        parts.append(read_members(found.file))
    members = merged(parts)
    require_key(gateway, bool(members.peers or found.peers))


async def serve(
    settings: Settings,
    ready: Callable[[int], None] | None = None,
    *,
    policy: RoutingPolicy[Any],
    make_policy: MakePolicy | None = None,
    effective: Effective | None = None,
) -> None:
    """Run a gateway until SIGTERM or SIGINT: then drain, and at a second signal stop at once.

    `ready` is called with the port once it listens. Raises ConfigError.
    """
    tokenizer = load_tokenizer(settings.gateway)
    gateway = Gateway(settings, policy, tokenizer, make_policy=make_policy, effective=effective)
    await run_gateway(gateway, ready)


def load_tokenizer(gateway: GatewaySettings) -> Tokenizer | None:
    """As the settings say. Raises ConfigError."""
    if gateway.tokenizer is not None:
        return Tokenizer.load(gateway.tokenizer)
    if gateway.offload and (gateway.peers or gateway.discovery.peers):
        logger.warning(
            "gateway.tokenizer is not set: only prompts that are token arrays can be offloaded"
        )
    return None


async def run_gateway(
    gateway: Gateway, ready: Callable[[int], None] | None = None, life_fd: int | None = None
) -> None:
    """Until SIGTERM or SIGINT, as `serve` says. The end of `life_fd` is as good as a signal."""
    stop, force = asyncio.Event(), asyncio.Event()

    def signalled() -> None:
        (force if stop.is_set() else stop).set()

    def life_ended() -> None:
        assert life_fd is not None
        loop.remove_reader(life_fd)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled)
    if life_fd is not None:
        loop.add_reader(life_fd, life_ended)
    try:
        async with gateway.running():
            # What was imported and wired stays: no collection needs to go through it again.
            gc.collect()
            gc.freeze()
            gc.set_threshold(YOUNG_OBJECTS, 20, 50)
            if ready is not None:
                ready(gateway.port)
            await stop.wait()
            logger.info("draining %d requests", gateway.admission.in_flight)
            await _first(gateway.drain(), force.wait())
    finally:
        if life_fd is not None:
            loop.remove_reader(life_fd)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def _first(*coroutines: Any) -> None:
    """Wait for one of them, and cancel the rest."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
