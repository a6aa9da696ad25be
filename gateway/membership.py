"""Engines and peers that come and go while the gateway runs: who is asked, watched and drained."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from gateway.abilities import Abilities
from gateway.cluster_view import ClusterView
from gateway.engines import Engine, Engines
from gateway.members import Members
from gateway.upstream import HttpUpstream
from gateway.watch_streams import WatchStreams
from prfaas.limits import Limits
from prfaas.settings import EngineEndpoint
from prfaas.snapshot import Outcome
from prfaas.tls_files import TlsFiles

logger = logging.getLogger(__name__)

DRAIN_LOOK_S = 0.1


@dataclass(slots=True)
class _Joined:
    """One engine, and what belongs to it."""

    endpoint: EngineEndpoint
    engine: Engine
    upstream: HttpUpstream
    probing: asyncio.Task[None] | None = None


class Membership:
    """Owns upstreams, probes and Watch clients of all members; close it with `close`.

    An engine that leaves gets no new request; what it is answering goes on to its end, and its
    agent is heard until then.
    """

    def __init__(
        self,
        members: Members,
        view: ClusterView,
        engines: Engines,
        abilities: Abilities,
        files: TlsFiles | None,
        limits: Limits,
        on_outcome: Callable[[Outcome], None],
        on_left: Callable[[str], None],
        *,
        watches: bool = True,
    ) -> None:
        """`on_left` is told the name of an engine that is gone. `watches` False: somebody else
        follows the agents and feeds the view. Raises ConfigError.
        """
        self._engines = engines
        self._abilities = abilities
        self._limits = limits
        self._streams = WatchStreams(view, files, limits, on_outcome)
        self._on_left = on_left
        self._watches = watches
        self._running = False
        self._joined: dict[str, _Joined] = {}
        self._leaving: dict[str, EngineEndpoint] = {}
        """Engines that still answer, and whose names nobody else has taken."""
        self._drains: set[asyncio.Task[None]] = set()
        self._members = members
        self._streams.check(members)
        for endpoint in members.engines:
            self._join(endpoint, HttpUpstream.to(endpoint, limits))
        self._streams.expect(members)

    @property
    def draining(self) -> int:
        """Engines that have left and still answer."""
        return len(self._drains)

    @property
    def leaving(self) -> tuple[str, ...]:
        """Their names, where nobody else has taken them."""
        return tuple(self._leaving)

    def start(self) -> None:
        """Probe the engines and follow the agents."""
        self._running = True
        for joined in self._joined.values():
            self._probe(joined)
        if self._watches:
            self._streams.start()

    async def close(self) -> None:
        """Cut every connection."""
        self._running = False
        tasks = [each.probing for each in self._joined.values() if each.probing is not None]
        tasks += self._drains
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._streams.close()
        for joined in self._joined.values():
            await joined.upstream.close()

    async def apply(self, members: Members) -> None:
        """From now on these belong, and nobody else. Raises ConfigError, with nothing changed."""
        self._streams.check(members)
        wanted = {endpoint.name: endpoint for endpoint in members.engines}
        fresh = {
            name: HttpUpstream.to(endpoint, self._limits)
            for name, endpoint in wanted.items()
            if name not in self._joined or self._joined[name].endpoint != endpoint
        }
        self._members = members
        gone = [
            each for each in self._joined.values() if wanted.get(each.engine.name) != each.endpoint
        ]
        for joined in gone:
            self._part(joined, replaced=joined.engine.name in wanted)
        for name in fresh:
            self._leaving.pop(name, None)
        await self._follow()
        for name, upstream in fresh.items():
            self._join(wanted[name], upstream)

    def _join(self, endpoint: EngineEndpoint, upstream: HttpUpstream) -> None:
        joined = _Joined(endpoint, self._engines.join(endpoint.name, upstream), upstream)
        self._joined[endpoint.name] = joined
        self._abilities.joined(endpoint)
        if self._running:
            logger.info("engine %s joins, at %s", endpoint.name, endpoint.url)
            self._probe(joined)

    def _part(self, joined: _Joined, *, replaced: bool) -> None:
        """No new request goes there; another engine may take its name."""
        name = joined.engine.name
        logger.info("engine %s leaves, with %d requests", name, joined.engine.in_flight)
        del self._joined[name]
        self._engines.leave(joined.engine)
        self._abilities.forget(name)
        if joined.probing is not None:
            joined.probing.cancel()
        if not replaced:
            self._leaving[name] = joined.endpoint
        task = asyncio.create_task(self._drain(joined))
        self._drains.add(task)
        task.add_done_callback(self._drains.discard)

    async def _drain(self, joined: _Joined) -> None:
        try:
            # A look now and then, so that each request pays nothing for it.
            while joined.engine.in_flight:  # noqa: ASYNC110
                await asyncio.sleep(DRAIN_LOOK_S)
        finally:
            await joined.upstream.close()
        name = joined.engine.name
        if self._leaving.get(name) is joined.endpoint:
            del self._leaving[name]
            await self._follow()
            self._on_left(name)
        logger.info("engine %s has left", name)

    async def _follow(self) -> None:
        """The agents of who belongs and of who still answers."""
        await self._streams.follow(self._members, tuple(self._leaving.values()))

    def _probe(self, joined: _Joined) -> None:
        joined.probing = asyncio.create_task(joined.engine.probe.run())
