"""A decode agent that is all script, on a thread of its own: it stages what the test gives it.

For engines that run in the test's own process and thread, such as vLLM's.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from prfaas.kvport import EngineConn, PortClosed, PortServer
from prfaas.layout import KvLayout
from prfaas_connect.port.messages import Abort, Fetch, FetchDone, Release

T = TypeVar("T")
Kv = npt.NDArray[Any]
"""[layer][k|v][token][head][dim] of all tokens."""
OFFSET = 4096
WAIT_S = 10.0


@dataclass
class Asked:
    """A Fetch and what became of it."""

    fetch: Fetch
    tokens: npt.NDArray[np.int32]
    offset: int
    released: Release | None = None
    aborted: bool = False
    answered: str = ""
    """Status of the FetchDone."""

    @property
    def ended(self) -> bool:
        """The engine owes nothing more: it released what was staged, or aborted before."""
        if self.released is not None or self.aborted:
            return True
        return self.answered in ("local", "refused") or self.fetch.have == self.fetch.want


@dataclass
class Script:
    """How fetches are answered; may be changed any time."""

    status: str = "staged"
    """Of FetchDone; empty: not before `answer` is called."""
    token_end: int = 0
    """With `partial`."""
    reason: str = ""
    message: str = ""
    chunk_tokens: int = 16
    kv: Callable[[npt.NDArray[np.int32]], Kv] | None = None
    """KV of a prompt; none: zeros."""


class StagingAgent:
    """Owns a port server and the thread it runs on; use as a context manager.

    Extents are never reused, so that late reads and writes show.
    """

    def __init__(self, path: Path, *, staging_bytes: int = 64 << 20, verify: bool = True) -> None:
        self.script = Script()
        self.asked: list[Asked] = []
        self.conn: EngineConn | None = None
        self.engines = 0
        self._path = path
        self._options = {"staging_bytes": staging_bytes, "verify_import": verify}
        self._changed = threading.Condition()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._server: PortServer | None = None
        self._next = OFFSET

    def __enter__(self) -> StagingAgent:
        self._thread.start()
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_S)
        self._loop.close()

    def start(self) -> None:
        """Listen; again after `stop`."""
        self._server = PortServer(
            self._path,
            agent_name="staging-agent",
            ring_bytes=1 << 16,
            on_engine=self._serve,
            **self._options,  # type: ignore[arg-type]
        )
        self._run(self._server.start())

    def stop(self) -> None:
        """Cut the engine and stop listening, as an agent that is killed."""
        server, self._server = self._server, None
        if server is not None:
            self._run(server.close())

    def cut(self) -> None:
        """Cut the engine; it may connect again."""
        conn = self.conn
        if conn is not None:
            self._loop.call_soon_threadsafe(conn.close)

    def wait_for(self, what: Callable[[StagingAgent], T], timeout_s: float = WAIT_S) -> T:
        """The first true value of `what`. Raises AssertionError when none comes in time."""
        with self._changed:
            assert self._changed.wait_for(lambda: what(self), timeout_s), "waited in vain"
            return what(self)

    def answer(self, asked: Asked) -> None:
        """Answer a fetch as the script says now."""
        done: Future[None] = asyncio.run_coroutine_threadsafe(self._answer(asked), self._loop)
        done.result(WAIT_S)

    def extent(self, asked: Asked, end: int) -> memoryview:
        """The staging memory of a fetch up to token `end`, while its engine is connected."""
        assert self.conn is not None
        nbytes = self.conn.layout.session_bytes(asked.fetch.have, end)
        return self.conn.staging[asked.offset : asked.offset + nbytes]

    def _run(self, coroutine: Any) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(WAIT_S)

    def _note(self, change: Callable[[], None]) -> None:
        with self._changed:
            change()
            self._changed.notify_all()

    async def _serve(self, conn: EngineConn) -> None:
        def connected() -> None:
            self.conn, self._next = conn, OFFSET
            self.engines += 1

        self._note(connected)
        try:
            async for message, blob in conn:
                if isinstance(message, Fetch):
                    await self._on_fetch(conn, message, np.frombuffer(blob, dtype="<i4"))
                else:
                    self._note(lambda message=message: self._on_end(message))  # type: ignore[misc]
        finally:
            self._note(lambda: setattr(self, "conn", None))

    async def _on_fetch(
        self, conn: EngineConn, fetch: Fetch, tokens: npt.NDArray[np.int32]
    ) -> None:
        asked = Asked(fetch, tokens.astype(np.int32), self._next)
        self._next += conn.layout.session_bytes(fetch.have, fetch.want)
        self._note(lambda: self.asked.append(asked))
        if self.script.status:
            await self._answer(asked)

    def _on_end(self, message: object) -> None:
        for asked in self.asked:
            if isinstance(message, Release) and message.session == asked.fetch.session:
                assert asked.released is None, f"released twice: {message}"
                asked.released = message
            elif isinstance(message, Abort) and message.session == asked.fetch.session:
                assert not asked.aborted, f"aborted twice: {message}"
                asked.aborted = True

    async def _answer(self, asked: Asked) -> None:
        conn, script = self.conn, self.script
        if conn is None:
            return
        end = {"staged": asked.fetch.want, "partial": script.token_end}.get(script.status, 0)
        if end:
            stage(
                conn.layout,
                conn.staging,
                asked.offset,
                script.kv(asked.tokens) if script.kv else None,
                (asked.fetch.have, end),
                script.chunk_tokens,
            )
        self._note(lambda: setattr(asked, "answered", script.status))
        try:
            conn.send(
                FetchDone(
                    asked.fetch.session,
                    script.status,
                    script.reason,
                    token_end=end,
                    staging_offset=asked.offset,
                    chunk_tokens=script.chunk_tokens,
                    message=script.message,
                )
            )
        except PortClosed:
            return


def stage(
    layout: KvLayout,
    staging: memoryview,
    offset: int,
    kv: Kv | None,
    tokens: tuple[int, int],
    chunk_tokens: int,
) -> None:
    """Lay out KV of the tokens [start, end) as an agent does."""
    if kv is None:
        return
    for extent in layout.extents(*tokens, chunk_tokens):
        rows = np.ascontiguousarray(kv[extent.layer][:, extent.span.start : extent.span.end])
        at = offset + extent.offset
        staging[at : at + extent.nbytes] = rows.view(np.uint8).reshape(-1).data
