"""Both agents and scripted engines: fetches, faults, aborts; nothing is left behind."""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from contextlib import AsyncExitStack
from typing import Any

import numpy as np
import pytest

from prfaas.codecs import PlanesZstdCodec
from prfaas.rpc import convert
from prfaas.rpc.v1 import prefill_pb2 as pb
from prfaas.testing.link import BendableLink, LinkShape
from prfaas.testing.scripted_port import SCRIPTED_LAYOUT, PrefillScript, ScriptedEngine
from prfaas.testing.waiting import eventually
from remote_prefill.telemetry_service import TELEMETRY

PROMPT = 22
WANT = PROMPT - 1


def count(counter: Any, *labels: str) -> float:
    return float(counter.labels(*labels)._value.get())


def served(site: Any) -> list[Any]:
    """Prefills at a P engine other than numeric probes."""
    return [start for start, _ in site.engine.prefills if start.use_cache]


@pytest.mark.parametrize("have", [0, 5, 8, 12])
async def test_a_fetch_is_staged_exactly_and_its_outcome_reported(
    prefill_site: Any, decode_site: Any, tokens: Any, have: int
) -> None:
    p = await prefill_site(engine={"script": PrefillScript(cached_tokens=4, layer_s=0.002)})
    d = await decode_site({"fra/p0": p}, engine={"chunk_tokens": 6, "block_tokens": 3})
    await d.ready("fra/p0")
    prompt, params = tokens(PROMPT), d.params("fra/p0")
    done = await d.engine.fetch(params, prompt, have)
    assert (done.status, done.reason, done.token_end, done.chunk_tokens) == ("staged", "", WANT, 8)
    assert d.engine.staged_is_right(done, prompt, have)
    assert params["transfer_id"] in d.agent.feed.active
    d.engine.release(done)
    outcome = await d.outcome(params)
    assert (outcome.status, outcome.reason) == ("staged", "")
    assert (outcome.peer, outcome.instance, outcome.tried) == ("fra", "p0", ("fra/p0",))
    assert (outcome.have_tokens, outcome.want_tokens) == (have, WANT)
    assert (outcome.received_tokens, outcome.remote_cached_tokens) == (WANT - have, 4)
    assert outcome.raw_bytes == SCRIPTED_LAYOUT.session_bytes(have, WANT)
    assert 0 < outcome.hidden_wire_bytes < outcome.wire_bytes
    assert set(outcome.phases) >= {"staging", "connect", "queue", "first_frame", "transfer"}
    assert set(outcome.phases) >= {"remote_compute", "import", "total"}
    start, sent = p.engine.prefills[-1]
    assert (start.salt, start.use_cache, start.send_from) == ("salt", True, have)
    assert (sent == prompt[:-1]).all()
    await d.clean(p)


@pytest.mark.parametrize(
    ("p_engine", "d_engine"),
    [
        ({"ranks": ((0, 1), (1, 2))}, {}),
        ({}, {"ranks": ((0, 1), (1, 2))}),
        ({"block_tokens": 16, "chunk_tokens": 5}, {"block_tokens": 64, "chunk_tokens": 64}),
        ({"paced": True}, {"paced": True}),
    ],
)
async def test_ranks_blocks_and_chunks_are_each_sides_own_affair(
    prefill_site: Any, decode_site: Any, tokens: Any, p_engine: Any, d_engine: Any
) -> None:
    p = await prefill_site(engine=p_engine)
    d = await decode_site({"fra/p0": p}, engine=d_engine)
    await d.ready("fra/p0")
    prompt = tokens(PROMPT)
    done = await d.engine.fetch(d.params("fra/p0"), prompt, 3)
    assert done.status == "staged"
    assert d.engine.staged_is_right(done, prompt, 3)
    d.engine.release(done)
    await d.clean(p)


