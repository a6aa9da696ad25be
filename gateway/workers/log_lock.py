"""Lines of several processes in one stream: each is written whole."""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from pathlib import Path


class LogLock:
    """A handler's lock that other processes respect too: a batch of lines is longer than what a
    pipe takes at once. Owns a file handle of its own, for as long as the process lives.
    """

    def __init__(self, path: Path) -> None:
        self._inner = threading.RLock()
        self._depth = 0
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def acquire(self) -> None:
        self._inner.acquire()
        self._depth += 1
        if self._depth == 1:
            fcntl.flock(self._file, fcntl.LOCK_EX)

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            fcntl.flock(self._file, fcntl.LOCK_UN)
        self._inner.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *exc: object) -> None:
        self.release()


def share_handlers(path: Path) -> None:
    """Let the root's handlers take turns with those of the other processes."""
    lock = LogLock(path)
    for handler in logging.getLogger().handlers:
        handler.lock = lock  # type: ignore[assignment]
