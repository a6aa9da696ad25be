"""Follows a file and DNS names for engines and peers, and hands over whatever is good."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Protocol

from gateway.dns_names import Names, find_engines, find_peers
from gateway.member_file import read_members, stamp_of
from gateway.members import Members, merged, require_key
from prfaas.errors import ConfigError, PeerUnavailable
from prfaas.limits import Limits
from prfaas.settings import GatewaySettings

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""Between two looks at the file, and the least between two questions to a DNS server."""
CONFIGURED = "settings"

Apply = Callable[[Members], Awaitable[None]]
Find = Callable[[], Awaitable[tuple[Members, float]]]


class DiscoveryEvents(Protocol):
    """Who counts what happens."""

    def discovery_changed(self, source: str, result: str) -> None:
        """`applied` or `refused`."""
        ...

    def discovery_failed(self, source: str) -> None:
        """It could not be asked; the last known set stays."""
        ...

    def discovery_found(self, source: str, members: Members) -> None: ...


class Discovery:
    """Owns what each source last said. `run` follows them until it is cancelled.

    A source that fails, or says what cannot be, keeps what it said before; whole sets change, or
    nothing does.
    """

    def __init__(
        self, settings: GatewaySettings, limits: Limits, apply: Apply, events: DiscoveryEvents
    ) -> None:
        """Raises ConfigError for a file that is no good at the start, and a DNS server that is no
        address.
        """
        chosen = settings.discovery
        self._settings = settings
        self._interval_s = chosen.interval_s
        self._apply = apply
        self._events = events
        self._file = chosen.file
        self._stamp = stamp_of(chosen.file) if chosen.file is not None else None
        self._parts = {CONFIGURED: Members(settings.engines, settings.peers)}
        if chosen.file is not None:
            self._parts[str(chosen.file)] = read_members(chosen.file)
        self._turned_down: dict[str, Members] = {}
        self._finds: dict[str, Find] = {}
        if chosen.engines or chosen.peers:
            names = Names(chosen.dns_server, limits.control_timeout_s)
            tls = settings.tls is not None
            for engines in chosen.engines:
                self._finds[engines.name] = partial(find_engines, names, engines, tls)
            for peers in chosen.peers:
                self._finds[peers.name] = partial(find_peers, names, peers, tls)
        self._changing = asyncio.Lock()
        self.members = merged(self._parts.values())
        for source, part in self._parts.items():
            if source != CONFIGURED:
                events.discovery_found(source, part)

    @property
    def follows(self) -> bool:
        """There is something that may change."""
        return self._file is not None or bool(self._finds)

    async def run(self) -> None:
        """Follow all sources until cancelled."""
        async with asyncio.TaskGroup() as group:
            if self._file is not None:
                group.create_task(self._follow_file(self._file))
            for source, find in self._finds.items():
                group.create_task(self._follow_name(source, find))

    async def _follow_file(self, file: Path) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            stamp = await asyncio.to_thread(stamp_of, file)
            if stamp == self._stamp:
                continue
            self._stamp = stamp
            try:
                part = await asyncio.to_thread(read_members, file)
            except ConfigError as exc:
                self._refused(str(file), exc)
                continue
            await self._change(str(file), part)

    async def _follow_name(self, source: str, find: Find) -> None:
        told = False
        while True:
            wait_s = self._interval_s
            try:
                part, ttl_s = await find()
            except PeerUnavailable as exc:
                self._events.discovery_failed(source)
                if not told:  # once for each outage
                    logger.warning("%s keeps its last known members: %s", source, exc.message)
                told = True
            else:
                told = False
                wait_s = min(ttl_s, wait_s)
                await self._change(source, part)
            await asyncio.sleep(max(wait_s, LOOK_S))

    async def _change(self, source: str, part: Members) -> None:
        """Take over what a source says now, as a whole or not at all."""
        async with self._changing:
            if self._parts.get(source) == part or self._turned_down.get(source) == part:
                return
            parts = {**self._parts, source: part}
            try:
                members = merged(parts.values())
                if not members.engines:
                    raise ConfigError("no engine would be left")
                require_key(self._settings, bool(members.peers))
                await self._apply(members)
            except ConfigError as exc:
                self._turned_down[source] = part
                self._refused(source, exc)
                return
            self._turned_down.clear()  # beside other parts it may be right
            self._parts, self.members = parts, members
        logger.info(
            "%s: %d engines and %d prefill instances", source, len(part.engines), len(part.peers)
        )
        self._events.discovery_changed(source, "applied")
        self._events.discovery_found(source, part)

    def _refused(self, source: str, error: ConfigError) -> None:
        logger.error("engines and peers stay as they are: %s: %s", source, error.message)
        self._events.discovery_changed(source, "refused")
