"""Codecs that take layers together, over real sockets: one frame for a span, and all that may go
wrong with it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prfaas.codecs import RAW, Calibration, Codec, PlanesZstdCodec, default_codecs
from prfaas.codecs.calibration import Header, Measured, Rung
from prfaas.codecs.native import native
from prfaas.frames import Frame
from prfaas.layout import GroupKind, KvLayout, LayerGroup
from prfaas.ledger import Piece
from prfaas.quality import Quality
from prfaas.testing.link import BendableLink, LinkShape
from prfaas.testing.scripted_port import PrefillScript
from prfaas.testing.waiting import eventually
from remote_prefill import codec_choice, encoding, served_link
from remote_prefill.encoding import Held, SpanGather, encode_span
from remote_prefill.served_link import message_of

if native is None:
    pytest.skip("the C extension was not built", allow_module_level=True)

GROUP = LayerGroup(GroupKind.FULL, (1, 2, 4, 5, 7), 2, 16, "bfloat16")
LAYOUT = KvLayout((GROUP,))
SPANS = ((1, 2), (4, 5))
CHUNK, PROMPT, STEP = 64, 200, 0.25
GOOD = Measured(2400, 1e-6, 1e-5, 1.0, 1.0, 1e-3, 3.0, 1e-6)
NAMES = ["compact-basis", "planes-zstd", "raw"]
ENGINE = {"layout": LAYOUT, "chunk_tokens": CHUNK}


def calibration(**changes: Any) -> Calibration:
    """Of the scripted engine's KV: layers two by two, the last one alone, in bases of chance."""
    layers, width = len(GROUP.layers), GROUP.kv_heads * GROUP.head_dim
    rng = np.random.default_rng(0)
    spans = ((0, 2), (2, 4), (4, 5))
    bases = [
        np.linalg.qr(rng.normal(size=((b - a) * width,) * 2))[0] for a, b in spans for _ in "kv"
    ]
    columns = tuple((a.shape[1], b.shape[1]) for a, b in zip(bases[::2], bases[1::2], strict=True))
    rung = Rung("compact-basis", Quality.COMPACT, STEP, columns, GOOD)
    eye = np.eye(GROUP.head_dim, dtype=np.float32)
    metric = np.broadcast_to(eye, (layers, 2, GROUP.kv_heads, *eye.shape)).copy()
    header = Header(1, "identity", GROUP.layers, GROUP.kv_heads, GROUP.head_dim, spans, (rung,))
    return Calibration(
        replace(header, **changes),
        np.zeros(0, np.float32),
        np.zeros((layers, 2, width), np.float32),
        np.ones((layers, 2, width), np.float32),
        metric,
        tuple(basis.astype(np.float16).astype(np.float32) for basis in bases),
    )


def codec() -> Codec:
    return default_codecs(calibration=calibration()).by_id(6)


@pytest.fixture(autouse=True)
def fewest_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the loopback's goodput: the first codec that both sides have."""
    monkeypatch.setattr(codec_choice, "choose", lambda codecs, *_, **__: codecs[0])


@pytest.fixture
def fields(tmp_path: Path) -> dict[str, Any]:
    calibration().save(tmp_path / "c.npz")
    return {"codecs": NAMES, "codec_calibration": tmp_path / "c.npz"}


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Frame]:
    """All frames that P gives to lanes; `sent.flip` says of which a bit is flipped."""
    return watch(monkeypatch, lambda frame, before: False)


def watch(monkeypatch: pytest.MonkeyPatch, flip: Callable[[Frame, int], bool]) -> list[Frame]:
    seen: list[Frame] = []
    times: Counter[tuple[int, int]] = Counter()

    def passed(frame: Frame) -> Frame:
        seen.append(frame)
        key = (frame.session, frame.sequence)
        times[key] += 1
        if not flip(frame, times[key] - 1):
            return frame
        payload = bytes(frame.payload)
        return replace(frame, payload=payload[:-1] + bytes([payload[-1] ^ 1]))

    monkeypatch.setattr(
        served_link, "message_of", lambda frames: message_of([passed(f) for f in frames])
    )
    return seen


def floats(raw: np.ndarray) -> np.ndarray:
    return (raw.view("<u2").astype("<u4") << 16).view("<f4")


def worst_error(engine: Any, done: Any, prompt: np.ndarray) -> float:
    """Of all values of [0, token_end); sinks are the very bytes."""
    staged, worst = engine.staged_bytes(done, 0), 0.0
    for extent in LAYOUT.extents(0, done.token_end, done.chunk_tokens):
        rows = engine.kv(prompt[: extent.span.end], extent.group, extent.layer)
        right = np.ascontiguousarray(rows[:, extent.span.start : extent.span.end])
        found = staged[extent.offset : extent.offset + extent.nbytes].reshape(right.shape)
        if extent.span.start == 0:
            assert (found[:, :4] == right[:, :4]).all(), "a sink was changed"
        error = np.abs(floats(found.reshape(-1)) - floats(right.reshape(-1))).max()
        worst = max(worst, float(error))
    return worst


