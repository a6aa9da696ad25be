"""What the engine beside an agent exports: prefills under way, and its rings freed in order.

Both agents use it: P's for every session, D's for the numeric probe. An engine of several
processes has a ring for each. One that takes work only over its own API is driven through it: the
port announces the export, the API brings the tokens.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections import deque
from typing import Protocol

import numpy as np
import numpy.typing as npt

from prfaas.errors import EngineUnavailable, PrfaasError
from prfaas.kvport import EngineConn, PortClosed, RankConn
from prfaas.ledger import Piece
from prfaas_connect.port.messages import (
    PortError,
    PortMessage,
    PrefillCancel,
    PrefillEnd,
    PrefillStart,
    PrepareFor,
    Record,
    RingFree,
)

log = logging.getLogger(__name__)


class Submitter(Protocol):
    """How an engine gets the tokens of a prefill where the port does not bring them."""

    async def submit(
        self, tokens: bytes, *, session: str, epoch: int, salt: str, use_cache: bool
    ) -> None:
        """Until the engine has computed them. Raises PrfaasError; cancelling ends the work."""
        ...


class RingConn(Protocol):
    """What is needed of a connection that brings records: `EngineConn`, `RankConn`."""

    ring: memoryview
    closed: bool

    def send(self, message: PortMessage, blob: bytes | memoryview = b"") -> None: ...

    def close(self) -> None: ...


class RecordView:
    """One record whose bytes lie in a ring until `done`; whoever got it calls that once."""

    __slots__ = ("_books", "finished", "raw", "record")

    def __init__(self, books: _RingBooks, record: Record, raw: npt.NDArray[np.uint8]) -> None:
        self._books = books
        self.record = record
        self.raw = raw
        self.finished = False

    @property
    def piece(self) -> Piece:
        r = self.record
        return Piece(
            r.chunk, r.layer, r.group, r.token_start, r.token_end, r.head_start, r.head_end
        )

    @property
    def cached(self) -> bool:
        return self.record.cached

    @property
    def codec(self) -> str:
        return self.record.codec

    def done(self) -> None:
        """The bytes are copied out; idempotent."""
        self.finished = True
        self._books.free_finished()


class _RingBooks:
    """One ring: what lies in it, freed in the order it came."""

    def __init__(self, conn: RingConn) -> None:
        self._conn = conn
        self._ring = np.frombuffer(conn.ring, dtype=np.uint8)
        self._in_ring: deque[RecordView] = deque()

    def __len__(self) -> int:
        return len(self._in_ring)

    def view(self, record: Record) -> RecordView | None:
        """None, and the end of the connection, where it lies outside the ring."""
        end = record.offset + record.nbytes
        if record.offset < 0 or record.nbytes <= 0 or end > self._ring.nbytes:
            log.error("engine exported bytes outside its ring: %s", record)
            self._conn.close()
            return None
        view = RecordView(self, record, self._ring[record.offset : end])
        self._in_ring.append(view)
        return view

    def free_finished(self) -> None:
        """Give the oldest finished records' bytes back to the engine."""
        count = 0
        while self._in_ring and self._in_ring[0].finished:
            self._in_ring.popleft()
            count += 1
        if count and not self._conn.closed:
            try:
                self._conn.send(RingFree(count))
            except PortClosed:
                return


class Export:
    """One prefill at the engine. Ends with PrefillEnd, or when the engine leaves.

    The owner takes `next` until PrefillEnd, or calls `cancel`; what still comes then is dropped.
    """

    def __init__(self, hub: ExportHub, key: str, epoch: int) -> None:
        self.key = key
        self.epoch = epoch
        self.cancelled = False
        self.records = 0
        self.last: PrefillEnd | None = None
        """The engine's last word, while records of other ranks are still on their way."""
        self.task: asyncio.Task[None] | None = None
        """Submits its tokens."""
        self.prepared_for = ""
        """What the engine was told."""
        self._hub = hub
        self._events: asyncio.Queue[RecordView | PrefillEnd | EngineUnavailable] = asyncio.Queue()

    async def next(self) -> RecordView | PrefillEnd:
        """The next record, or the end. Raises EngineUnavailable when the engine has left."""
        event = await self._events.get()
        if isinstance(event, EngineUnavailable):
            raise event
        return event

    def prepare_for(self, codec: str) -> None:
        """Have the engine prepare records that are begun from now on for a codec, where it can."""
        self._hub.prepare_for(self, codec)

    def cancel(self) -> None:
        """Stop the engine's work and drop what it exported. Idempotent, also after the end."""
        if not self.cancelled:
            self.cancelled = True
            while not self._events.empty():
                event = self._events.get_nowait()
                if isinstance(event, RecordView):
                    event.done()
            self._hub.cancel(self)

    def put(self, event: RecordView | PrefillEnd | EngineUnavailable) -> None:
        """For the hub. Bounded by the ring: every record holds bytes of it."""
        if not self.cancelled:
            self._events.put_nowait(event)
        elif isinstance(event, RecordView):
            event.done()


