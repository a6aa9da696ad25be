"""Both agents and scripted engines: what a fetch brings, who may have one, what is told."""

from __future__ import annotations

import asyncio
import hashlib
import time
from typing import Any

import pytest

from prfaas.rpc import convert_watch
from prfaas.rpc.v1 import prefill_pb2 as pb
from prfaas.testing.scripted_port import SCRIPTED_LAYOUT, PrefillScript
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
        params = d.params("fra/p0", quality="rough")
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


@pytest.mark.parametrize("on_failure", ["local", "reject"])
@pytest.mark.parametrize("length", [1, PROMPT])
async def test_a_prompt_that_is_all_at_d_has_an_outcome_and_no_session(
    prefill_site: Any, decode_site: Any, tokens: Any, on_failure: str, length: int
) -> None:
    p = await prefill_site()
    d = await decode_site({"fra/p0": p})
    await d.ready("fra/p0")
    params = d.params("fra/p0", on_failure=on_failure)
    done = await d.engine.fetch(params, tokens(length), length - 1)
    assert (done.status, done.reason) == ("local", "prefix_at_d")
    outcome = await d.outcome(params)
    assert (outcome.status, outcome.reason, outcome.tried) == ("local", "prefix_at_d", ())
    assert (outcome.have_tokens, outcome.want_tokens) == (length - 1, length - 1)
    assert not served(p)
    await d.clean(p)


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
    first = convert_watch.watch_from_pb(await call.read())
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
        update = convert_watch.watch_from_pb(await call.read())
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