# --- who may have something fetched ---


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("forged", "unauthorized"),
        ("unsigned", "unauthorized"),
        ("tampered", "unauthorized"),
        ("malformed", "invalid_request"),
        ("address", "invalid_request"),
        ("expired", "expired"),
        ("replayed", "replayed"),
        ("unknown", "unknown_peer"),
        ("empty", "no_plan"),
        ("quality", "unsupported_quality"),
    ],
)
async def test_parameters_that_do_not_hold_dial_nobody_and_are_counted(
    prefill_site: Any, decode_site: Any, tokens: Any, how: str, reason: str
) -> None:
    p = await prefill_site()
    d = await decode_site({"fra/p0": p})
    await d.ready("fra/p0")
    prompt = tokens(PROMPT)
    params = d.params("fra/p0")
    expected = 0
    if how == "forged":
        params = d.params("fra/p0", key=b"other key")
    elif how == "unsigned":
        params["mac"] = ""
    elif how == "tampered":
        params["plan"] = [{"peer": "fra", "instance": "p1"}]
    elif how == "malformed":
        del params["plan"]
    elif how == "address":
        params["plan"] = [{"peer": "fra", "instance": "p0", "address": "127.0.0.1:1"}]
    elif how == "expired":
        params = d.params("fra/p0", expires=time.time() - 1)
    elif how == "unknown":
        params = d.params("fra/p0", "fra/p7")
    elif how == "empty":
        params = d.params()
    elif how == "quality":
        params = d.params("fra/p0", quality="tight")
    else:
        d.engine.release(await d.engine.fetch(params, prompt))
        expected = 1
    done = await d.engine.fetch(params, prompt)
    assert (done.status, done.reason) == ("local", reason)
    assert len(served(p)) == expected
    assert count(d.agent.metrics.fetches, "local", reason) == 1
    known = {"expired", "unknown_peer", "no_plan", "unsupported_quality"}
    if reason in known:
        outcome = await d.outcome(params)
        assert (outcome.status, outcome.reason, outcome.tried) == ("local", reason, ())
    elif reason == "replayed":
        assert (await d.outcome(params)).status == "staged"
    else:
        assert not d.outcomes()
    await d.clean(p)


async def test_a_signed_reject_is_refused_where_local_is_not_granted(
    prefill_site: Any, decode_site: Any, tokens: Any
) -> None:
    p = await prefill_site()
    d = await decode_site({"fra/p0": p})
    params = d.params("fra/p9", on_failure="reject")
    done = await d.engine.fetch(params, tokens(PROMPT))
    assert (done.status, done.reason) == ("refused", "unknown_peer")
    assert "fra/p9" in done.message
    assert done.retry_after_s > 0
    assert (await d.outcome(params)).status == "refused"


# --- one leg fails ---


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


async def test_a_connection_cut_midway_keeps_whole_chunks(
    prefill_site: Any, decode_site: Any, tokens: Any, stack: AsyncExitStack
) -> None:
    p = await prefill_site(engine={"script": PrefillScript()})
    link = await stack.enter_async_context(BendableLink(LinkShape()))
    d = await decode_site({"fra/p0": await link.forward("127.0.0.1", p.port)})
    await d.ready("fra/p0")
    p.engine.script.stop_before = (1, 2)
    prompt, params = tokens(PROMPT), d.params("fra/p0")
    _, answer = d.engine.begin_fetch(params, prompt)
    await eventually(lambda: d.link("fra/p0").info().sessions)
    (machine,) = d.link("fra/p0")._sessions
    await eventually(lambda: machine.ledger.frames == 5)
    link.drop_connections()
    done = await asyncio.wait_for(answer, 5)
    assert (done.status, done.reason, done.token_end) == ("partial", "peer_unavailable", 8)
    assert d.engine.staged_is_right(done, prompt)
    d.engine.release(done)
    await d.clean(p)
    await d.ready("fra/p0")  # and it comes back by itself
    p.engine.script.go.set()
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


async def test_a_flipped_bit_is_found_and_whole_chunks_before_it_are_kept(
    prefill_site: Any, decode_site: Any, tokens: Any
) -> None:
    p = await prefill_site(engine={"script": PrefillScript(layer_s=0.001)})
    d = await decode_site({"fra/p0": p})
    await d.ready("fra/p0")
    make_sender = p.agent.sender

    def sender(session: Any, write: Any) -> Any:
        kv_bytes = 0

        async def flip(message: bytes) -> None:
            nonlocal kv_bytes
            kv_bytes += len(message)
            if session.machine.ledger.frames > 4:
                message = message[:-1] + bytes([message[-1] ^ 1])
            await write(message)

        return make_sender(session, flip)

    p.agent.sender = sender
    prompt, params = tokens(PROMPT), d.params("fra/p0")
    done = await d.engine.fetch(params, prompt)
    assert (done.status, done.reason, done.token_end) == ("partial", "corrupt_kv", 8)
    assert d.engine.staged_is_right(done, prompt)
    d.engine.release(done)
    assert (await d.outcome(params)).status == "partial"
    await d.clean(p)


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


