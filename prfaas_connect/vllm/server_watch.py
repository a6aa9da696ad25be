"""Notices that vLLM's server is gone: its engine may outlive it, which then serves nobody."""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)

INTERVAL_S = 1.0


class ServerWatch:
    """Owns a thread that calls `gone` once the process that started this one has ended.

    Only where this process is a child of a server's, as vLLM's engine is; `close` ends the thread.
    """

    def __init__(self, gone: Callable[[], None], *, interval_s: float = INTERVAL_S) -> None:
        self._gone = gone
        self._interval_s = interval_s
        self._server = os.getppid()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if multiprocessing.parent_process() is not None:
            self._thread = threading.Thread(target=self._watch, name="server-watch", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Idempotent."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(self._interval_s):
            if os.getppid() != self._server:
                log.error(
                    "vLLM's server (process %d) is gone and has left its engine (process %d) "
                    "behind, which serves nobody and keeps its memory: it leaves the agent to "
                    "the next vLLM; end it",
                    self._server,
                    os.getpid(),
                )
                self._gone()
                return
