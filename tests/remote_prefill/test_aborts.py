"""Staging runs out, requests go away, engines leave: nothing is left behind."""

from __future__ import annotations

import asyncio
import threading
from contextlib import AsyncExitStack
from typing import Any

import numpy as np
import pytest

from prfaas.codecs import PlanesZstdCodec
from prfaas.testing.link import BendableLink, LinkShape
from prfaas.testing.scripted_port import SCRIPTED_LAYOUT, PrefillScript, ScriptedEngine
from prfaas.testing.waiting import eventually

PROMPT = 22
WANT = PROMPT - 1


def served(site: Any) -> list[Any]:
    """Prefills at a P engine other than numeric probes."""
    return [start for start, _ in site.engine.prefills if start.use_cache]


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
        (machine,) = d.link("fra/p0").sessions
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
    p = await prefill_site(codecs=("planes-zstd", "raw"))
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
