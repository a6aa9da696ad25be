"""An engine that is all script: it speaks real KvPort and computes KV by a formula.

KV of a token depends on all tokens before it and on `weights`, as in a model, so the same prompt
gives the same bytes at every engine with the same weights, whatever its chunks, blocks and ranks.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from prfaas.codecs import Tile
from prfaas.layout import GroupKind, KvLayout, LayerGroup, chunk_spans
from prfaas_connect.port.engine import EnginePort
from prfaas_connect.port.messages import (
    PORT_VERSION,
    Abort,
    Fetch,
    FetchDone,
    Hello,
    KvEvents,
    PortMessage,
    PrefillCancel,
    PrefillEnd,
    PrefillStart,
    PrepareFor,
    Record,
    Release,
    Stats,
    Welcome,
)

Bytes = npt.NDArray[np.uint8]
SCRIPTED_LAYOUT = KvLayout((LayerGroup(GroupKind.FULL, (0, 1, 2), 2, 4, "bfloat16"),))
_POLL_S = 0.001


def scripted_kv(
    layout: KvLayout, tokens: npt.NDArray[np.int32], group: int, layer: int, weights: float = 0.0
) -> Bytes:
    """KV of all tokens in one layer: [k|v][token][head][bytes of a head]."""
    g = layout.groups[group]
    state = np.zeros(len(tokens), dtype=np.float64)
    carry = 1
    for index, token in enumerate(tokens.tolist()):
        carry = (carry * 31 + token + 1) % 65521
        state[index] = carry
    kv = np.arange(2)[:, None, None, None] * 0.5
    heads = np.arange(g.kv_heads)[None, None, :, None] * 0.7
    dims = np.arange(g.head_dim)[None, None, None, :] * 0.3
    values = np.sin(state[None, :, None, None] * (layer + 1) + kv + heads + dims + weights)
    single = values.astype(np.float32)
    items: npt.NDArray[Any] = single
    if g.dtype == "float16":
        items = single.astype(np.float16)
    elif g.dtype == "bfloat16":
        items = (single.view("<u4") >> 16).astype("<u2")
    raw: Bytes = items.view(np.uint8)
    return raw


@dataclass
class PrefillScript:
    """What goes wrong in the prefills of an engine; all off by default. May be changed any time."""

    layer_s: float = 0.0
    """Pause before each layer."""
    stop_before: tuple[int, int] | None = None
    """(chunk, layer) before which the engine waits until `go` is set."""
    go: threading.Event = field(default_factory=threading.Event)
    fail_before: tuple[int, int] | None = None
    """(chunk, layer) before which the prefill ends as failed."""
    fail_reason: str = "boom"
    skip: tuple[int, int] | None = None
    """(chunk, layer) that is never exported."""
    wrong_size: tuple[int, int] | None = None
    """(chunk, layer) that is exported one byte short."""
    cached_tokens: int = 0
    prepare: Callable[[str, Bytes, Tile], Bytes | None] | None = None
    """Of a codec's name and a record what an accelerator would prepare; None: it cannot."""


