"""Watch streams of all agents, for all workers: members come, and leave when nobody needs them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gateway.cluster_view import ClusterView
from gateway.members import Members
from gateway.watch_streams import WatchStreams
from prfaas.limits import Limits
from prfaas.settings import EngineEndpoint
from prfaas.snapshot import Outcome
from prfaas.tls_files import TlsFiles

LOOK_S = 0.25
"""Between two looks at what workers still need of engines that have left."""
LEFT_S = 2.0
"""An engine that has left is followed so long at least: until workers have heard of it."""


class Watching:
    """Owns the streams; close it with `close`."""

    def __init__(
        self,
        members: Members,
        view: ClusterView,
        files: TlsFiles | None,
        limits: Limits,
        needed: Callable[[], frozenset[str]],
        told: Callable[[Members], None],
    ) -> None:
        """`needed`: engines that have left and that a worker has requests at; `told` hears of new
        members before anything is heard of them. Raises ConfigError.
        """
        self.members = members
        self._streams = WatchStreams(view, files, limits, _not_ours)
        self._needed = needed
        self._told = told
        self._leaving: dict[str, tuple[EngineEndpoint, float]] = {}
        self._streams.check(members)

    async def run(self) -> None:
        """Until cancelled."""
        self._streams.start()
        await self._follow()
        while True:
            await asyncio.sleep(LOOK_S)
            now, needed = asyncio.get_running_loop().time(), self._needed()
            over = [
                name
                for name, (_, left_at) in self._leaving.items()
                if name not in needed and now - left_at > LEFT_S
            ]
            if over:
                for name in over:
                    del self._leaving[name]
                await self._follow()

    async def close(self) -> None:
        await self._streams.close()

    async def apply(self, members: Members) -> None:
        """From now on these belong. Raises ConfigError, with nothing changed."""
        self._streams.check(members)
        kept = {engine.name for engine in members.engines}
        now = asyncio.get_running_loop().time()
        for engine in self.members.engines:
            if engine.name not in kept:
                self._leaving[engine.name] = (engine, now)
        for name in kept:
            self._leaving.pop(name, None)
        self.members = members
        self._told(members)
        await self._follow()

    async def _follow(self) -> None:
        """Those that belong, and those that are still needed; nobody else is known any more."""
        leaving = tuple(engine for engine, _ in self._leaving.values())
        await self._streams.follow(self.members, leaving)


def _not_ours(outcome: Outcome) -> None:
    """Each worker finds its own in the event."""
