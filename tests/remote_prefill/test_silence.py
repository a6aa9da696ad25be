"""A link that says nothing, one way or both, for a while or for ever: each wait ends, all heals."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from itertools import pairwise
from typing import Any

import pytest

from prfaas.testing.link import BendableLink, LinkShape, Way
from prfaas.testing.scripted_port import PrefillScript
from prfaas.testing.waiting import eventually
from remote_prefill import transport

PROMPT = 22


def counted(counter: Any, *labels: str) -> float:
    return float((counter.labels(*labels) if labels else counter)._value.get())


@pytest.fixture
async def link(stack: AsyncExitStack) -> BendableLink:
    return await stack.enter_async_context(BendableLink(LinkShape()))


async def whole(d: Any, seed_prompt: Any) -> None:
    """A transfer is staged, exactly; then given back."""
    done = await d.engine.fetch(d.params("fra/p0"), seed_prompt)
    assert (done.status, done.reason) == ("staged", "")
    assert d.engine.staged_is_right(done, seed_prompt)
    d.engine.release(done)


# --- silence within a session ---


async def test_a_place_in_the_queue_that_is_not_told_again_ends_its_phase(
    prefill_site: Any, decode_site: Any, tokens: Any, link: BendableLink
) -> None:
    p = await prefill_site(limits={"progress_timeout_s": 0.3})
    port = await link.forward("127.0.0.1", p.port)
    limits = {"progress_timeout_s": 0.3, "transfer_timeout_s": 20.0}
    d = await decode_site({"fra/p0": port}, limits=limits)
    await d.ready("fra/p0")
    other = p.agent.retention.request(p.agent.retention.capacity, retry_after_s=1)
    _, answer = d.engine.begin_fetch(d.params("fra/p0"), tokens(PROMPT))
    await eventually(lambda: [s.queue_position for s in d.link("fra/p0").sessions] == [1])
    link.stall(True)
    began = time.monotonic()
    done = await asyncio.wait_for(answer, 5)
    assert (done.status, done.reason) == ("local", "prefill_timeout_queue")
    assert time.monotonic() - began < 1.0
    link.stall(False)
    other.release()
    await d.clean(p)
    await whole(d, tokens(PROMPT))


@pytest.mark.parametrize("way", list(Way))
async def test_a_link_that_loses_all_one_way_is_ended_by_its_deadlines_and_heals(
    prefill_site: Any, decode_site: Any, tokens: Any, link: BendableLink, way: Way
) -> None:
    p = await prefill_site(engine={"script": PrefillScript()}, limits={"lease_s": 0.6})
    port = await link.forward("127.0.0.1", p.port)
    limits = {"connect_timeout_s": 0.4, "progress_timeout_s": 0.5, "control_timeout_s": 0.5}
    d = await decode_site({"fra/p0": port}, limits={**limits, "watch_stale_s": 0.4})
    await d.ready("fra/p0")
    p.engine.script.stop_before = (1, 2)
    prompt = tokens(PROMPT)
    _, answer = d.engine.begin_fetch(d.params("fra/p0"), prompt)
    await eventually(lambda: [s.ledger.frames for s in d.link("fra/p0").sessions] == [5])
    link.blackhole(True, way)
    if way is Way.UP:
        p.engine.script.go.set()  # the credit is enough for all that still comes
    began = time.monotonic()
    done = await asyncio.wait_for(answer, 5)
    assert time.monotonic() - began < 2.0
    if way is Way.UP:
        assert done.status == "staged"
    else:
        assert done.status == "partial"
        assert done.reason in ("prefill_timeout_progress", "peer_unavailable")
        assert done.token_end == 8
    assert d.engine.staged_is_right(done, prompt)
    d.engine.release(done)
    await p.clean()  # by a CANCEL where one came through, else by its lease
    done = await asyncio.wait_for(d.engine.fetch(d.params("fra/p0"), tokens(PROMPT, 1)), 3)
    assert done.status == "local"
    await eventually(lambda: not d.link("fra/p0").ready, within_s=5)
    link.blackhole(False)
    p.engine.script.stop_before = None
    await eventually(lambda: d.link("fra/p0").ready, within_s=15)
    await whole(d, tokens(PROMPT, 2))
    await d.clean(p)


# --- idle links ---


async def test_keep_alives_hold_idle_lanes_open_through_a_nat_that_forgets(
    prefill_site: Any,
    decode_site: Any,
    tokens: Any,
    link: BendableLink,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transport, "KEEPALIVE_S", 0.5)
    p = await prefill_site()
    d = await decode_site({"fra/p0": await link.forward("127.0.0.1", p.port)})
    await d.ready("fra/p0")
    link.forget_idle_s = 1.2
    await asyncio.sleep(4.0)
    await whole(d, tokens(PROMPT))
    assert counted(d.agent.metrics.lanes_opened, "fra", "p0") == 2
    assert counted(d.agent.metrics.resumes, "fra", "p0") == 0
    await d.clean(p)


async def test_connections_that_a_nat_has_forgotten_are_found_out_and_replaced(
    prefill_site: Any,
    decode_site: Any,
    tokens: Any,
    link: BendableLink,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody tells either end; a transfer that runs into it ends by its deadline at the latest."""
    monkeypatch.setattr(transport, "KEEPALIVE_S", 1.0)
    p = await prefill_site()
    limits = {"progress_timeout_s": 1.0, "first_frame_timeout_s": 1.0, "control_timeout_s": 0.5}
    d = await decode_site({"fra/p0": await link.forward("127.0.0.1", p.port)}, limits=limits)
    await d.ready("fra/p0")
    link.forget_idle_s = 0.3
    await asyncio.sleep(0.6)
    done = await asyncio.wait_for(d.engine.fetch(d.params("fra/p0"), tokens(PROMPT)), 6)
    assert done.status in ("staged", "local")
    if done.status == "staged":
        d.engine.release(done)
    link.forget_idle_s = 0.0
    await eventually(lambda: counted(d.agent.metrics.lanes_opened, "fra", "p0") >= 4, within_s=10)
    # Control is found out on its own, and until then every transfer ends by its deadline.
    for attempt in range(1, 10):
        await d.ready("fra/p0")
        prompt = tokens(PROMPT, attempt)
        done = await asyncio.wait_for(d.engine.fetch(d.params("fra/p0"), prompt), 6)
        if done.status == "staged":
            break
        assert done.status == "local"
    assert d.engine.staged_is_right(done, prompt)
    d.engine.release(done)
    await d.clean(p)


async def test_tries_to_reconnect_come_later_and_later_and_not_all_at_once(
    decode_site: Any,
) -> None:
    """Of eight instances that are all gone, each is tried at times of its own."""
    tried: dict[str, list[float]] = {}
    names = [f"fra/p{i}" for i in range(8)]
    d = await decode_site(dict.fromkeys(names, 1))
    metrics = d.agent.metrics
    seen = dict.fromkeys(names, 0.0)
    deadline = time.monotonic() + 10

    def failed(name: str) -> float:
        return counted(metrics.pairings, *name.split("/"), "peer_unavailable")

    while any(len(tried.get(name, ())) < 5 for name in names):
        assert time.monotonic() < deadline
        for name in names:
            if failed(name) > seen[name]:
                seen[name] = failed(name)
                tried.setdefault(name, []).append(time.monotonic())
        await asyncio.sleep(0.002)
    gaps = [[later - earlier for earlier, later in pairwise(times)] for times in tried.values()]
    for each in gaps:
        for turn, gap in enumerate(each[:4]):
            assert 0.04 * 2**turn < gap < 0.1 * 2**turn + 0.3
    fifth = sorted(times[4] for times in tried.values())
    assert fifth[-1] - fifth[0] > 0.05
