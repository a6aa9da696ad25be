"""Watch streams of all agents, which come with members and go when nobody needs them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gateway.cluster_view import ClusterView
from gateway.members import Members
from gateway.watch import WatchClient, watch_endpoints
from prfaas.dialling import Endpoint
from prfaas.limits import Limits
from prfaas.settings import EngineEndpoint
from prfaas.snapshot import Outcome
from prfaas.tls_files import TlsFiles


class WatchStreams:
    """Owns the streams and feeds the view, which knows the same members; close it with `close`."""

    def __init__(
        self,
        view: ClusterView,
        files: TlsFiles | None,
        limits: Limits,
        on_outcome: Callable[[Outcome], None],
    ) -> None:
        self._view = view
        self._files = files
        self._limits = limits
        self._on_outcome = on_outcome
        self._running = False
        self._wanted: dict[str, Endpoint] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def check(self, members: Members) -> None:
        """Raises ConfigError for agents that may not be dialled."""
        watch_endpoints(members, self._files)

    def expect(self, members: Members) -> None:
        """Before `start`: these belong. Raises ConfigError."""
        self._change(members, ())

    def start(self) -> None:
        """From now on all agents that are wanted are followed."""
        self._running = True
        self._begin()

    async def follow(self, members: Members, leaving: tuple[EngineEndpoint, ...]) -> None:
        """Those that belong, and those that are still needed; nobody else is known any more.

        Raises ConfigError.
        """
        await asyncio.gather(*self._change(members, leaving), return_exceptions=True)

    async def close(self) -> None:
        self._running = False
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _change(
        self, members: Members, leaving: tuple[EngineEndpoint, ...]
    ) -> list[asyncio.Task[None]]:
        """Gives the streams that were cancelled."""
        wanted = {
            **watch_endpoints(Members(leaving), self._files),
            **watch_endpoints(members, self._files),
        }
        stopped = [
            self._tasks.pop(place)
            for place, endpoint in self._wanted.items()
            if wanted.get(place) != endpoint and place in self._tasks
        ]
        for task in stopped:
            task.cancel()
        self._wanted = wanted
        self._view.members(members.engines, members.peers, leaving)
        if self._running:
            self._begin()
        return stopped

    def _begin(self) -> None:
        for place, endpoint in self._wanted.items():
            if place not in self._tasks:
                client = WatchClient(
                    self._view, place, endpoint, "gateway", self._limits, self._on_outcome
                )
                self._tasks[place] = asyncio.create_task(client.run())
