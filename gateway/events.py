"""Whole events past Python: what `gateway._events`, in C, does for streams where it was built.

Plain chunks of an engine's answer are taken apart here. Where each piece of it is whole events, it
goes to its client without a parser, a splitter or a sink in between. What is not plain (cut
chunks or events, extensions, [DONE], errors, the end) is left to those, as all are without the
extension, and with `gateway.native_events: false`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol


class Took(IntEnum):
    """What a channel did with a piece."""

    LEFT = 0
    TAKEN = 1
    SLOW = 2
    """Taken, and nothing more before the client has been waited for."""


class Chunks(Protocol):
    """Where a chunked body is, told by what the parser reads of it."""

    @property
    def between(self) -> bool:
        """A chunk begins next; False also where that is not known any more."""
        ...

    def seen(self, data: bytes, /) -> None:
        """The parser reads this."""
        ...

    def unpack(self, data: bytes, /) -> tuple[bytes, bytes]:
        """The payload of the whole plain chunks that it begins with, where a chunk begins, and what
        is left for the parser.
        """
        ...


class Channel(Protocol):
    """The way to one client, for as long as nothing is in it. Close it with `close`."""

    open: bool
    """The client takes more; its side says False when it does not."""
    whole: bool
    """What went before is whole events, and neither the end nor an error."""

    @property
    def said_at(self) -> float:
        """`at` of the last piece that it took; 0 where there was none."""
        ...

    def take(self, chunks: Chunks, data: bytes, at: float, /) -> int:
        """What has just come, written in a chunk of our own; as in `Took`, and LEFT where Python
        has to see it. Raises what writing and telling raise.
        """
        ...

    def close(self) -> None:
        """Tell the gaps that have not been told; nothing is taken after this."""
        ...


@dataclass(slots=True)
class Gaps:
    """How a channel tells of events."""

    now: Callable[[], float]
    last_at: Callable[[], float]
    """When the last event before came."""
    note: Callable[[list[float], float], None]
    """Gets the gaps before each of the latest events, and when the last of them came; some dozen
    at a time, and the rest when the channel is closed."""


class Native(Protocol):
    """`gateway._events`."""

    def Chunks(self) -> Chunks: ...

    def Channel(
        self,
        write: Callable[[bytes], None],
        is_closing: Callable[[], bool],
        now: Callable[[], float],
        note: Callable[[list[float], float], None],
        last_at: float,
        /,
    ) -> Channel: ...


def _load() -> Native | None:
    try:
        loaded: Native = importlib.import_module("gateway._events")
    except ImportError:
        return None
    return loaded


native = _load()
"""None where the package was built without a C compiler."""