class ScriptedEngine:
    """Owns its port, one prefill thread and nothing else; `close` ends them.

    The decode role is driven by the test: `fetch`, `abort`, `release`, `staged_bytes`.
    """

    def __init__(
        self,
        path: Path,
        *,
        layout: KvLayout = SCRIPTED_LAYOUT,
        chunk_tokens: int = 8,
        block_tokens: int = 4,
        ranks: tuple[tuple[int, int], ...] | None = None,
        weights: float = 0.0,
        script: PrefillScript | None = None,
        **hello: Any,
    ) -> None:
        self.layout = layout
        self.weights = weights
        self.script = script or PrefillScript()
        heads = layout.groups[0].kv_heads
        fields: dict[str, Any] = {
            "version": PORT_VERSION,
            "engine": "scripted",
            "roles": ["prefill", "decode"],
            "model": "scripted-model",
            "layout": layout.to_dict(),
            "chunk_tokens": chunk_tokens,
            "block_tokens": block_tokens,
            "max_tokens": 4096,
            "vocab_size": 1000,
            "model_identity": "identity",
            "config_digest": "config",
            "tokenizer_digest": "tokenizer",
            "ranks": [list(r) for r in ranks or ((0, heads),)],
            "epoch": "epoch-1",
        }
        self.hello = Hello(**(fields | hello))
        self.prefills: list[tuple[PrefillStart, npt.NDArray[np.int32]]] = []
        """Every PrefillStart with its tokens."""
        self.ended: list[PrefillEnd] = []
        self.late_done: list[FetchDone] = []
        """Answers to fetches that were aborted or unknown."""
        self._port = EnginePort(str(path), self.hello, self, reconnect_s=0.02)
        self._sessions = itertools.count(1)
        self._fetches: dict[str, asyncio.Future[FetchDone]] = {}
        self._have: dict[str, int] = {}
        self._loop = asyncio.get_running_loop()
        self._connected = asyncio.Event()
        self._todo: deque[tuple[PrefillStart, npt.NDArray[np.int32]]] = deque()
        self._cancelled: set[tuple[str, int]] = set()
        self._codecs: dict[tuple[str, int], str] = {}
        self.asked: list[str] = []
        """Codecs of every PrepareFor."""
        self._work = threading.Condition()
        self._closing = False
        self._worker = threading.Thread(target=self._prefill_loop, daemon=True)

    async def start(self) -> ScriptedEngine:
        """Connect and send first stats."""
        self._port.start()
        self._worker.start()
        await asyncio.wait_for(self._connected.wait(), 5)
        return self

    async def close(self) -> None:
        """Disconnect, as a killed engine does, and end the threads."""
        await asyncio.to_thread(self._port.close)
        with self._work:
            self._closing = True
            self._work.notify_all()
        self.script.go.set()
        await asyncio.to_thread(self._worker.join, 5)

    @property
    def connected(self) -> bool:
        return self._connected.is_set()

    def send(self, message: PortMessage, blob: bytes = b"") -> None:
        """Any message to the agent."""
        assert self._port.send(message, blob)

    def stats(self, **fields: Any) -> None:
        """Send Stats; everything is zero but what is named."""
        zeros: dict[str, Any] = {
            "queue_tokens": 0,
            "waiting": 0,
            "running": 0,
            "context_tokens": 0,
            "free_blocks": 100,
            "total_blocks": 100,
            "decode_step_s": 0.0,
            "prefill_base_s": 0.0,
            "prefill_token_s": 0.0,
            "prefill_token_context_s": 0.0,
        }
        self.send(Stats(**(zeros | fields)))

    def kv(self, tokens: npt.NDArray[np.int32], group: int, layer: int) -> Bytes:
        """What this engine computes for `tokens`."""
        return scripted_kv(self.layout, tokens, group, layer, self.weights)

    # --- decode role ---

    def begin_fetch(
        self, params: dict[str, Any], prompt: npt.NDArray[np.int32], have: int = 0
    ) -> tuple[str, asyncio.Future[FetchDone]]:
        """Send a Fetch for all of `prompt` but its last token; its key and answer."""
        session = f"f{next(self._sessions)}"
        answer = self._loop.create_future()
        self._fetches[session] = answer
        self._have[session] = have
        want = len(prompt) - 1
        self.send(Fetch(session, params, have, want, want - have), prompt.astype("<i4").tobytes())
        return session, answer

    async def fetch(
        self, params: dict[str, Any], prompt: npt.NDArray[np.int32], have: int = 0
    ) -> FetchDone:
        """`begin_fetch` and its answer."""
        return await asyncio.wait_for(self.begin_fetch(params, prompt, have)[1], 10)

    def abort(self, session: str) -> None:
        """The request is gone; a later answer goes to `late_done`."""
        self._fetches.pop(session, None)
        self.send(Abort(session))

    def release(self, done: FetchDone, *, result: str = "imported", digest: str = "") -> None:
        """Done with the staging of an answer."""
        count = done.token_end - self._have[done.session] if result == "imported" else 0
        self.send(Release(done.session, result, count, digest))

    def staged_bytes(self, done: FetchDone, have: int) -> Bytes:
        """The raw staging extent of an answer; a copy."""
        nbytes = self.layout.session_bytes(have, done.token_end)
        return self._port.staging(done.staging_offset, nbytes).copy()

    def staged_is_right(
        self, done: FetchDone, prompt: npt.NDArray[np.int32], have: int = 0
    ) -> bool:
        """Whether all of [have, token_end) in staging is what this engine would compute."""
        staged = self.staged_bytes(done, have)
        for extent in self.layout.extents(have, done.token_end, done.chunk_tokens):
            rows = self.kv(prompt[: extent.span.end], extent.group, extent.layer)
            expected = rows[:, extent.span.start : extent.span.end].tobytes()
            if staged[extent.offset : extent.offset + extent.nbytes].tobytes() != expected:
                return False
        return True

    # --- EngineHandler, on the port's reader thread ---

    def on_connected(self, welcome: Welcome) -> None:
        self._port.send(KvEvents(self.hello.epoch, 1, cleared=True))
        self.stats()
        self._loop.call_soon_threadsafe(self._connected.set)

    def on_disconnected(self, reason: str) -> None:
        with self._work:
            self._todo.clear()
            self._cancelled.update((s.session, s.epoch) for s, _ in self.prefills)
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._connected.clear)

    def on_message(self, message: PortMessage, blob: bytes) -> None:
        if isinstance(message, PrefillStart):
            item = (message, np.frombuffer(blob, dtype="<i4").astype(np.int32))
            with self._work:
                self.prefills.append(item)
                self._todo.append(item)
                self._work.notify_all()
        elif isinstance(message, PrepareFor):
            with self._work:
                self._codecs[message.session, message.epoch] = message.codec
                self.asked.append(message.codec)
        elif isinstance(message, PrefillCancel):
            with self._work:
                self._cancelled.add((message.session, message.epoch))
        elif isinstance(message, FetchDone):
            self._loop.call_soon_threadsafe(self._answered, message)

    def _answered(self, done: FetchDone) -> None:
        future = self._fetches.pop(done.session, None)
        if future is None or future.done():
            self.late_done.append(done)
        else:
            future.set_result(done)

    # --- prefill role, on a thread of its own ---

    def _prefill_loop(self) -> None:
        while True:
            with self._work:
                while not self._todo and not self._closing:
                    self._work.wait()
                if self._closing:
                    return
                start, tokens = self._todo.popleft()
            end = self._prefill(start, tokens)
            self.ended.append(end)
            self._port.send(end)

    def _prefill(self, start: PrefillStart, tokens: npt.NDArray[np.int32]) -> PrefillEnd:
        records = 0
        script = self.script
        order = sorted((layer, gi) for gi, g in enumerate(self.layout.groups) for layer in g.layers)
        kv = {(layer, gi): self.kv(tokens, gi, layer) for layer, gi in order}
        for span in chunk_spans(start.send_from, len(tokens), self.hello.chunk_tokens):
            for layer, gi in order:
                here = (span.index, layer)
                if script.layer_s:
                    threading.Event().wait(script.layer_s)
                if script.stop_before == here:
                    while not script.go.wait(_POLL_S) and not self._gone(start):
                        pass
                if script.fail_before == here:
                    reason = script.fail_reason
                    return PrefillEnd(start.session, start.epoch, "failed", records, reason=reason)
                if script.skip == here:
                    continue
                rows = kv[layer, gi][:, span.start : span.end]
                for low, high in self.hello.ranks:
                    raw = np.ascontiguousarray(rows[:, :, low:high]).reshape(-1)
                    if script.wrong_size == here:
                        raw = raw[:-1]
                    codec = self._codecs.get((start.session, start.epoch), "")
                    tile = Tile.of(self.layout.groups[gi], (layer,), (span.start, span.end))
                    made = script.prepare(codec, raw, tile) if codec and script.prepare else None
                    codec, raw = ("", raw) if made is None else (codec, made)
                    offset = self._reserve(start, raw.nbytes)
                    if offset is None:
                        return PrefillEnd(start.session, start.epoch, "cancelled", records)
                    self._port.ring(offset, raw.nbytes)[:] = raw
                    self._port.send(
                        Record(
                            start.session,
                            start.epoch,
                            span.index,
                            gi,
                            layer,
                            span.start,
                            span.end,
                            low,
                            high,
                            offset,
                            raw.nbytes,
                            cached=span.end <= script.cached_tokens,
                            codec=codec,
                        )
                    )
                    records += 1
        return PrefillEnd(
            start.session,
            start.epoch,
            "done",
            records,
            cached_tokens=script.cached_tokens,
            computed_tokens=len(tokens) - script.cached_tokens,
            queue_s=0.0,
            compute_s=0.0,
        )

    def _gone(self, start: PrefillStart) -> bool:
        return self._closing or (start.session, start.epoch) in self._cancelled

    def _reserve(self, start: PrefillStart, nbytes: int) -> int | None:
        """Ring space, waiting for it; None once the session is cancelled or the port closed."""
        while not self._gone(start):
            offset = self._port.ring_reserve(nbytes)
            if offset is not None:
                return offset
            threading.Event().wait(_POLL_S)
        return None
