"""The log line of each request, handed to the log's handlers many at a time."""

from __future__ import annotations

import asyncio
import logging
from typing import TextIO

import msgspec

from gateway.records import RequestRecord, summary
from gateway.request_spans import RequestSpans
from prfaas.snapshot import Snapshot

LOGGER = logging.getLogger("gateway.request")
LATE_S = 0.1
"""A line is written this much after its request at the latest."""
MAX_LINES = 64
"""With more, what they are put together in is so large that malloc maps it anew each time."""
MAX_SNAPSHOTS = 256

_PLACE = "@@line@@"
"""Of characters that every formatter leaves as they are, and that no prefix of a line has."""
_PLAIN = (logging.StreamHandler, logging.FileHandler)


class RequestLog:
    """Owns the lines that are not written yet, and a timer while there are some; close it with
    `close`, which writes them.

    The lines are those that `logging` would write one by one, which costs more than relaying a
    short answer. Handlers other than plain streams and files get a record for each as ever.
    """

    def __init__(self, spans: RequestSpans | None = None) -> None:
        """`spans` is told of each record too."""
        self._spans = spans
        self._lines: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None
        self._encoder = msgspec.json.Encoder()
        self._snapshots: dict[int, tuple[Snapshot, msgspec.Raw]] = {}

    def add(self, record: RequestRecord) -> None:
        """The record as it is now."""
        if self._spans is not None:
            self._spans.add(record)
        if not LOGGER.isEnabledFor(logging.INFO):
            return
        line = summary(record)
        line.snapshot = self._shared(line.snapshot)
        self._lines.append(self._encoder.encode(line))
        if len(self._lines) >= MAX_LINES:
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LATE_S, self.flush)

    def _shared(self, snapshot: Snapshot | msgspec.Raw | None) -> Snapshot | msgspec.Raw | None:
        """Already in JSON where it is the same object as of an earlier request."""
        if not isinstance(snapshot, Snapshot) or snapshot.remotes:
            return snapshot
        known = self._snapshots.get(id(snapshot))
        if known is None or known[0] is not snapshot:
            if len(self._snapshots) >= MAX_SNAPSHOTS:
                self._snapshots.clear()
            known = (snapshot, msgspec.Raw(self._encoder.encode(snapshot)))
            self._snapshots[id(snapshot)] = known
        return known[1]

    def flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        lines, self._lines = self._lines, []
        if lines:
            _write(b"\n".join(lines).decode())  # JSON holds no line breaks of its own

    def close(self) -> None:
        self.flush()


def _write(lines: str) -> None:
    """To every handler that `logging` would call."""
    logger: logging.Logger | None = LOGGER
    while logger is not None:
        for handler in logger.handlers:
            if handler.level > logging.INFO:
                continue
            if type(handler) in _PLAIN and not handler.filters:
                assert isinstance(handler, logging.StreamHandler)
                _write_at_once(handler, lines)
            else:
                for line in lines.split("\n"):
                    handler.handle(_record(line))
        logger = logger.parent if logger.propagate else None


def _write_at_once(handler: logging.StreamHandler[TextIO], lines: str) -> None:
    """What comes before and after a line is formatted once for all of them."""
    before, _, after = handler.format(_record(_PLACE)).partition(_PLACE)
    end = after + handler.terminator
    text = before + lines.replace("\n", end + before) + end
    handler.acquire()
    try:
        handler.stream.write(text)
        handler.flush()
    except (OSError, ValueError):  # a full disk, a closed stream: as logging takes it
        handler.handleError(_record(text))
    finally:
        handler.release()


def _record(message: str) -> logging.LogRecord:
    # Not from a line of ours to a format string: it holds what clients sent.
    return LOGGER.makeRecord(LOGGER.name, logging.INFO, __file__, 0, message, (), None)