async def staged(d: Any, done: Any, prompt: np.ndarray) -> None:
    """It came whole and about right; then given back."""
    assert (done.status, done.reason) == ("staged", "")
    assert worst_error(d.engine, done, prompt) < 3 * STEP
    d.engine.release(done)


async def test_the_layers_of_a_span_come_in_one_frame(
    prefill_site: Any, decode_site: Any, tokens: Any, fields: Any, sent: list[Frame]
) -> None:
    p = await prefill_site(engine=ENGINE, **fields)
    d = await decode_site({"fra/p0": p}, engine=ENGINE, staging_bytes=1 << 20, **fields)
    await d.ready("fra/p0")
    sent.clear()
    prompt, params = tokens(PROMPT), d.params("fra/p0", quality="compact")
    done = await d.engine.fetch(params, prompt)
    assert not d.engine.staged_is_right(done, prompt)
    await staged(d, done, prompt)
    outcome = await d.outcome(params)
    assert (outcome.quality, set(outcome.codecs)) == ("compact", {"compact-basis"})
    assert outcome.codecs["compact-basis"] == outcome.raw_bytes
    assert outcome.raw_bytes == LAYOUT.session_bytes(0, PROMPT - 1)
    assert outcome.wire_bytes < outcome.raw_bytes / 2
    chunks = -(-PROMPT // CHUNK)
    assert Counter((f.layer_start, f.layer_end) for f in sent) == dict.fromkeys(
        ((1, 3), (4, 6), (7, 8)), chunks
    )
    await d.clean(p)
    assert p.agent.retention.used_bytes == 0


async def test_an_exact_request_gets_its_layers_one_by_one(
    prefill_site: Any, decode_site: Any, tokens: Any, fields: Any, sent: list[Frame]
) -> None:
    p = await prefill_site(engine=ENGINE, **fields)
    d = await decode_site({"fra/p0": p}, engine=ENGINE, staging_bytes=1 << 20, **fields)
    await d.ready("fra/p0")
    sent.clear()
    prompt = tokens(PROMPT)
    done = await d.engine.fetch(d.params("fra/p0"), prompt)
    assert d.engine.staged_is_right(done, prompt)
    d.engine.release(done)
    assert {f.layer_end - f.layer_start for f in sent} == {1}
    await d.clean(p)


async def test_a_ring_that_does_not_hold_a_span_does_not_stop_it(
    prefill_site: Any, decode_site: Any, tokens: Any, fields: Any
) -> None:
    ring_bytes = CHUNK * GROUP.token_bytes * 3 // 2
    p = await prefill_site(engine=ENGINE, ring_bytes=ring_bytes, **fields)
    d = await decode_site({"fra/p0": p}, engine=ENGINE, staging_bytes=1 << 20, **fields)
    await d.ready("fra/p0")
    prompt = tokens(PROMPT)
    params = d.params("fra/p0", quality="compact")
    await staged(d, await d.engine.fetch(params, prompt), prompt)
    await d.clean(p)


async def test_heads_of_several_ranks_come_exactly_and_one_by_one(
    prefill_site: Any, decode_site: Any, tokens: Any, fields: Any, sent: list[Frame]
) -> None:
    p = await prefill_site(engine={**ENGINE, "ranks": ((0, 1), (1, 2))}, **fields)
    d = await decode_site({"fra/p0": p}, engine=ENGINE, staging_bytes=1 << 20, **fields)
    await d.ready("fra/p0")
    sent.clear()
    prompt, params = tokens(PROMPT), d.params("fra/p0", quality="compact")
    done = await d.engine.fetch(params, prompt)
    assert d.engine.staged_is_right(done, prompt)
    d.engine.release(done)
    assert (await d.outcome(params)).quality == "exact"
    assert {f.layer_end - f.layer_start for f in sent} == {1}
    await d.clean(p)


async def test_a_flipped_bit_costs_that_span_again_and_nothing_else(
    prefill_site: Any, decode_site: Any, tokens: Any, fields: Any, monkeypatch: Any
) -> None:
    p = await prefill_site(engine=ENGINE, **fields)
    d = await decode_site({"fra/p0": p}, engine=ENGINE, staging_bytes=1 << 20, **fields)
    await d.ready("fra/p0")
    frames = watch(monkeypatch, lambda frame, before: frame.sequence in (0, 3, 4) and not before)
    prompt, params = tokens(PROMPT), d.params("fra/p0", quality="compact")
    await staged(d, await d.engine.fetch(params, prompt), prompt)
    await d.outcome(params)
    assert d.agent.metrics.dropped_frames.labels("corrupt")._value.get() == 3
    again = Counter(frame.sequence for frame in frames)
    assert {sequence for sequence, count in again.items() if count > 1} == {0, 3, 4}
    await d.clean(p)
    assert p.agent.metrics.resent_bytes._value.get() > 0


@pytest.mark.parametrize("stop_before", [(0, 2), (1, 4), (2, 5)])
async def test_connections_cut_within_a_span_go_on_where_they_were(
    prefill_site: Any, decode_site: Any, tokens: Any, fields: Any, stack: AsyncExitStack,
    stop_before: tuple[int, int],
) -> None:  # fmt: skip
    script = PrefillScript()
    p = await prefill_site(engine={**ENGINE, "script": script}, **fields)
    link = await stack.enter_async_context(BendableLink(LinkShape()))
    port = await link.forward("127.0.0.1", p.port)
    d = await decode_site({"fra/p0": port}, engine=ENGINE, staging_bytes=1 << 20, **fields)
    await d.ready("fra/p0")
    script.stop_before = stop_before
    chunk, layer = stop_before
    spans = (1, 2), (4, 5), (7,)
    whole = chunk * len(spans) + sum(span[-1] < layer for span in spans)
    prompt, params = tokens(PROMPT), d.params("fra/p0", quality="compact")
    _, answer = d.engine.begin_fetch(params, prompt)
    await eventually(lambda: d.link("fra/p0").info().sessions)
    (machine,) = d.link("fra/p0").sessions
    await eventually(lambda: machine.ledger.frames == whole)
    await eventually(lambda: len(p.agent.sessions) == 1)
    await eventually(lambda: any(start.use_cache for start, _ in p.engine.prefills))
    (served,) = p.agent.sessions.values()
    # Nothing of the span that is under way lies in the engine's ring meanwhile.
    await eventually(lambda: p.agent._hub.unfreed_records == 0)
    link.drop_connections()
    await eventually(lambda: served.resumes == 1)
    script.go.set()
    await staged(d, await asyncio.wait_for(answer, 10), prompt)
    assert (await d.outcome(params)).wire_bytes == machine.wire_bytes
    await d.clean(p)


async def test_a_prefill_that_fails_within_a_span_keeps_whole_chunks(
    prefill_site: Any, decode_site: Any, tokens: Any, fields: Any
) -> None:
    script = PrefillScript(layer_s=0.002)
    p = await prefill_site(engine={**ENGINE, "script": script}, **fields)
    d = await decode_site({"fra/p0": p}, engine=ENGINE, staging_bytes=1 << 20, **fields)
    await d.ready("fra/p0")
    script.fail_before = (2, 5)
    prompt = tokens(PROMPT)
    done = await d.engine.fetch(d.params("fra/p0", quality="compact"), prompt)
    assert (done.status, done.reason) == ("partial", "engine_unavailable")
    assert done.token_end == 2 * CHUNK
    assert worst_error(d.engine, done, prompt) < 3 * STEP
    d.engine.release(done)
    await d.clean(p)


async def test_a_session_that_is_cancelled_within_a_span_leaves_nothing(
    prefill_site: Any, decode_site: Any, tokens: Any, fields: Any
) -> None:
    script = PrefillScript()
    p = await prefill_site(engine={**ENGINE, "script": script}, **fields)
    d = await decode_site({"fra/p0": p}, engine=ENGINE, staging_bytes=1 << 20, **fields)
    await d.ready("fra/p0")
    script.stop_before = (1, 2)
    session, _ = d.engine.begin_fetch(d.params("fra/p0", quality="compact"), tokens(PROMPT))
    await eventually(lambda: d.link("fra/p0").info().sessions)
    (machine,) = d.link("fra/p0").sessions
    await eventually(lambda: machine.ledger.frames == 3)
    d.engine.abort(session)
    script.go.set()
    await d.clean(p)


# --- what is gathered at P ---


def held(layer: int, tokens: tuple[int, int] = (64, 128), codecs: Any = None) -> Held:
    rng = np.random.default_rng(layer)
    values = rng.normal(size=2 * 64 * GROUP.kv_heads * GROUP.head_dim).astype(np.float32)
    raw = (values.view("<u4") >> 16).astype("<u2").view(np.uint8)
    piece = Piece(1, layer, 0, *tokens, 0, GROUP.kv_heads)
    return Held(piece, raw, layer == 1, codecs or (codec(), PlanesZstdCodec()), SPANS[0])


def test_a_span_is_given_out_when_its_last_layer_comes_in_whatever_order() -> None:
    gather = SpanGather()
    first, second = held(1), held(2)
    other = held(2, (128, 192))
    assert gather.add(second) is None
    assert gather.add(other) is None
    assert gather.add(first) == [first, second]
    assert len(gather) == 1
    assert gather.rest() == [[other]]
    assert not gather


def test_layers_without_their_neighbours_go_exactly_and_alone() -> None:
    each = held(2)
    (found,) = encode_span([each], GROUP)
    assert (found.codec.name, found.pieces) == ("planes-zstd", (each.piece,))
    both = encode_span([held(1), each], GROUP)
    assert [found.codec.id for found in both] == [6]
    assert both[0].pieces == (held(1).piece, each.piece)
    assert both[0].raw_bytes == 2 * each.raw.nbytes


def test_a_frame_that_would_be_more_than_a_message_goes_layer_by_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(encoding, "MESSAGE_BYTES", 4096)
    found = encode_span([held(1), held(2)], GROUP)
    assert [len(each.pieces) for each in found] == [1, 1]
    assert {each.codec.quality for each in found} == {RAW.quality}
