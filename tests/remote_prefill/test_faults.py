"""One leg fails: refusals, cuts, silence and flipped bits; whole chunks are kept."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from prfaas.frames import Frame
from prfaas.testing.link import BendableLink, LinkShape
from prfaas.testing.scripted_port import SCRIPTED_LAYOUT, PrefillScript
from prfaas.testing.waiting import eventually
from remote_prefill import served_link
from remote_prefill.served_link import message_of

PROMPT = 22


def count(counter: Any, *labels: str) -> float:
    return float(counter.labels(*labels)._value.get())


def served(site: Any) -> list[Any]:
    """Prefills at a P engine other than numeric probes."""
    return [start for start, _ in site.engine.prefills if start.use_cache]


async def test_an_instance_nobody_listens_at_goes_local_at_once(
    decode_site: Any, tokens: Any
) -> None:
    d = await decode_site({"fra/p0": 1})
    await eventually(lambda: d.link("fra/p0").state == "down")
    params = d.params("fra/p0")
    done = await asyncio.wait_for(d.engine.fetch(params, tokens(PROMPT)), 1)
    assert (done.status, done.reason) == ("local", "peer_unavailable")
    outcome = await d.outcome(params)
    assert (outcome.status, outcome.tried) == ("local", ("fra/p0",))
    assert count(d.agent.metrics.tries, "fra", "p0", "peer_unavailable") == 1
    await d.clean()


async def test_a_refusal_goes_to_the_next_instance_and_then_local(
    prefill_site: Any, decode_site: Any, tokens: Any
) -> None:
    small = SCRIPTED_LAYOUT.session_bytes(0, 64)
    full = await prefill_site("p0", retention_bytes=small, limits={"prefill_queue_sessions": 1})
    good = await prefill_site("p1")
    d = await decode_site({"fra/p0": full, "fra/p1": good})
    await d.ready("fra/p0", "fra/p1")
    full.agent.drain()
    params = d.params("fra/p0", "fra/p1")
    prompt = tokens(PROMPT)
    done = await d.engine.fetch(params, prompt)
    assert done.status == "staged"
    assert d.engine.staged_is_right(done, prompt)
    d.engine.release(done)
    outcome = await d.outcome(params)
    assert outcome.tried == ("fra/p0", "fra/p1")
    why, no_fault = outcome.tried_reasons
    assert (why in ("overloaded", "peer_unavailable"), no_fault) == (True, ""), why
    assert outcome.instance == "p1"
    good.agent.drain()
    params = d.params("fra/p1", "fra/p0")
    done = await d.engine.fetch(params, prompt)
    assert (done.status, done.reason) == ("local", "peer_unavailable")
    await d.clean(full, good)


@pytest.mark.parametrize("on_failure", ["local", "reject"])
async def test_a_prefill_that_fails_midway_keeps_whole_chunks_where_local_is_granted(
    prefill_site: Any, decode_site: Any, tokens: Any, on_failure: str
) -> None:
    p = await prefill_site(engine={"script": PrefillScript(layer_s=0.002)})
    d = await decode_site({"fra/p0": p})
    await d.ready("fra/p0")
    p.engine.script.fail_before = (2, 1)
    prompt = tokens(PROMPT)
    params = d.params("fra/p0", on_failure=on_failure)
    done = await d.engine.fetch(params, prompt, 3)
    if on_failure == "reject":
        assert (done.status, done.reason) == ("refused", "engine_unavailable")
    else:
        assert (done.status, done.reason) == ("partial", "engine_unavailable")
        assert done.token_end == 16
        assert d.engine.staged_is_right(done, prompt, 3)
        d.engine.release(done)
    outcome = await d.outcome(params)
    assert outcome.status == ("partial" if on_failure == "local" else "refused")
    assert outcome.received_tokens == (13 if on_failure == "local" else 0)
    await d.clean(p)


@pytest.mark.parametrize("chunk_tokens", [8, 5])
async def test_the_next_instance_resumes_at_the_whole_chunks(
    prefill_site: Any, decode_site: Any, tokens: Any, chunk_tokens: int
) -> None:
    first = await prefill_site("p0", engine={"script": PrefillScript(layer_s=0.002)})
    second = await prefill_site("p1", engine={"chunk_tokens": chunk_tokens})
    d = await decode_site({"fra/p0": first, "fra/p1": second})
    await d.ready("fra/p0", "fra/p1")
    first.engine.script.fail_before = (2, 1)
    prompt = tokens(PROMPT)
    params = d.params("fra/p0", "fra/p1")
    done = await d.engine.fetch(params, prompt)
    assert (done.status, done.chunk_tokens) == ("staged", 8)
    assert d.engine.staged_is_right(done, prompt)
    (start,) = served(second)
    assert (start.send_from, start.epoch) == (16, 2)
    d.engine.release(done)
    assert (await d.outcome(params)).tried == ("fra/p0", "fra/p1")
    await d.clean(first, second)


async def test_chunks_on_another_grid_are_kept_as_far_as_the_first_grid_goes(
    prefill_site: Any, decode_site: Any, tokens: Any
) -> None:
    first = await prefill_site("p0", engine={"script": PrefillScript(layer_s=0.002)})
    second = await prefill_site("p1", engine={"chunk_tokens": 5, "script": PrefillScript()})
    d = await decode_site({"fra/p0": first, "fra/p1": second})
    await d.ready("fra/p0", "fra/p1")
    first.engine.script.fail_before = (1, 1)
    second.engine.script.fail_before = (3, 2)  # whole to 15 on its grid: 8 on the first one
    prompt = tokens(PROMPT)
    done = await d.engine.fetch(d.params("fra/p0", "fra/p1"), prompt)
    assert (done.status, done.token_end, done.chunk_tokens) == ("partial", 8, 8)
    assert d.engine.staged_is_right(done, prompt)
    d.engine.release(done)
    await d.clean(first, second)


async def test_connections_cut_midway_go_on_where_they_were(
    prefill_site: Any, decode_site: Any, tokens: Any, stack: AsyncExitStack
) -> None:
    p = await prefill_site(engine={"script": PrefillScript()})
    link = await stack.enter_async_context(BendableLink(LinkShape()))
    d = await decode_site({"fra/p0": await link.forward("127.0.0.1", p.port)})
    prompt, params = tokens(PROMPT), d.params("fra/p0")
    answer, machine = await d.half_sent(p, params, prompt)
    link.drop_connections()
    await eventually(lambda: link.stats.connections)
    p.engine.script.go.set()
    done = await asyncio.wait_for(answer, 5)
    assert done.status == "staged"
    assert d.engine.staged_is_right(done, prompt)
    d.engine.release(done)
    assert (await d.outcome(params)).wire_bytes == machine.wire_bytes
    await d.clean(p)
    assert count(d.agent.metrics.resumes, "fra", "p0") == 1
    assert len(served(p)) == 1  # the session went on, nothing was computed twice
    assert count(d.agent.metrics.wasted_bytes, "fra", "p0") == 0


async def test_an_instance_that_stays_away_leaves_whole_chunks(
    prefill_site: Any, decode_site: Any, tokens: Any, stack: AsyncExitStack
) -> None:
    p = await prefill_site(engine={"script": PrefillScript()}, limits={"lease_s": 0.5})
    link = await stack.enter_async_context(BendableLink(LinkShape()))
    d = await decode_site({"fra/p0": await link.forward("127.0.0.1", p.port)})
    prompt, params = tokens(PROMPT), d.params("fra/p0")
    answer, _ = await d.half_sent(p, params, prompt)
    link.refuse = True
    link.drop_connections()
    done = await asyncio.wait_for(answer, 5)
    assert (done.status, done.reason, done.token_end) == ("partial", "peer_unavailable", 8)
    assert d.engine.staged_is_right(done, prompt)
    d.engine.release(done)
    await d.clean(p)  # by its lease: nobody could tell it
    p.engine.script.go.set()
    link.refuse = False
    await eventually(lambda: d.link("fra/p0").ready, within_s=10)  # and it comes back by itself
    done = await d.engine.fetch(d.params("fra/p0"), prompt)
    assert done.status == "staged"
    d.engine.release(done)
    await d.clean(p)


@pytest.mark.parametrize(
    ("limits", "stop_before", "reason", "token_end"),
    [
        ({"connect_timeout_s": 0.2}, None, "prefill_timeout_connect", 0),
        ({"first_frame_timeout_s": 0.2}, (0, 0), "prefill_timeout_first_frame", 0),
        ({"progress_timeout_s": 0.2}, (1, 1), "prefill_timeout_progress", 8),
        ({"transfer_timeout_s": 0.2}, (1, 1), "prefill_timeout_total", 8),
    ],
)
async def test_silence_is_ended_by_the_deadline_of_its_phase(
    prefill_site: Any,
    decode_site: Any,
    tokens: Any,
    stack: AsyncExitStack,
    limits: dict[str, Any],
    stop_before: Any,
    reason: str,
    token_end: int,
) -> None:
    p = await prefill_site(engine={"script": PrefillScript()})
    link = await stack.enter_async_context(BendableLink(LinkShape()))
    d = await decode_site({"fra/p0": await link.forward("127.0.0.1", p.port)}, limits=limits)
    await d.ready("fra/p0")
    p.engine.script.stop_before = stop_before
    if stop_before is None:
        link.stall(True)
    started = time.monotonic()
    done = await d.engine.fetch(d.params("fra/p0"), tokens(PROMPT))
    assert time.monotonic() - started < 1.5
    assert (done.status, done.reason) == ("partial" if token_end else "local", reason)
    assert done.token_end == token_end
    if token_end:
        d.engine.release(done)
    link.stall(False)
    await d.clean(p)


async def test_a_long_transfer_that_moves_outlives_the_progress_timeout(
    prefill_site: Any, decode_site: Any, tokens: Any
) -> None:
    p = await prefill_site(engine={"script": PrefillScript()})
    d = await decode_site({"fra/p0": p}, limits={"progress_timeout_s": 0.3})
    await d.ready("fra/p0")
    p.engine.script.layer_s = 0.1
    done = await d.engine.fetch(d.params("fra/p0"), tokens(PROMPT))
    assert done.status == "staged"
    d.engine.release(done)
    await d.clean(p)


async def test_a_queued_session_waits_as_long_as_it_hears_its_place(
    prefill_site: Any, decode_site: Any, tokens: Any
) -> None:
    p = await prefill_site(
        engine={"script": PrefillScript()},
        retention_bytes=SCRIPTED_LAYOUT.session_bytes(0, 64),
        limits={"progress_timeout_s": 0.15},
    )
    d = await decode_site({"fra/p0": p}, limits={"progress_timeout_s": 0.3})
    await d.ready("fra/p0")
    p.engine.script.stop_before = (0, 0)
    other = p.agent.retention.request(p.agent.retention.capacity, retry_after_s=1)
    _, answer = d.engine.begin_fetch(d.params("fra/p0"), tokens(PROMPT))
    await asyncio.sleep(0.6)
    assert not answer.done()
    other.release()
    p.engine.script.go.set()
    done = await asyncio.wait_for(answer, 5)
    assert done.status == "staged"
    d.engine.release(done)
    await d.clean(p)


def flip_bits(monkeypatch: pytest.MonkeyPatch, which: Callable[[Frame, int], bool]) -> None:
    """Flip a payload bit of the frames P sends of which `which` is true; it also gets how often
    that frame was sent before.
    """
    sent: Counter[tuple[int, int]] = Counter()

    def flipped(frame: Frame) -> Frame:
        key = (frame.session, frame.sequence)
        sent[key] += 1
        if not which(frame, sent[key] - 1):
            return frame
        payload = bytes(frame.payload)
        return replace(frame, payload=payload[:-1] + bytes([payload[-1] ^ 1]))

    monkeypatch.setattr(
        served_link, "message_of", lambda frames: message_of([flipped(f) for f in frames])
    )


async def test_a_flipped_bit_is_found_and_that_frame_fetched_again(
    prefill_site: Any, decode_site: Any, tokens: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = await prefill_site(engine={"script": PrefillScript(layer_s=0.001)})
    d = await decode_site({"fra/p0": p})
    await d.ready("fra/p0")
    flip_bits(monkeypatch, lambda frame, before: frame.sequence in (2, 3, 5) and not before)
    prompt, params = tokens(PROMPT), d.params("fra/p0")
    done = await d.engine.fetch(params, prompt)
    assert (done.status, done.reason) == ("staged", "")
    assert d.engine.staged_is_right(done, prompt)
    d.engine.release(done)
    await d.clean(p)
    assert count(d.agent.metrics.dropped_frames, "corrupt") == 3
    assert p.agent.metrics.resent_bytes._value.get() > 0


async def test_ten_broken_frames_in_a_row_fail_the_session_loudly(
    prefill_site: Any, decode_site: Any, tokens: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = await prefill_site(engine={"script": PrefillScript(layer_s=0.001)})
    d = await decode_site({"fra/p0": p})
    await d.ready("fra/p0")
    flip_bits(monkeypatch, lambda frame, before: frame.sequence >= 5)
    prompt, params = tokens(PROMPT), d.params("fra/p0")
    done = await d.engine.fetch(params, prompt)
    assert (done.status, done.reason, done.token_end) == ("partial", "corrupt_kv", 8)
    assert d.engine.staged_is_right(done, prompt)
    d.engine.release(done)
    assert (await d.outcome(params)).status == "partial"
    await d.clean(p)
    assert count(d.agent.metrics.dropped_frames, "corrupt") >= 10


async def test_a_peer_that_talks_nonsense_is_an_error_and_no_crash(
    decode_site: Any, tokens: Any, stack: AsyncExitStack
) -> None:
    async def nonsense(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(np.random.default_rng(0).bytes(4096))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(nonsense, "127.0.0.1", 0)
    stack.push_async_callback(server.wait_closed)
    stack.callback(server.close)
    port = server.sockets[0].getsockname()[1]
    d = await decode_site({"fra/p0": port}, limits={"connect_timeout_s": 0.2})
    await eventually(lambda: d.link("fra/p0").state == "down")
    done = await d.engine.fetch(d.params("fra/p0"), tokens(PROMPT))
    assert (done.status, done.reason) == ("local", "peer_unavailable")
    await d.clean()
