"""One session at P: from admission to the seal, over any transport that takes bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prfaas.clock import Clock
from prfaas.codecs import Codec, encode
from prfaas.errors import BY_KIND, EngineUnavailable, PrfaasError, ProtocolError, from_kind
from prfaas.frames import FrameFlag
from prfaas.ledger import Piece, piece_digest
from prfaas.placement import token_rows
from prfaas.session_messages import PrefillReport
from prfaas.sessions import SendSession
from prfaas_connect.port.messages import PrefillEnd
from remote_prefill.exports import Export, ExportHub, RecordView
from remote_prefill.outbox import (
    FIRST_MESSAGE_BYTES,
    FIRST_MESSAGES,
    MESSAGE_BYTES,
    Batch,
    Encoded,
    Outbox,
)
from remote_prefill.retention import Ticket

Write = Callable[[bytes], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class SenderOptions:
    """What all sessions of an agent share."""

    queue_heartbeat_s: float
    """How often a queued session hears its position."""
    clock: Clock


class Sender:
    """Runs one admitted session: prefill at the engine, encode, send, seal.

    Borrows the ticket, hub and executor; `run` leaves nothing behind however it ends.
    """

    def __init__(
        self,
        session: SendSession,
        *,
        ticket: Ticket,
        hub: ExportHub,
        codec: Codec,
        executor: Executor,
        write: Write,
        options: SenderOptions,
    ) -> None:
        self.session = session
        self._ticket = ticket
        self._hub = hub
        self._codec = codec
        self._executor = executor
        self._write = write
        self._options = options
        self._outbox = Outbox()
        self._encoding: set[Future[Encoded]] = set()
        self._cut_bytes = 0
        self._sent_wire_bytes = 0
        self._last_layer_s = 0.0
        self._sent_before_last_layer = 0

    async def run(self) -> None:
        """To the seal. Raises PrfaasError for what the other side has to be told."""
        await self._wait_for_turn()
        request = self.session.request
        export = self._hub.start(
            request.tokens,
            epoch=self.session.epoch,
            send_from=request.send_from,
            salt=request.salt,
            use_cache=request.use_cache,
        )
        collector = asyncio.ensure_future(self._collect(export))
        try:
            if request.hold_until_sealed:
                await asyncio.wait({collector})
            while (batch := await self._outbox.take()) is not None:
                await self._send(batch)
            end = await collector
            await self._write(self.session.seal(self._report(end)).serialize())
        finally:
            collector.cancel()
            for future in self._encoding:
                future.cancel()
            export.cancel()
            await asyncio.gather(collector, return_exceptions=True)

    async def _wait_for_turn(self) -> None:
        """ACCEPT with the place in the queue, again and again, until it is 0."""
        events = (self._ticket.granted, self._hub.closed)
        waits = [asyncio.ensure_future(event.wait()) for event in events]
        try:
            while True:
                position = self._ticket.position
                accept = self.session.accept(position, self._ticket.nbytes)
                await self._write(accept.serialize())
                if position == 0:
                    return
                await asyncio.wait(
                    waits,
                    timeout=self._options.queue_heartbeat_s,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if self._hub.closed.is_set():
                    raise EngineUnavailable("the prefill engine has disconnected")
        finally:
            for wait in waits:
                wait.cancel()

    async def _collect(self, export: Export) -> PrefillEnd:
        """Take the engine's records as they come; an error goes to `run` through the outbox."""
        records = 0
        try:
            while True:
                event = await export.next()
                if isinstance(event, PrefillEnd):
                    if event.status != "done":
                        raise _engine_error(event)
                    if event.records != records:
                        raise ProtocolError(
                            f"the engine counts {event.records} records, {records} came"
                        )
                    self._outbox.end()
                    return event
                records += 1
                self._last_layer_s = self._options.clock.now()
                self._sent_before_last_layer = self._sent_wire_bytes
                self._encode(event)
        except PrfaasError as exc:
            self._outbox.fail(exc)
            raise
        except Exception as exc:
            self._outbox.fail(PrfaasError(f"cannot encode what the engine exported: {exc!r}"))
            raise

    def _encode(self, view: RecordView) -> None:
        """Start encoding a record, cut to what one message should hold."""
        piece, nbytes = view.piece, view.record.nbytes
        early = self._cut_bytes < FIRST_MESSAGES * FIRST_MESSAGE_BYTES
        self._cut_bytes += nbytes
        try:
            cuts = self.session.claim(
                piece, nbytes, FIRST_MESSAGE_BYTES if early else MESSAGE_BYTES
            )
        except PrfaasError:
            view.done()
            raise
        loop = asyncio.get_running_loop()
        item_bytes = self.session.ledger.layout.groups[piece.group].item_bytes
        left = len(cuts)

        def encoded(future: Future[Encoded]) -> None:
            nonlocal left
            self._encoding.discard(future)
            left -= 1
            if left == 0:
                view.done()

        for cut in cuts:
            future = self._executor.submit(
                _encode_cut, self._codec, view.raw, piece, cut, item_bytes, view.record.cached
            )
            self._encoding.add(future)
            self._outbox.put(asyncio.wrap_future(future))
            future.add_done_callback(lambda f: loop.call_soon_threadsafe(encoded, f))

    async def _send(self, batch: Batch) -> None:
        flags = FrameFlag.APP_LIMITED if batch.app_limited else FrameFlag.NONE
        frames = [
            self.session.kv(
                e.piece,
                raw_bytes=e.raw_bytes,
                digest=e.digest,
                codec=e.codec,
                payload=e.payload,
                flags=flags | FrameFlag.CACHED if e.cached else flags,
            )
            for e in batch.pieces
        ]
        await self._write(b"".join([frame.serialize() for frame in frames]))
        self._sent_wire_bytes = self.session.wire_bytes

    def _report(self, end: PrefillEnd) -> PrefillReport:
        return PrefillReport(
            cached_tokens=end.cached_tokens,
            computed_tokens=end.computed_tokens,
            queue_s=end.queue_s,
            compute_s=end.compute_s,
            last_layer_s=self._last_layer_s,
            wire_bytes_before_last_layer=self._sent_before_last_layer,
        )


def _encode_cut(
    codec: Codec,
    raw: npt.NDArray[np.uint8],
    piece: Piece,
    cut: Piece,
    item_bytes: int,
    cached: bool,
) -> Encoded:
    """In a codec thread: the tokens of `cut` out of the record `piece`."""
    start = cut.token_start - piece.token_start
    stop = cut.token_end - piece.token_start
    rows = token_rows(raw, piece.token_end - piece.token_start, start, stop)
    codec_id, payload = encode(codec, rows, item_bytes)
    return Encoded(cut, rows.nbytes, piece_digest(rows.data), codec_id, payload, cached)


def _engine_error(end: PrefillEnd) -> PrfaasError:
    """Why the engine did not finish: its reason where that is one of our kinds."""
    message = f"the prefill engine ended the session: {end.status} {end.reason}".rstrip()
    kind = end.reason.partition(":")[0]
    if kind in BY_KIND:
        return from_kind(kind, message)
    return EngineUnavailable(message)