# --- staging ---


async def test_a_hundred_fetches_with_staging_for_three_are_all_answered(
    prefill_site: Any, decode_site: Any, tokens: Any
) -> None:
    p = await prefill_site(engine={"script": PrefillScript()})
    one = -(-SCRIPTED_LAYOUT.session_bytes(0, WANT) // 64) * 64
    d = await decode_site({"fra/p0": p}, staging_bytes=3 * one)
    await d.ready("fra/p0")
    open_at_once: list[int] = []

    async def fetch(seed: int) -> str:
        prompt = tokens(PROMPT, seed)
        done = await d.engine.fetch(d.params("fra/p0"), prompt)
        open_at_once.append(d.agent.side.staging.extents)
        if done.status == "staged":
            assert d.engine.staged_is_right(done, prompt)
            d.engine.release(done)
        return f"{done.status} {done.reason}".strip()

    answers = await asyncio.gather(*(fetch(seed) for seed in range(100)))
    assert set(answers) == {"staged"}
    assert max(open_at_once) <= 3
    await d.clean(p)
    assert len(d.outcomes()) == 100


async def test_no_staging_in_time_or_ever_goes_local_with_its_reason(
    prefill_site: Any, decode_site: Any, tokens: Any
) -> None:
    p = await prefill_site()
    one = -(-SCRIPTED_LAYOUT.session_bytes(0, WANT) // 64) * 64
    d = await decode_site(
        {"fra/p0": p}, staging_bytes=one, limits={"staging_timeout_s": 0.1, "agent_max_sessions": 3}
    )
    await d.ready("fra/p0")
    held = await d.engine.fetch(d.params("fra/p0"), tokens(PROMPT))
    assert held.status == "staged"
    done = await d.engine.fetch(d.params("fra/p0"), tokens(PROMPT))
    assert (done.status, done.reason) == ("local", "staging_full")
    done = await d.engine.fetch(d.params("fra/p0"), tokens(PROMPT + 10))
    assert (done.status, done.reason) == ("local", "staging_too_small")
    waiting = [d.engine.begin_fetch(d.params("fra/p0"), tokens(PROMPT))[1] for _ in range(2)]
    done = await d.engine.fetch(d.params("fra/p0"), tokens(PROMPT))
    assert (done.status, done.reason) == ("local", "overloaded")
    await asyncio.wait(waiting)
    d.engine.release(held)
    await d.clean(p)


# --- aborts ---


@pytest.mark.parametrize(
    "phase", ["staging", "queued", "first_frame", "midway", "staged", "stalled"]
)
async def test_an_abort_in_any_phase_frees_both_sides(
    prefill_site: Any, decode_site: Any, tokens: Any, stack: AsyncExitStack, phase: str
) -> None:
    p = await prefill_site(engine={"script": PrefillScript()})
    link = await stack.enter_async_context(BendableLink(LinkShape()))
    one = -(-SCRIPTED_LAYOUT.session_bytes(0, WANT) // 64) * 64
    d = await decode_site(
        {"fra/p0": await link.forward("127.0.0.1", p.port)}, staging_bytes=2 * one
    )
    await d.ready("fra/p0")
    script = p.engine.script
    prompt, params = tokens(PROMPT), d.params("fra/p0")
    holders: list[Any] = []
    if phase == "staging":
        for _ in range(2):
            holders.append(await d.engine.fetch(d.params("fra/p0"), prompt))
    elif phase == "queued":
        holders.append(p.agent.retention.request(p.agent.retention.capacity, retry_after_s=1))
    elif phase == "first_frame":
        script.stop_before = (0, 0)
    elif phase in ("midway", "stalled"):
        script.stop_before = (1, 1)
    session, answer = d.engine.begin_fetch(params, prompt)
    if phase == "staging":
        await eventually(lambda: d.agent.side.staging.waiting == 1)
    elif phase == "queued":
        await eventually(lambda: p.agent.retention.waiting == 1)
    elif phase == "staged":
        assert (await answer).status == "staged"
    else:
        await eventually(lambda: served(p))
        (machine,) = d.link("fra/p0")._sessions
        await eventually(lambda: machine.ledger.frames == (0 if phase == "first_frame" else 4))
    if phase == "stalled":
        link.stall(True)
    d.engine.abort(session)
    outcome = await d.outcome(params)
    assert (outcome.status, outcome.reason, outcome.received_tokens) == ("aborted", "", 0)
    link.stall(False)
    for holder in holders:
        if phase == "staging":
            d.engine.release(holder)
        else:
            holder.release()
    await d.clean(p)
    assert not d.engine.late_done
    if phase in ("first_frame", "midway", "stalled"):
        await eventually(lambda: p.engine.ended and p.engine.ended[-1].status == "cancelled")
    script.stop_before = None
    done = await d.engine.fetch(d.params("fra/p0"), prompt)
    assert d.engine.staged_is_right(done, prompt)
    d.engine.release(done)
    await d.clean(p)


async def test_counts_are_back_after_many_aborts_at_random_moments(
    prefill_site: Any, decode_site: Any, tokens: Any
) -> None:
    p = await prefill_site(engine={"script": PrefillScript(layer_s=0.0005)})
    d = await decode_site({"fra/p0": p})
    await d.ready("fra/p0")
    rng = np.random.default_rng(1)
    prompts: list[Any] = []

    async def one(delay_s: float) -> None:
        params = d.params("fra/p0")
        prompts.append(params)
        session, _ = d.engine.begin_fetch(params, tokens(PROMPT))
        await asyncio.sleep(delay_s)
        d.engine.abort(session)

    for _ in range(25):
        await asyncio.gather(*(one(float(rng.uniform(0, 0.02))) for _ in range(8)))
    await d.clean(p)
    outcomes = d.outcomes()
    assert len(outcomes) == 200
    assert {o.status for o in outcomes.values()} == {"aborted"}


async def test_a_decode_that_runs_when_the_abort_comes_never_writes_into_the_next_owners_bytes(
    prefill_site: Any, decode_site: Any, tokens: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = await prefill_site()
    one = -(-SCRIPTED_LAYOUT.session_bytes(0, WANT) // 64) * 64
    d = await decode_site({"fra/p0": p}, staging_bytes=one, codec_threads=2)
    await d.ready("fra/p0")
    decode = PlanesZstdCodec.decode_into
    entered, go = threading.Event(), threading.Event()
    held: list[bool] = []

    def slow(self: Any, payload: Any, out: Any, item_bytes: int) -> None:
        if not held:
            held.append(True)
            entered.set()
            go.wait(5)
        decode(self, payload, out, item_bytes)

    monkeypatch.setattr(PlanesZstdCodec, "decode_into", slow)
    params = d.params("fra/p0")
    session, _ = d.engine.begin_fetch(params, tokens(PROMPT, 1))
    await asyncio.to_thread(entered.wait, 5)
    d.engine.abort(session)
    assert (await d.outcome(params)).status == "aborted"
    assert d.agent.side.staging.extents == 1  # fenced: still taken
    prompt = tokens(PROMPT, 2)
    _, answer = d.engine.begin_fetch(d.params("fra/p0"), prompt)
    await eventually(lambda: d.agent.side.staging.waiting == 1)
    go.set()
    done = await asyncio.wait_for(answer, 5)
    assert d.engine.staged_is_right(done, prompt)
    d.engine.release(done)
    await d.clean(p)


async def test_an_engine_that_leaves_ends_its_fetches_and_the_prefills_for_them(
    prefill_site: Any, decode_site: Any, tokens: Any
) -> None:
    p = await prefill_site(engine={"script": PrefillScript()})
    d = await decode_site({"fra/p0": p})
    await d.ready("fra/p0")
    staged = d.params("fra/p0")
    await d.engine.fetch(staged, tokens(PROMPT))
    p.engine.script.stop_before = (1, 1)
    running = d.params("fra/p0")
    d.engine.begin_fetch(running, tokens(PROMPT))
    await eventually(lambda: len(served(p)) == 2)
    await d.engine.close()
    for params in (staged, running):
        outcome = await d.outcome(params)
        assert (outcome.status, outcome.reason) == ("failed", "engine_unavailable")
    await d.clean(p)
    assert d.link("fra/p0").detail == "no engine is connected here"


async def test_a_second_engine_pairs_anew_and_is_served(
    prefill_site: Any, decode_site: Any, tokens: Any
) -> None:
    p = await prefill_site()
    d = await decode_site({"fra/p0": p})
    await d.ready("fra/p0")
    await d.engine.close()
    await eventually(lambda: not d.link("fra/p0").ready)
    d.engine = ScriptedEngine(d.socket, epoch="epoch-2")
    try:
        await d.engine.start()
        await d.ready("fra/p0")
        assert [s.use_cache for s, _ in d.engine.prefills] == [False]
        done = await d.engine.fetch(d.params("fra/p0"), tokens(PROMPT))
        assert done.status == "staged"
    finally:
        await d.engine.close()


# --- imports ---


@pytest.mark.parametrize("result", ["imported", "failed", "aborted", "wrong"])
async def test_what_the_engine_says_of_its_import_is_in_the_outcome(
    prefill_site: Any, decode_site: Any, tokens: Any, result: str
) -> None:
    p = await prefill_site()
    d = await decode_site({"fra/p0": p}, verify_import=True)
    await d.ready("fra/p0")
    params, prompt = d.params("fra/p0"), tokens(PROMPT)
    done = await d.engine.fetch(params, prompt, 3)
    digest = hashlib.blake2b(d.engine.staged_bytes(done, 3), digest_size=16).hexdigest()
    if result == "wrong":
        d.engine.release(done, digest=digest[::-1])
    else:
        d.engine.release(done, result=result, digest=digest if result == "imported" else "")
    outcome = await d.outcome(params)
    expected = {
        "imported": ("staged", ""),
        "failed": ("failed", "import_failed"),
        "aborted": ("aborted", ""),
        "wrong": ("failed", "digest_mismatch"),
    }
    assert (outcome.status, outcome.reason) == expected[result]
    counted = "digest_mismatch" if result == "wrong" else result
    assert count(d.agent.metrics.imports, counted) == 1
    await d.clean(p)


# --- Watch ---


async def test_a_watcher_sees_engine_links_start_and_outcome(
    prefill_site: Any, decode_site: Any, tokens: Any
) -> None:
    p = await prefill_site()
    d = await decode_site({"fra/p0": p})
    await d.ready("fra/p0")
    watch = d.channel.unary_stream(
        f"/{TELEMETRY}/Watch", pb.WatchRequest.SerializeToString, pb.WatchEvent.FromString
    )
    call = watch(pb.WatchRequest(gateway="g"))
    first = convert.watch_from_pb(await call.read())
    assert (first.full, first.seq, first.agent) == (True, 1, "d0")
    (engine,) = first.engines
    assert (engine.name, engine.ready, engine.model) == ("d0", True, "scripted-model")
    assert engine.free_staging_bytes == d.agent.side.staging.capacity
    assert [k.cleared for k in first.kv] == [True]
    (link,) = first.links
    assert (link.peer, link.instance, link.ready, link.detail) == ("fra", "p0", True, "")
    assert link.rtt_s > 0
    assert link.goodput_bytes_per_s > 0
    params = d.params("fra/p0")
    started = time.monotonic()
    done = await d.engine.fetch(params, tokens(PROMPT))
    d.engine.release(done)
    seen: list[str] = []
    outcomes: list[Any] = []
    seq = 1
    while not outcomes:
        update = convert.watch_from_pb(await call.read())
        seq += 1
        assert (update.full, update.seq) == (False, seq)
        seen += update.started
        outcomes += update.outcomes
    assert time.monotonic() - started < 0.2  # at once, not at the next interval
    assert seen == [params["transfer_id"]]
    assert outcomes[0].status == "staged"
    call.cancel()
    await eventually(lambda: not d.agent.feed._watchers)


# --- draining ---


async def test_a_draining_agent_finishes_what_runs_and_turns_down_the_rest(
    prefill_site: Any, decode_site: Any, tokens: Any
) -> None:
    p = await prefill_site(engine={"script": PrefillScript()})
    d = await decode_site({"fra/p0": p})
    await d.ready("fra/p0")
    p.engine.script.stop_before = (1, 1)
    _, answer = d.engine.begin_fetch(d.params("fra/p0"), tokens(PROMPT))
    await eventually(lambda: served(p))
    d.agent.drain()
    params = d.params("fra/p0")
    done = await d.engine.fetch(params, tokens(PROMPT))
    assert (done.status, done.reason) == ("local", "draining")
    assert (await d.outcome(params)).reason == "draining"
    p.engine.script.go.set()
    done = await asyncio.wait_for(answer, 5)
    assert done.status == "staged"
    assert not d.agent._idle.is_set()
    d.engine.release(done)
    await asyncio.wait_for(d.agent.wait_idle(), 2)
