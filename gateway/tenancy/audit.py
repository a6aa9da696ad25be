"""The audit log: who asked for what and got what, a line each, without anything of a prompt."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

logger = logging.getLogger(__name__)

LATE_S = 0.1
"""A line is written this much after its request at the latest."""
MAX_LINES = 256
MAX_HELD = 10_000
"""Lines kept while the file cannot be written; more are lost, and counted."""


class AuditLine(msgspec.Struct, frozen=True, omit_defaults=False):
    """One request. Nothing here comes out of a body, and of a header only the request's id."""

    time: float
    request_id: str
    trace_id: str
    tenant: str
    """Empty where no valid key came."""
    key_id: str
    api: str
    status: str
    error: str
    """Kind of the error; empty: none."""
    limit: str
    """Which of the tenant's limits refused it; empty: none."""
    engine: str
    target: str
    peers: tuple[str, ...]
    """That its prompt may have been sent to: those of its plan."""
    kv_quality: str
    prompt_tokens: int
    completion_tokens: int
    seconds: float


class AuditLog:
    """Owns the lines that are not written yet, and a timer while there are some; close it with
    `close`, which writes them.

    The file is opened for each write, so whoever rotates it need tell nobody.
    """

    def __init__(self, path: Path, failed: Callable[[int], None]) -> None:
        """`failed` hears how many lines were lost. Raises OSError where it cannot be written."""
        self._path = path
        self._failed = failed
        self._lines: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None
        self._encoder = msgspec.json.Encoder()
        self._broken = False
        os.close(self._open())

    def add(self, line: AuditLine) -> None:
        self._lines.append(self._encoder.encode(line) + b"\n")
        if len(self._lines) >= MAX_LINES and not self._broken:
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LATE_S, self.flush)

    def flush(self) -> None:
        """Write what there is; what cannot be written is tried again with the next line."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._lines:
            return
        data = b"".join(self._lines)
        try:
            handle = self._open()
            try:
                # In one call, so that lines of several processes do not mix.
                written = os.write(handle, data)
            finally:
                os.close(handle)
            if written < len(data):
                self._lines = [data[written:]]
                raise OSError(errno.ENOSPC, "the disk took only a part")
        except OSError as exc:
            if not self._broken:
                logger.error("the audit log %s cannot be written: %s", self._path, exc.strerror)
            self._broken = True
            lost = len(self._lines) - MAX_HELD
            if lost > 0:
                del self._lines[:lost]
                self._failed(lost)
            return
        if self._broken:
            logger.info("the audit log %s can be written again", self._path)
        self._broken = False
        self._lines.clear()

    def close(self) -> None:
        self.flush()
        if self._lines:
            self._failed(len(self._lines))
            self._lines.clear()

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
