"""Follows a file and DNS names for what they list, and hands over whatever is good."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from prfaas.errors import ConfigError, PeerUnavailable
from prfaas.yaml_text import parse_yaml

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""Between two looks at the file, and the least between two questions to a DNS server."""
CONFIGURED = "settings"
MAX_BYTES = 4 << 20

Stamp = tuple[int, int, int]
Part = TypeVar("Part")
"""All that one source lists; equal where nothing has changed, `str` says what it is for the log."""
Told = TypeVar("Told", contravariant=True)


class FollowEvents(Protocol[Told]):
    """Who counts what happens."""

    def discovery_changed(self, source: str, result: str) -> None:
        """`applied` or `refused`."""
        ...

    def discovery_failed(self, source: str) -> None:
        """It could not be asked; the last known set stays."""
        ...

    def discovery_found(self, source: str, part: Told) -> None: ...


class Following(Generic[Part]):
    """Owns what each source last said. `run` follows them until it is cancelled.

    A source that fails, or says what cannot be, keeps what it said before; whole sets change, or
    nothing does.
    """

    def __init__(
        self,
        configured: Part,
        file: Path | None,
        read: Callable[[Path], Part],
        finds: Mapping[str, Callable[[], Awaitable[tuple[Part, float]]]],
        interval_s: float,
        take: Callable[[tuple[Part, ...]], Awaitable[None]],
        events: FollowEvents[Part],
        kept: Path | None = None,
        check: Callable[[tuple[Part, ...]], object] = tuple,
    ) -> None:
        """`finds`: DNS names, each with what it stands for and for how long (PeerUnavailable: not
        known). `take` gets what all sources say, and refuses it with ConfigError. `kept`: where the
        last good text of the file is put for who comes after this process, and begins with that
        where the file is no good, or `check` refuses it, by then. Raises ConfigError for a file
        that is no good at the start and was not good before.
        """
        self._file = file
        self._read = read
        self._kept = kept
        self._finds = finds
        self._interval_s = interval_s
        self._take = take
        self._events = events
        self._stamp = stamp_of(file) if file is not None else None
        self._parts = {CONFIGURED: configured}
        if file is not None:
            self._parts[str(file)] = self._first(file, check)
            events.discovery_found(str(file), self._parts[str(file)])
        self._turned_down: dict[str, Part] = {}
        self._changing = asyncio.Lock()

    def _first(self, file: Path, check: Callable[[tuple[Part, ...]], object]) -> Part:
        """Raises ConfigError."""
        before = self._kept is not None and self._kept.exists()
        try:
            part = self._read(file)
            if before:
                check((*self._parts.values(), part))
        except ConfigError as exc:
            if not before or self._kept is None:
                raise
            part = self._read(self._kept)
            self._refused(str(file), exc)
        else:
            self._keep(file, part)
        return part

    @property
    def parts(self) -> tuple[Part, ...]:
        """What each source says."""
        return tuple(self._parts.values())

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
                part = await asyncio.to_thread(self._read, file)
            except ConfigError as exc:
                self._refused(str(file), exc)
                continue
            if await self._change(str(file), part):
                await asyncio.to_thread(self._keep, file, part)

    async def _follow_name(
        self, source: str, find: Callable[[], Awaitable[tuple[Part, float]]]
    ) -> None:
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

    async def _change(self, source: str, part: Part) -> bool:
        """Take over what a source says now, as a whole or not at all; whether it was."""
        async with self._changing:
            if self._parts.get(source) == part or self._turned_down.get(source) == part:
                return False
            parts = {**self._parts, source: part}
            try:
                await self._take(tuple(parts.values()))
            except ConfigError as exc:
                self._turned_down[source] = part
                self._refused(source, exc)
                return False
            self._turned_down.clear()  # beside other parts it may be right
            self._parts = parts
        logger.info("%s: %s", source, part)
        self._events.discovery_changed(source, "applied")
        self._events.discovery_found(source, part)
        return True

    def _keep(self, file: Path, part: Part) -> None:
        """The file's text, if it still says this."""
        if self._kept is None:
            return
        fresh = self._kept.with_name(f"new-{self._kept.name}")
        try:
            with file.open("rb") as opened:
                raw = opened.read(MAX_BYTES + 1)
            with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as copy:
                copy.write(raw)
            if self._read(fresh) == part:
                fresh.replace(self._kept)
        except OSError as exc:
            logger.error("cannot keep a copy of %s: %s", file, exc.strerror)
        except ConfigError as exc:  # it has just changed again, and is read again
            logger.warning("no copy of %s is kept: %s", file, exc.message)

    def _refused(self, source: str, error: ConfigError) -> None:
        logger.error("engines and peers stay as they are: %s: %s", source, error.message)
        self._events.discovery_changed(source, "refused")


def read_mapping(file: Path, what: str) -> dict[str, object]:
    """YAML or JSON with `what` at its top. Raises ConfigError naming the file."""
    try:
        with file.open("rb") as opened:
            raw = opened.read(MAX_BYTES + 1)
    except OSError as exc:
        raise ConfigError(f"cannot read {file}: {exc.strerror}") from exc
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"{file} is larger than {MAX_BYTES} bytes")
    data = parse_yaml(raw, file)
    if not isinstance(data, dict):  # an empty file is one that is just being written
        raise ConfigError(f"{file}: the top level must be a mapping with {what}")
    return data


def stamp_of(file: Path) -> Stamp | None:
    """Changes when the file does, also behind a link that is moved; None where there is none."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
