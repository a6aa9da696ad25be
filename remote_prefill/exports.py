"""What the engine beside an agent exports: prefills under way, and its ring freed in order.

Both agents use it: P's for every session, D's for the numeric probe.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque

import numpy as np
import numpy.typing as npt

from prfaas.errors import EngineUnavailable
from prfaas.kvport import EngineConn, PortClosed
from prfaas.ledger import Piece
from prfaas_connect.port.messages import PrefillCancel, PrefillEnd, PrefillStart, Record, RingFree

log = logging.getLogger(__name__)


class RecordView:
    """One record whose bytes lie in the ring until `done`; whoever got it calls that once."""

    __slots__ = ("_hub", "finished", "raw", "record")

    def __init__(self, hub: ExportHub, record: Record, raw: npt.NDArray[np.uint8]) -> None:
        self._hub = hub
        self.record = record
        self.raw = raw
        self.finished = False

    @property
    def piece(self) -> Piece:
        r = self.record
        return Piece(
            r.chunk, r.layer, r.group, r.token_start, r.token_end, r.head_start, r.head_end
        )

    def done(self) -> None:
        """The bytes are copied out; idempotent."""
        self.finished = True
        self._hub.free_finished()


class Export:
    """One prefill at the engine. Ends with PrefillEnd, or when the engine leaves.

    The owner takes `next` until PrefillEnd, or calls `cancel`; what still comes then is dropped.
    """

    def __init__(self, hub: ExportHub, key: str, epoch: int) -> None:
        self.key = key
        self.epoch = epoch
        self.cancelled = False
        self._hub = hub
        self._events: asyncio.Queue[RecordView | PrefillEnd | EngineUnavailable] = asyncio.Queue()

    async def next(self) -> RecordView | PrefillEnd:
        """The next record, or the end. Raises EngineUnavailable when the engine has left."""
        event = await self._events.get()
        if isinstance(event, EngineUnavailable):
            raise event
        return event

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

    def __init__(self, conn: EngineConn) -> None:
        self._conn = conn
        self._ring = np.frombuffer(conn.ring, dtype=np.uint8)
        self._exports: dict[tuple[str, int], Export] = {}
        self._in_ring: deque[RecordView] = deque()
        self._numbers = itertools.count(1)
        self.closed = asyncio.Event()
        self.stray_records = 0
        """Records of no known export: the engine is behind, or wrong."""

    def __len__(self) -> int:
        return len(self._exports)

    @property
    def unfreed_records(self) -> int:
        return len(self._in_ring)

    def start(
        self, tokens: bytes, *, epoch: int, send_from: int, salt: str, use_cache: bool
    ) -> Export:
        """Have the engine prefill `tokens` (int32 ids). Raises EngineUnavailable."""
        export = Export(self, f"x{next(self._numbers)}", epoch)
        self._conn.send(PrefillStart(export.key, epoch, send_from, salt, use_cache), tokens)
        self._exports[export.key, epoch] = export
        return export

    def cancel(self, export: Export) -> None:
        """Tell the engine, unless it has ended this one already."""
        if (export.key, export.epoch) in self._exports:
            try:
                self._conn.send(PrefillCancel(export.key, export.epoch))
            except PortClosed:
                self._exports.pop((export.key, export.epoch), None)

    def on_record(self, record: Record) -> None:
        """A record came; one outside the ring ends the connection."""
        end = record.offset + record.nbytes
        if record.offset < 0 or record.nbytes <= 0 or end > self._ring.nbytes:
            log.error("engine exported bytes outside its ring: %s", record)
            self._conn.close()
            return
        view = RecordView(self, record, self._ring[record.offset : end])
        self._in_ring.append(view)
        export = self._exports.get((record.session, record.epoch))
        if export is None:
            self.stray_records += 1
            view.done()
        else:
            export.put(view)

    def on_end(self, end: PrefillEnd) -> None:
        """The engine has ended an export."""
        export = self._exports.pop((end.session, end.epoch), None)
        if export is not None:
            export.put(end)

    def free_finished(self) -> None:
        """Give the oldest finished records' bytes back to the engine: the ring frees in order."""
        count = 0
        while self._in_ring and self._in_ring[0].finished:
            self._in_ring.popleft()
            count += 1
        if count and not self._conn.closed:
            try:
                self._conn.send(RingFree(count))
            except PortClosed:
                return

    def close(self) -> None:
        """The engine is gone: every export under way fails with EngineUnavailable."""
        self.closed.set()
        exports, self._exports = self._exports, {}
        for export in exports.values():
            export.put(EngineUnavailable("the prefill engine has disconnected"))
