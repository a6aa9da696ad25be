"""Test support for the engine: a model that is exact arithmetic, and a core driven by hand."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from local_engine.admission import Admission
from local_engine.answer import Answer
from local_engine.core import EngineCore
from local_engine.kv.pool import KvPool
from local_engine.kv.table import BlockTable
from local_engine.kv_encode import KvEncoder
from local_engine.requests import EngineRequest, SamplingParams, TokenEvent
from local_engine.runner import DecodeRow, LayerDone, ModelRunner, PrefillChunk
from local_engine.sampler import Drawn
from local_engine.stream import TokenStream
from prfaas.layout import GroupKind, KvLayout, LayerGroup
from prfaas.limits import Limits
from prfaas.settings import EngineSettings
from prfaas.testing.clock import ManualClock
from prfaas.testing.fake_port import FakePort
from prfaas_connect.device.staging import Staging
from prfaas_connect.port.messages import Fetch, FetchDone, PrefillEnd, PrefillStart, Record

CHAIN_LAYERS = 3
CHAIN_VOCAB = 997
CHAIN_LAYOUT = KvLayout((LayerGroup(GroupKind.FULL, tuple(range(CHAIN_LAYERS)), 1, 2, "float32"),))
HYBRID_CHAIN_LAYOUT = KvLayout(
    (
        LayerGroup(GroupKind.FULL, (0, 2, 3), 1, 2, "float32"),
        LayerGroup(GroupKind.RECURRENT, (1, 4), 2, 2, "float32", state_dim=2),
    )
)
"""48 bytes of KV for each token, 64 of states: a checkpoint before the end needs 14 tokens."""
# States stay below 2 ** 24, so float32 holds them exactly.
_MODULUS = 9_999_991


def chain_answer(prompt: Sequence[int], tokens: int) -> list[int]:
    """What `ChainRunner` answers to `prompt`, computed without any engine."""
    state = 0
    for token in prompt:
        state = _advance(state, token)
    answer: list[int] = []
    for _ in range(tokens):
        answer.append(state % CHAIN_VOCAB)
        state = _advance(state, answer[-1])
    return answer


def chain_kv(prompt: Sequence[int], layer: int) -> npt.NDArray[np.float32]:
    """What `ChainRunner` stores for `prompt` in one layer, [2, tokens, 1, 2]."""
    kv = np.zeros((2, len(prompt), 1, 2), dtype=np.float32)
    state = 0
    for position, token in enumerate(prompt):
        state = _advance(state, token)
        kv[0, position, 0] = (state, layer)
        kv[1, position, 0] = (state, position + 1)
    return kv


def chain_state(prompt: Sequence[int], index: int) -> npt.NDArray[np.float32]:
    """What `ChainRunner` keeps after `prompt` in the `index`-th recurrent layer, [2, 2, 2]."""
    state = 0
    for token in prompt:
        state = _advance(state, token)
    values = np.arange(8, dtype=np.float32).reshape(2, 2, 2) + 10 * index
    values[0, 0, 0], values[1, 1, 1] = state, len(prompt)
    return values


def _advance(state: int, token: int) -> int:
    return (state * 31 + token + 17) % _MODULUS


class ChainRunner:
    """A model whose KV at each position follows from the KV before it, read back from the pool.

    Any wrong, missing or foreign block changes every later token, and nothing else does: answers
    are exact whatever the batch, the chunks, the cache and the route of the KV. Reads and writes
    all layers and asserts that they agree; in a pool with states these hold the same, so that one
    of another sequence or another position is found at once.
    """

    def __init__(self, pool: KvPool, clock: ManualClock | None = None) -> None:
        self.token_s = 0.0
        self.step_s = 0.0
        self.strict = True
        self.chunks: list[tuple[int, int]] = []
        self.batches: list[int] = []
        self.on_layer: Callable[[int], None] | None = None
        self._pool = pool
        self._clock = clock

    def prefill_chunk(self, chunk: PrefillChunk, on_layer: LayerDone | None = None) -> None:
        states, state = [], self._state(chunk.table, chunk.start, chunk.state)
        for token in chunk.token_ids:
            state = _advance(state, token)
            states.append(state)
        self.chunks.append((chunk.start, chunk.end))
        for layer, place in self._pool.places.items():
            if place.group == self._pool.kv_group:
                self._store(chunk.table, chunk.start, place.index, states)
            else:
                self._keep(place.index, chunk.state, states[-1], chunk.end)
            if on_layer is not None:
                on_layer(layer)
            if self.on_layer is not None:
                self.on_layer(layer)
        self._pass(self.token_s * len(chunk.token_ids))

    def decode(self, rows: Sequence[DecodeRow]) -> list[Drawn]:
        tokens = []
        for row in rows:
            state = _advance(self._state(row.table, row.position, row.state), row.token_id)
            for place in self._pool.places.values():
                if place.group == self._pool.kv_group:
                    self._store(row.table, row.position, place.index, [state])
                else:
                    self._keep(place.index, row.state, state, row.position + 1)
            tokens.append(Drawn(state % CHAIN_VOCAB))
        self.batches.append(len(rows))
        self._pass(self.step_s)
        return tokens

    def _state(self, table: BlockTable, position: int, slot: int) -> int:
        """State after `position` tokens, which every layer must have alike."""
        if not self.strict:
            return 0
        if position == 0:
            for kept in self._pool.states.layers if self._pool.states else ():
                assert not kept[slot].any(), f"slot {slot} is not empty at the start"
            return 0
        row = torch.empty(2, 1, 1, 2)
        found = set()
        for layer in range(CHAIN_LAYERS):
            self._pool.read(layer, table, position - 1, position, row)
            k0, k1, v0, v1 = (int(x) for x in row.flatten().tolist())
            assert k0 == v0, f"K and V of layer {layer} disagree at {position - 1}"
            assert (k1, v1) == (layer, position), (
                f"layer {layer} has ({k1}, {v1}) at {position - 1}"
            )
            found.add(k0)
        for index, kept in enumerate(self._pool.states.layers if self._pool.states else ()):
            values = kept[slot].numpy()
            assert values[1, 1, 1] == position, (
                f"slot {slot} has the state after {values[1, 1, 1]} tokens, not {position}"
            )
            assert values[0, 0, 1] == 1 + 10 * index, f"slot {slot} has another layer's state"
            found.add(int(values[0, 0, 0]))
        assert len(found) == 1, f"layers disagree at {position - 1}: {found}"
        return found.pop()

    def _keep(self, index: int, slot: int, state: int, position: int) -> None:
        assert self._pool.states is not None
        values = chain_state([], index)
        values[0, 0, 0], values[1, 1, 1] = state, position
        self._pool.states.layers[index][slot].copy_(torch.from_numpy(values))

    def _store(self, table: BlockTable, start: int, layer: int, states: list[int]) -> None:
        kv = torch.empty(2, len(states), 1, 2)
        kv[:, :, 0, 0] = torch.tensor(states, dtype=torch.float32)
        kv[0, :, 0, 1] = layer
        kv[1, :, 0, 1] = torch.arange(start + 1, start + len(states) + 1)
        self._pool.write(layer, table, start, start + len(states), kv)

    def _pass(self, seconds: float) -> None:
        if self._clock is not None:
            self._clock.advance(seconds)


class ListStream(TokenStream):
    """A stream without an event loop; events are read by hand."""

    def __init__(self, limit: int, clock: ManualClock) -> None:
        self.events: list[TokenEvent] = []
        self.unread = 0
        self.read_at = clock.now()
        self._limit = limit
        self._clock = clock

    @property
    def full(self) -> bool:
        return self.unread >= self._limit

    def push(self, event: TokenEvent) -> None:
        self.events.append(event)
        self.unread += 1

    def read_all(self) -> None:
        self.unread = 0
        self.read_at = self._clock.now()

    @property
    def tokens(self) -> list[int]:
        return [token for event in self.events for token in event.token_ids]

    @property
    def last(self) -> TokenEvent | None:
        return self.events[-1] if self.events and self.events[-1].last else None


class CoreHarness:
    """An `EngineCore` stepped by the test; checks all books after each step.

    Over a `ChainRunner`, or what `make_runner` makes of the pool. Streams are read at once unless
    `reads` is false.
    """

    def __init__(
        self,
        *,
        blocks: int = 64,
        block_tokens: int = 4,
        port: FakePort | None = None,
        limits: Limits | None = None,
        max_context: int = 1 << 16,
        layout: KvLayout = CHAIN_LAYOUT,
        state_slots: int = 16,
        make_runner: Callable[[KvPool], ModelRunner] | None = None,
        staging: Staging | None = None,
        encoders: Iterable[KvEncoder] = (),
        **settings: Any,
    ) -> None:
        self.clock = ManualClock()
        self.pool = KvPool(layout, blocks, block_tokens, state_slots=state_slots)
        self.runner = ChainRunner(self.pool, self.clock)
        self.port = port
        self.limits = limits or Limits()
        self.settings = EngineSettings(
            block_tokens=block_tokens, **({"chunk_tokens": 8, "max_batch": 4} | settings)
        )
        self.admission = Admission(self.limits.engine_max_waiting)
        self.core = EngineCore(
            make_runner(self.pool) if make_runner else self.runner,
            self.pool, self.settings, self.limits, self.admission,
            vocab_size=CHAIN_VOCAB, max_context=max_context, epoch="e0", clock=self.clock,
        )  # fmt: skip
        if port is not None:
            self.core.attach(port, staging, encoders)
        self.streams: dict[str, ListStream] = {}
        self.prompts: dict[str, tuple[int, ...]] = {}
        self.reads = True
        self._max_context = max_context

    def submit(
        self,
        name: str,
        prompt: Sequence[int],
        max_tokens: int = 4,
        *,
        salt: str = "",
        params: dict[str, Any] | None = None,
        **sampling: Any,
    ) -> ListStream:
        """Add a request as the engine would."""
        request = EngineRequest(
            name, tuple(prompt), SamplingParams(max_tokens, **({"temperature": 0.0} | sampling)),
            cache_salt=salt, kv_transfer_params=params,
        )  # fmt: skip
        stream = ListStream(self.limits.engine_event_queue, self.clock)
        answer = Answer(
            request, next(self.core.orders), 0, self.pool, stream, self.clock.now(),
            eos_ids=frozenset(), max_context=self._max_context,
            shares=self.settings.prefix_cache,
        )  # fmt: skip
        self.streams[name] = stream
        self.prompts[name] = tuple(prompt)
        self.admission.enter(name, 1.0, lambda: self.core.add(answer))
        self.core.check()
        return stream

    def step(self, times: int = 1) -> bool:
        """Step and check the books. False: the last step found nothing to do."""
        worked = False
        for _ in range(times):
            worked = self.core.step()
            self.core.touched.clear()
            self.core.check()
            if self.reads:
                for stream in self.streams.values():
                    stream.read_all()
        return worked

    def run(self, most: int = 10_000) -> None:
        """Step until there is nothing to do."""
        for _ in range(most):
            if not self.step():
                return
        raise AssertionError(f"still busy after {most} steps: {list(self.core.live())}")

    def assert_answered(self, *names: str) -> None:
        """These requests ended by themselves with exactly the right tokens."""
        for name in names:
            stream = self.streams[name]
            assert stream.last is not None, f"{name} has not ended"
            assert stream.last.error is None, stream.last
            right = chain_answer(self.prompts[name], len(stream.tokens))
            assert stream.tokens == right, f"{name}: {stream.tokens} is not {right}"

    def assert_empty(self) -> None:
        """Nothing is live, no block is owned and no state slot."""
        assert self.core.idle
        stats = self.core.stats()
        assert stats.free_blocks == stats.total_blocks, stats
        assert stats.free_states == stats.total_states, stats


class LoopbackAgents:
    """Both agents between two harnesses in one process: what P exports lies in D's staging.

    `pump` moves what there is to move and frees P's ring as it goes.
    """

    def __init__(self, decode: CoreHarness, prefill: CoreHarness) -> None:
        assert decode.port is not None
        assert prefill.port is not None
        self._d, self._p = decode, prefill
        self._d_port, self._p_port = decode.port, prefill.port
        self._fetches: dict[str, tuple[int, int, int]] = {}
        self._staging_at = 0
        self.ends: list[PrefillEnd] = []
        self.records: list[tuple[Record, bytes]] = []

    def pump(self) -> None:
        for fetch, blob in self._d_port.take(Fetch):
            if fetch.have == fetch.want:
                continue  # told for the outcome's sake
            tokens = blob[: 4 * fetch.want]
            nbytes = self._d.pool.layout.session_bytes(fetch.have, fetch.want)
            self._fetches[fetch.session] = (fetch.have, fetch.want, self._staging_at)
            self._staging_at += nbytes
            self._p.core.handle(PrefillStart(fetch.session, 1, fetch.have), tokens)
        for record, _ in self._p_port.take(Record):
            data = self._p_port.record_bytes(record)
            self._p_port.allocator.free(1)
            self.records.append((record, data))
            self._place(record, data)
        for end, _ in self._p_port.take(PrefillEnd):
            self.ends.append(end)
            _, want, offset = self._fetches[end.session]
            assert end.status == "done", end
            self._d.core.handle(
                FetchDone(end.session, "staged", "", want, offset, self._p.settings.chunk_tokens),
                b"",
            )

    def digests(self) -> dict[str, str]:
        """Of each session, blake2b-128 over its records in wire order."""
        parts: dict[str, list[tuple[int, int, bytes]]] = {}
        for record, data in self.records:
            parts.setdefault(record.session, []).append((record.chunk, record.layer, data))
        return {
            session: hashlib.blake2b(
                b"".join(data for _, _, data in sorted(found)), digest_size=16
            ).hexdigest()
            for session, found in parts.items()
        }

    def _place(self, record: Record, data: bytes) -> None:
        have, want, offset = self._fetches[record.session]
        chunk_tokens = self._p.settings.chunk_tokens
        for extent in self._d.pool.layout.extents(have, want, chunk_tokens):
            span = extent.span
            if (span.start, span.end, extent.layer) == (
                record.token_start, record.token_end, record.layer,
            ):  # fmt: skip
                start = offset + extent.offset
                self._d_port.staging_memory[start : start + len(data)] = np.frombuffer(
                    data, dtype=np.uint8
                )
                return
        raise AssertionError(f"{record} has no place in staging")
