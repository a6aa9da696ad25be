"""One session's work at P, from its turn to the seal; what it encodes leaves by lanes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace

from prfaas.clock import Clock
from prfaas.codecs import Codec, span_of
from prfaas.errors import EngineUnavailable, PrfaasError, ProtocolError
from prfaas.frames import Frame
from prfaas.interfaces import KvRecord, KvSource
from prfaas.ledger import Piece
from prfaas.send_session import SendSession, SendState
from prfaas.session_messages import PrefillReport
from remote_prefill.codec_choice import CodecChoice
from remote_prefill.encoding import (
    Batch,
    Encoded,
    Held,
    SpanGather,
    copy_out,
    encode_batch,
    encode_span,
    prepared_bytes,
)
from remote_prefill.retention import Ticket

BATCH_BYTES = 1 << 20
"""As many raw bytes are encoded in one go where so many wait."""


@dataclass(frozen=True, slots=True)
class SenderOptions:
    """What all sessions of an agent share."""

    queue_heartbeat_s: float
    """How often a queued session hears its position."""
    lease_s: float
    clock: Clock


class Sender:
    """Runs one admitted session: its turn, KV out of its source, encoding, seal.

    Borrows the ticket and executor; `start` opens the source when it is the session's turn, `gone`
    is set where there is none any more. `run` leaves nothing behind however it ends.
    """

    def __init__(
        self,
        session: SendSession,
        *,
        ticket: Ticket,
        start: Callable[[], KvSource],
        gone: asyncio.Event,
        choice: CodecChoice,
        executor: Executor,
        tell: Callable[[Frame], None],
        ready: Callable[[], None],
        options: SenderOptions,
    ) -> None:
        self.session = session
        self._ticket = ticket
        self._start = start
        self._gone = gone
        self._choice = choice
        self._executor = executor
        self._tell = tell
        self._ready = ready
        self._options = options
        self._groups = session.ledger.layout.groups
        self._waiting: Batch = []
        """To be encoded, and not yet given to a codec thread."""
        self._waiting_bytes = 0
        self._spans = SpanGather()
        self._encoding: set[Future[list[Encoded]]] = set()
        self._encoded = asyncio.Event()
        self._preferred = ""
        """What the source was last told."""
        self._error: Exception | None = None

    async def run(self) -> None:
        """To the seal. Raises PrfaasError for what the other side has to be told."""
        await self._wait_for_turn()
        source = self._start()
        try:
            self._prefer(source)
            report = await self._collect(source)
            while self._encoding or self._waiting or self._spans:
                if not self._encoding and not self._waiting:
                    for held in self._spans.rest():
                        self._submit_span(held)
                self._encoded.clear()
                await self._encoded.wait()
            self._check()
            self._tell(self.session.seal(report))
            self._ready()
        finally:
            for future in self._encoding:
                future.cancel()
            for view, *_ in self._waiting:
                view.done()
            self._waiting = []
            source.cancel()

    async def _wait_for_turn(self) -> None:
        """ACCEPT with the place in the queue, again and again, until it is 0."""
        events = (self._ticket.granted, self._gone)
        waits = [asyncio.ensure_future(event.wait()) for event in events]
        try:
            while True:
                position = self._ticket.position
                self._tell(
                    self.session.accept(position, self._ticket.nbytes, self._options.lease_s)
                )
                if position == 0:
                    return
                await asyncio.wait(
                    waits,
                    timeout=self._options.queue_heartbeat_s,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if self._gone.is_set():
                    raise EngineUnavailable("the prefill engine has disconnected")
        finally:
            for wait in waits:
                wait.cancel()

    async def _collect(self, source: KvSource) -> PrefillReport:
        """Take the source's records as they come."""
        last_layer_s, sent_before, chunk = 0.0, 0, -1
        while True:
            event = await source.next()
            if isinstance(event, PrefillReport):
                return replace(
                    event, last_layer_s=last_layer_s, wire_bytes_before_last_layer=sent_before
                )
            last_layer_s = self._options.clock.now()
            sent_before = self.session.handed_bytes
            begun, chunk = event.piece.chunk != chunk, event.piece.chunk
            if event.codec:
                self._encode_prepared(event)
            else:
                self._encode(event)
            if begun:
                self._prefer(source)
            self._check()

    def _prefer(self, source: KvSource) -> None:
        """Tell the source what chunks to come are for: it may be able to do a part of it."""
        preferred = self._choice.preferred()
        if preferred != self._preferred:
            self._preferred = preferred
            source.prepare_for(preferred)

    def _encode_prepared(self, view: KvRecord) -> None:
        """Have a record finished that the source has prepared for a codec, whole."""
        piece = view.piece
        try:
            codecs = self._choice.prepared(view.codec)
            raw_bytes = self.session.ledger.piece_bytes(piece)
            wanted = prepared_bytes(codecs[0], self._groups[piece.group], piece)
            if not wanted or view.raw.nbytes != wanted:
                raise ProtocolError(f"{piece}: {view.raw.nbytes} bytes prepared, not {wanted}")
            cuts = self.session.claim(piece, raw_bytes, prepared=True)
        except PrfaasError:
            view.done()
            raise
        self._wait_for_thread(view, cuts, codecs)

    def _encode(self, view: KvRecord) -> None:
        """Have a record encoded, cut to what one message should hold."""
        piece = view.piece
        codecs = self._choice.of_chunk(piece.chunk)
        try:
            self.session.ledger.piece_bytes(piece)  # before anything is done with its group
            group = self._groups[piece.group]
            span: tuple[int, ...] = (piece.layer,)
            if piece.head_end - piece.head_start == group.kv_heads and not group.keeps_state:
                span = span_of(codecs[0], group, piece.layer)
            cuts = self.session.claim(piece, view.raw.nbytes, len(span))
        except PrfaasError:
            view.done()
            raise
        if len(span) > 1:
            # Here and now: a span's encoding is long, and until it ends a ring would be full.
            held = [copy_out(view, cut, codecs, span) for cut in cuts]
            view.done()
            for whole in filter(None, map(self._spans.add, held)):
                self._submit_span(whole)
            return
        self._wait_for_thread(view, cuts, codecs)

    def _wait_for_thread(
        self, view: KvRecord, cuts: tuple[Piece, ...], codecs: tuple[Codec, ...]
    ) -> None:
        self._waiting.append((view, cuts, codecs))
        self._waiting_bytes += view.raw.nbytes
        if not self._encoding or self._waiting_bytes >= BATCH_BYTES:
            self._submit()

    def _submit(self) -> None:
        """Give what waits to a codec thread: alone it goes at once, under load as much as makes a
        message, for each hand-over between threads costs as much as encoding a small record.
        """
        batch, self._waiting, self._waiting_bytes = self._waiting, [], 0
        loop = asyncio.get_running_loop()
        future = self._executor.submit(encode_batch, batch, self._groups)
        self._encoding.add(future)
        future.add_done_callback(lambda done: loop.call_soon_threadsafe(self._put, done, batch))

    def _submit_span(self, held: Sequence[Held]) -> None:
        loop = asyncio.get_running_loop()
        future = self._executor.submit(encode_span, held, self._groups[held[0].piece.group])
        self._encoding.add(future)
        future.add_done_callback(lambda done: loop.call_soon_threadsafe(self._put, done, []))

    def _put(self, future: Future[list[Encoded]], batch: Batch) -> None:
        # The last one first: a ring is freed in order, so all of them come back in one message.
        for view, *_ in reversed(batch):
            view.done()
        self._encoding.discard(future)
        self._encoded.set()
        if self._waiting and not self._encoding:
            self._submit()
        if future.cancelled() or self.session.state is not SendState.PREFILLING:
            return
        error = future.exception()
        if isinstance(error, Exception):
            self._error = self._error or error
            return
        for each in future.result():
            size = len(each.payload)
            self._choice.note(each.codec, each.raw_bytes, size, each.seconds)
            self.session.put(
                *each.pieces,
                raw_bytes=each.raw_bytes,
                digest=each.digest,
                codec=each.codec.id,
                payload=each.payload,
                payload_crc=each.payload_crc,
                flags=each.flags,
            )
        self._ready()

    def _check(self) -> None:
        if isinstance(self._error, PrfaasError):
            raise self._error
        if self._error is not None:
            raise PrfaasError(f"cannot encode what the engine exported: {self._error!r}")