class ExportHub:
    """All exports of one engine connection. `close` when the connection has ended."""

    def __init__(self, conn: EngineConn, submitter: Submitter | None = None) -> None:
        self._conn = conn
        self._submitter = submitter
        self._exports: dict[tuple[str, int], Export] = {}
        self._own_ring = _RingBooks(conn)
        self._rank_rings: dict[RingConn, _RingBooks] = {}
        self._numbers = itertools.count(1)
        self.closed = asyncio.Event()
        self.stray_records = 0
        """Records of no known export: the engine is behind, or wrong."""

    def __len__(self) -> int:
        return len(self._exports)

    @property
    def submits(self) -> bool:
        """Whether the engine gets work over its own API, whatever its roles."""
        return self._submitter is not None

    @property
    def unfreed_records(self) -> int:
        return len(self._own_ring) + sum(map(len, self._rank_rings.values()))

    def start(
        self, tokens: bytes, *, epoch: int, send_from: int, salt: str, use_cache: bool
    ) -> Export:
        """Have the engine prefill `tokens` (int32 ids). Raises EngineUnavailable."""
        # Whoever can reach the engine's API could otherwise name an export that is not theirs.
        secret = f"-{secrets.token_hex(8)}" if self._submitter else ""
        export = Export(self, f"x{next(self._numbers)}{secret}", epoch)
        self._conn.send(PrefillStart(export.key, epoch, send_from, salt, use_cache), tokens)
        self._exports[export.key, epoch] = export
        if self._submitter is not None:
            work = self._submit(self._submitter, export, tokens, salt, use_cache)
            export.task = asyncio.create_task(work, name=f"submit {export.key}")
        return export

    def prepare_for(self, export: Export, codec: str) -> None:
        """Of an engine with an accelerator, unless it has ended this one already."""
        named = codec if codec in self._conn.hello.encodes else ""
        if named != export.prepared_for and (export.key, export.epoch) in self._exports:
            export.prepared_for = named
            try:
                self._conn.send(PrepareFor(export.key, export.epoch, named))
            except PortClosed:
                return  # Its end comes by itself.

    async def _submit(
        self, submitter: Submitter, export: Export, tokens: bytes, salt: str, use_cache: bool
    ) -> None:
        try:
            await submitter.submit(
                tokens, session=export.key, epoch=export.epoch, salt=salt, use_cache=use_cache
            )
        except PrfaasError as exc:
            log.warning("the engine did not take a prefill: %s", exc.message)
            reason = f"{exc.kind}: {exc.message}"
            self._withdraw(export)
            self._finish(export, PrefillEnd(export.key, export.epoch, "failed", reason=reason))

    def cancel(self, export: Export) -> None:
        """Tell the engine, unless it has ended this one already."""
        if export.task is not None:
            export.task.cancel()
        if self._exports.get((export.key, export.epoch)) is not export:
            return
        if export.last is not None or not self._withdraw(export):
            self._exports.pop((export.key, export.epoch), None)

    def _withdraw(self, export: Export) -> bool:
        try:
            self._conn.send(PrefillCancel(export.key, export.epoch))
        except PortClosed:
            return False
        return True

    async def serve_rank(self, rank: RankConn) -> None:
        """Take the records of one more process of the engine, until it leaves; then the engine's
        connection has no use either. Raises PortError for what else it says.
        """
        self._rank_rings[rank] = _RingBooks(rank)
        try:
            async for message, _ in rank:
                if not isinstance(message, Record):
                    raise PortError(f"{message.TYPE} is not for a rank to say")
                self.on_record(message, rank)
        finally:
            del self._rank_rings[rank]
            self._conn.close()

    def on_record(self, record: Record, rank: RankConn | None = None) -> None:
        """A record came; one outside its ring ends the connection."""
        books = self._own_ring if rank is None else self._rank_rings[rank]
        view = books.view(record)
        if view is None:
            return
        export = self._exports.get((record.session, record.epoch))
        if export is None:
            self.stray_records += 1
            view.done()
            return
        export.records += 1
        export.put(view)
        if export.last is not None and export.records >= export.last.records:
            self._finish(export, export.last)

    def on_end(self, end: PrefillEnd) -> None:
        """The engine has ended an export. What its ranks have sent may come after."""
        export = self._exports.get((end.session, end.epoch))
        if export is None:
            return
        if end.status == "done" and export.records < end.records and self._rank_rings:
            if export.cancelled:
                self._exports.pop((end.session, end.epoch))
            export.last = end
        else:
            self._finish(export, end)

    def _finish(self, export: Export, end: PrefillEnd) -> None:
        if self._exports.pop((export.key, export.epoch), None) is export:
            export.put(end)

    def close(self) -> None:
        """The engine is gone: every export under way fails with EngineUnavailable."""
        self.closed.set()
        exports, self._exports = self._exports, {}
        for export in exports.values():
            if export.task is not None:
                export.task.cancel()
            export.put(EngineUnavailable("the prefill engine has disconnected"))
