"""KV on its way out: remote engines' prefill sessions, copied layer by layer into the ring."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np
import torch

from local_engine.kv.pool import KvPool
from local_engine.kv.state_book import StateBook
from local_engine.kv.states import Bytes
from local_engine.kv_encode import KvEncoder
from local_engine.port import KvPort
from local_engine.sequence import Sequence
from prfaas.codecs import Tile
from prfaas.errors import InvalidRequest
from prfaas.layout import ChunkSpan, chunk_spans
from prfaas_connect.device.staging import StagedCopy, Staging
from prfaas_connect.port.messages import PortError, PrefillEnd, PrefillStart, Record

PREPARED_BYTES = 1 << 20
"""Of KV in a record that is prepared: with any codec it makes one message at most."""


class ExportRefused(Exception):
    """A PrefillStart that cannot be served; its text is the reason given to the agent.

    It begins with the kind of one of our errors where one fits.
    """


def invalid(text: str) -> ExportRefused:
    """The refusal of a session that asks for something wrong."""
    return ExportRefused(f"{InvalidRequest.kind}: {text}")


@dataclass(frozen=True, slots=True)
class ExportLimits:
    """What an export may ask for."""

    vocab_size: int
    max_tokens: int
    chunk_tokens: int


class Export(Sequence):
    """One prefill session: a sequence that is computed and sent but never decodes."""

    decodes = False

    def __init__(
        self, start: PrefillStart, order: int, tokens: Seq[int], pool: KvPool, *,
        chunk_tokens: int, shares: bool, now: float,
    ) -> None:  # fmt: skip
        name = f"export {start.session}/{start.epoch}"
        super().__init__(name, order, tokens, start.salt, pool, shares=shares)
        self.session = start.session
        self.epoch = start.epoch
        self.spans = chunk_spans(start.send_from, len(self.tokens), chunk_tokens)
        self.span_ending_at = {span.end: span for span in self.spans}
        self.checkpoints = pool.layout.checkpoints(start.send_from, len(self.tokens), chunk_tokens)
        state_layers = len(pool.states.layers) if pool.states is not None else 0
        self.records = len(self.spans) * len(pool.layers) + len(self.checkpoints) * state_layers
        self.records_sent = 0
        self.codec = ""
        """What records begun from now on are to be prepared for."""
        self.arrived_at = now
        self.begun_at: float | None = None
        self.computed_at = now

    @property
    def key(self) -> tuple[str, int]:
        return self.session, self.epoch

    def end(self, status: str, reason: str = "") -> PrefillEnd:
        """The session's last message."""
        begun = self.begun_at if self.begun_at is not None else self.computed_at
        return PrefillEnd(
            session=self.session,
            epoch=self.epoch,
            status=status,
            records=self.records_sent,
            cached_tokens=self.cached_tokens,
            computed_tokens=max(0, self.computed - self.cached_tokens),
            queue_s=begun - self.arrived_at,
            compute_s=max(0.0, self.computed_at - begun),
            reason=reason,
        )


@dataclass(frozen=True, slots=True)
class _Pending:
    """A record to come: one model layer of one span, or its state after it."""

    export: Export
    span: ChunkSpan
    layer: int
    cached: bool
    state: Bytes | None = None


@dataclass(frozen=True, slots=True)
class _Moving:
    """A record whose place in the ring is taken; `copy`: on its way there, None: it is there."""

    pending: _Pending
    offset: int
    ring: Bytes
    copy: StagedCopy | None = None
    codec: str = ""
    prepared_bytes: int = 0


class KvExporter:
    """Copies KV from pool to ring and never waits: what finds no room stays in a backlog.

    An export's blocks stay owned until its last record is out, so a record can be read from the
    pool at any time. A state is what the next chunk overwrites: it waits as a copy, and all copies
    of an export are at most a tenth of its KV and one checkpoint more. `states` says where those of
    cached prefixes are. From a pool on an accelerator KV comes through `staging`, prepared by one
    of `encoders` where the agent wants that. Used by the engine thread only; the port belongs to
    the engine.
    """

    def __init__(
        self, pool: KvPool, port: KvPort, states: StateBook | None = None, *,
        staging: Staging | None = None, encoders: Iterable[KvEncoder] = (),
    ) -> None:  # fmt: skip
        self._pool = pool
        self._port = port
        self._states = states
        self._staging = staging
        self._encoders = {encoder.name: encoder for encoder in encoders}
        self._token_bytes = pool.layout.groups[pool.kv_group].token_bytes
        self._last_kv_layer = max(pool.layout.groups[pool.kv_group].layers)
        self._backlog: deque[_Pending] = deque()
        self._moving: deque[_Moving] = deque()
        self.sent_tokens = 0
        self.suspended = False
        """Set while a lost connection's sessions linger, lest they write to the next one's ring."""

    @property
    def copying(self) -> bool:
        """Whether something is on its way that nobody will tell of."""
        return bool(self._moving)

    def check(self) -> None:
        """Raise AssertionError if a record is to be read from blocks that are gone."""
        for each in (*self._backlog, *(moved.pending for moved in self._moving)):
            if each.export.table.capacity < each.span.end:
                raise AssertionError(f"{each.export!r} has no blocks for {each.span}")

    def open(
        self, start: PrefillStart, blob: bytes, order: int, limits: ExportLimits, *,
        shares: bool, now: float,
    ) -> Export:  # fmt: skip
        """The session that `start` asks for. Raises ExportRefused with the reason."""
        if len(blob) % 4:
            raise invalid(f"{len(blob)} bytes are not int32 token ids")
        tokens = np.frombuffer(blob, dtype="<i4")
        if not 1 <= len(tokens) <= limits.max_tokens:
            raise invalid(f"{len(tokens)} tokens, this engine takes 1 to {limits.max_tokens}")
        if not 0 <= start.send_from <= len(tokens):
            raise invalid(f"send_from {start.send_from} is not within {len(tokens)} tokens")
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= limits.vocab_size:
            wrong = low if low < 0 else high
            raise invalid(f"token {wrong} is outside the vocabulary of {limits.vocab_size}")
        longest = min(limits.chunk_tokens, len(tokens)) * self._token_bytes
        if self._pool.states is not None:
            longest = max(longest, self._pool.states.layer_bytes)
        if longest > self._port.ring_bytes:
            raise ExportRefused(
                f"internal_error: a record of {longest} bytes does not fit "
                f"the ring of {self._port.ring_bytes}"
            )
        return Export(
            start, order, tokens.tolist(), self._pool,
            chunk_tokens=limits.chunk_tokens, shares=shares, now=now,
        )  # fmt: skip

    def begin(self, export: Export, now: float) -> None:
        """It has just got its blocks: what the prefix cache had of it leaves first."""
        export.begun_at = export.computed_at = now
        for span in export.spans:
            if span.end <= export.cached_tokens:
                for layer in self._pool.places:
                    self._add(export, span, layer, cached=True)

    def layer_done(self, export: Export, end: int, layer: int) -> None:
        """The chunk that ends at token `end` has its KV, or its state, of `layer` in the pool.

        Two records may leave for each that comes, so that a backlog shrinks while the model runs.
        """
        span = export.span_ending_at.get(end)
        if span is not None and self._add(export, span, layer, cached=False):
            self.drain(2 * self._bytes(self._backlog[-1]))

    def _add(self, export: Export, span: ChunkSpan, layer: int, *, cached: bool) -> bool:
        """Put a record into the backlog; False for a state that does not travel after this span."""
        states, place = self._pool.states, self._pool.places[layer]
        if states is None or place.group == self._pool.kv_group:
            self._backlog.append(_Pending(export, span, layer, cached))
            return True
        if span.end not in export.checkpoints:
            return False
        slot = export.state
        if cached:
            assert self._states is not None
            last = span.end // self._pool.block_tokens - 1
            slot = self._states.slot_of(export.block_name(last))
        copy = np.empty(states.layer_bytes, dtype=np.uint8)
        states.export(place.index, slot, copy)
        self._backlog.append(_Pending(export, span, layer, cached, copy))
        return True

    def _bytes(self, each: _Pending) -> int:
        return each.span.tokens * self._token_bytes if each.state is None else each.state.nbytes

    def drain(self, budget_bytes: int) -> None:
        """Copy from the backlog until the ring is full or about `budget_bytes` are copied."""
        self._send_moved()
        while self._backlog and budget_bytes > 0 and not self.suspended:
            self._cut_first()
            each = self._backlog[0]
            nbytes = self._bytes(each)
            try:
                offset = self._port.ring_reserve(nbytes)
                if offset is None:
                    break
                ring = self._port.ring(offset, nbytes)
            except PortError:  # The agent is gone; the engine hears of it and drops its sessions.
                return
            self._backlog.popleft()
            self._moving.append(self._move(each, offset, ring))
            budget_bytes -= nbytes
            self._send_moved()
        self._send_moved()

    def _encoder(self, each: _Pending) -> tuple[KvEncoder, Tile] | None:
        """What the agent wants a record prepared by, where that makes it smaller."""
        encoder = self._encoders.get(each.export.codec)
        if encoder is None or each.state is not None or self._staging is None:
            return None
        group = self._pool.layout.groups[self._pool.kv_group]
        tile = Tile.of(group, (each.layer,), (each.span.start, each.span.end))
        return (encoder, tile) if 0 < encoder.prepared_bytes(tile) < tile.nbytes else None

    def _cut_first(self) -> None:
        """What is prepared is one frame's: the agent cannot cut it any more."""
        each = self._backlog[0]
        if self._bytes(each) <= PREPARED_BYTES or self._encoder(each) is None:
            return
        self._backlog.popleft()
        span, step = each.span, max(1, PREPARED_BYTES // self._token_bytes)
        cuts = [
            replace(each, span=replace(span, start=at, end=min(at + step, span.end)))
            for at in range(span.start, span.end, step)
        ]
        each.export.records += len(cuts) - 1
        self._backlog.extendleft(reversed(cuts))

    def _move(self, each: _Pending, offset: int, ring: Bytes) -> _Moving:
        """Begin to copy a record to its place."""
        export, span, layer = each.export, each.span, self._pool.places[each.layer].index
        if each.state is not None:
            ring[:] = each.state
            return _Moving(each, offset, ring)
        if self._staging is None:
            self._pool.export(layer, export.table, span.start, span.end, ring)
            return _Moving(each, offset, ring)
        runs, pool = export.table.runs(span.start, span.end), self._pool
        found = self._encoder(each)
        if found is None:
            copy = self._staging.start(
                lambda: pool.gather(layer, runs).view(torch.uint8).flatten(), ring.nbytes, ring
            )
            return _Moving(each, offset, ring, copy)
        encoder, tile = found
        nbytes = encoder.prepared_bytes(tile)
        copy = self._staging.start(
            lambda: encoder.prepare(pool.gather(layer, runs), tile), nbytes + 1, ring
        )
        return _Moving(each, offset, ring, copy, encoder.name, nbytes)

    def _send_moved(self) -> None:
        """Records leave in the order of their places in the ring."""
        while self._moving and not self.suspended:
            moved = self._moving[0]
            if moved.copy is not None and not moved.copy.done():
                return
            self._moving.popleft()
            self._send(moved)

    def _send(self, moved: _Moving) -> None:
        each, codec, nbytes = moved.pending, moved.codec, moved.ring.nbytes
        export, span, place = each.export, each.span, self._pool.places[each.layer]
        if codec and moved.ring[moved.prepared_bytes]:
            nbytes = moved.prepared_bytes
        elif codec:  # Some value cannot be encoded.
            codec = ""
            self._pool.export(place.index, export.table, span.start, span.end, moved.ring)
        self._port.send(
            Record(
                session=export.session, epoch=export.epoch, chunk=span.index,
                group=place.group, layer=each.layer,
                token_start=span.start, token_end=span.end,
                head_start=0, head_end=self._pool.layout.groups[place.group].kv_heads,
                offset=moved.offset, nbytes=nbytes, cached=each.cached, codec=codec,
            )
        )  # fmt: skip
        export.records_sent += 1
        self.sent_tokens += span.tokens if each.layer == self._last_kv_layer else 0

    def drop(self, export: Export) -> None:
        """Forget what is left of a session, whose blocks are about to go."""
        self._backlog = deque(each for each in self._backlog if each.export is not export)
        if any(moved.pending.export is export for moved in self._moving):
            # Their places in the ring have to be freed in order, so they are sent all the same.
            for moved in self._moving:
                if moved.copy is not None:
                    moved.copy.wait()
            self._send_moved()

    def drop_all(self) -> None:
        """The agent is gone, and all sessions with it."""
        self._backlog.clear()
        for moved in self._moving:
            if moved.copy is not None:
                moved.copy.fence()
        self._moving.clear()
