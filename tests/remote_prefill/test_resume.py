"""Streams break, instances restart: a session goes on, or begins again at its whole chunks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from prfaas.frames import HEADER_BYTES, Frame, FrameType
from prfaas.testing.link import BendableLink, LinkShape, Way
from prfaas.testing.scripted_port import PrefillScript
from prfaas.testing.waiting import eventually
from remote_prefill import served_link
from remote_prefill.served_link import message_of

PROMPT = 22
LONG = 3000
"""A quarter of a second on SLOW."""
SLOW = LinkShape(8e6, 0.01)


def counted(counter: Any, *labels: str) -> float:
    return float((counter.labels(*labels) if labels else counter)._value.get())


def prefills(site: Any) -> list[Any]:
    """Prefills at a P engine other than numeric probes."""
    return [start for start, _ in site.engine.prefills if start.use_cache]


@pytest.fixture
async def link(stack: AsyncExitStack) -> BendableLink:
    return await stack.enter_async_context(BendableLink(LinkShape()))


async def pair(
    prefill_site: Any, decode_site: Any, link: BendableLink, **d_site: Any
) -> tuple[Any, Any]:
    """A P and a D that are joined by the link."""
    p = await prefill_site(engine={"script": PrefillScript()}, limits=d_site.pop("p_limits", None))
    d = await decode_site({"fra/p0": await link.forward("127.0.0.1", p.port)}, **d_site)
    await d.ready("fra/p0")
    return p, d


async def whole(d: Any, answer: Any, prompt: Any) -> None:
    """It was staged, exactly; then given back."""
    done = await asyncio.wait_for(answer, 10)
    assert (done.status, done.reason) == ("staged", "")
    assert d.engine.staged_is_right(done, prompt)
    d.engine.release(done)


# --- lanes and cuts ---


async def test_a_lane_that_is_cut_comes_back_and_only_what_was_on_it_is_sent_again(
    prefill_site: Any, decode_site: Any, tokens: Any, stack: AsyncExitStack
) -> None:
    link = await stack.enter_async_context(BendableLink(SLOW))
    p, d = await pair(prefill_site, decode_site, link, staging_bytes=1 << 20)
    prompt, params = tokens(LONG), d.params("fra/p0")
    _, answer = d.engine.begin_fetch(params, prompt)
    await eventually(lambda: d.link("fra/p0").info().sessions)
    (machine,) = d.link("fra/p0").sessions
    await eventually(lambda: machine.ledger.frames > 300)
    (served,) = p.agent.sessions.values()
    before = machine.ledger.frames
    link.drop_busiest()
    await eventually(lambda: machine.ledger.frames > before + 100)  # the other one goes on
    await whole(d, answer, prompt)
    assert served.resumes == 0
    assert counted(d.agent.metrics.lanes_opened, "fra", "p0") == 3
    assert 0 < served.machine.resent_bytes < machine.wire_bytes - before * HEADER_BYTES
    assert counted(d.agent.metrics.wasted_bytes, "fra", "p0") == 0
    await d.clean(p)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.2, 0.5, 0.9, 0.999])
async def test_a_cut_at_any_byte_leaves_a_whole_transfer(
    prefill_site: Any, decode_site: Any, tokens: Any, link: BendableLink, share: float
) -> None:
    p, d = await pair(prefill_site, decode_site, link)
    prompt = tokens(300)
    began = link.stats.down_bytes
    await whole(d, d.engine.begin_fetch(d.params("fra/p0"), prompt)[1], prompt)
    took = link.stats.down_bytes - began
    for turn in range(3):
        link.cut_after(1 + int(share * took) + 7 * turn)
        prompt = tokens(300, turn + 1)
        await whole(d, d.engine.begin_fetch(d.params("fra/p0"), prompt)[1], prompt)
        await d.clean(p)
        await d.ready("fra/p0")


# --- control streams ---


@pytest.mark.parametrize("lost", ["open", "accept"])
async def test_a_control_stream_that_breaks_before_the_first_accept_is_no_failure(
    prefill_site: Any, decode_site: Any, tokens: Any, link: BendableLink, lost: str
) -> None:
    p, d = await pair(prefill_site, decode_site, link)
    prompt, params = tokens(PROMPT), d.params("fra/p0")
    if lost == "open":
        link.stall(True)
        _, answer = d.engine.begin_fetch(params, prompt)
        await asyncio.sleep(0.1)
        assert not prefills(p)
    else:
        link.blackhole(True, Way.DOWN)
        _, answer = d.engine.begin_fetch(params, prompt)
        await eventually(lambda: prefills(p))
    link.drop_connections()
    link.stall(False)
    link.blackhole(False)
    await whole(d, answer, prompt)
    assert len(prefills(p)) == 1
    assert (await d.outcome(params)).tried == ("fra/p0",)
    await d.clean(p)


async def test_a_session_that_p_has_forgotten_begins_again_at_its_whole_chunks(
    prefill_site: Any, decode_site: Any, tokens: Any, link: BendableLink
) -> None:
    """Its lease has ended, for no ACK came through; nothing that is still said of the first try
    hits the second one.
    """
    p, d = await pair(prefill_site, decode_site, link, p_limits={"lease_s": 0.4})
    prompt, params = tokens(PROMPT), d.params("fra/p0")
    answer, machine = await d.half_sent(p, params, prompt)
    assert machine.lease_s == pytest.approx(0.4)
    link.up.flowing.clear()
    await eventually(lambda: not p.agent.sessions)
    p.engine.script.stop_before = None
    link.up.flowing.set()
    await whole(d, answer, prompt)
    first, second = prefills(p)
    assert (first.send_from, second.send_from) == (0, 8)
    assert second.epoch == 2
    assert (await d.outcome(params)).tried == ("fra/p0",)
    await d.clean(p)


async def test_an_instance_that_has_restarted_goes_on_from_whole_chunks(
    prefill_site: Any, decode_site: Any, tokens: Any, link: BendableLink
) -> None:
    """The new process knows neither link nor session: pair anew, then ask for what is missing."""
    p = await prefill_site(engine={"script": PrefillScript()}, limits={"lease_s": 0.5})
    new = await prefill_site("p1", engine={"epoch": "epoch-2"})
    port = await link.forward("127.0.0.1", p.port)
    d = await decode_site({"fra/p0": port})
    await d.ready("fra/p0")
    prompt, params = tokens(PROMPT), d.params("fra/p0")
    answer, _ = await d.half_sent(p, params, prompt)
    link.retarget(port, "127.0.0.1", new.port)
    link.drop_connections()
    await whole(d, answer, prompt)
    (start,) = prefills(new)
    assert (start.send_from, start.epoch) == (8, 2)
    assert (await d.outcome(params)).tried == ("fra/p0",)
    await d.clean(p, new)
    prompt = tokens(PROMPT, 1)
    await whole(d, d.engine.begin_fetch(d.params("fra/p0"), prompt)[1], prompt)
    await d.clean(p, new)


async def test_an_instance_that_lost_the_session_and_stays_away_leaves_whole_chunks(
    prefill_site: Any, decode_site: Any, tokens: Any, link: BendableLink
) -> None:
    """The new process has no engine yet: the next of the plan gets what is missing."""
    p = await prefill_site(engine={"script": PrefillScript()}, limits={"lease_s": 0.5})
    new = await prefill_site("p1", engine=None)
    other = await prefill_site("p2")
    port = await link.forward("127.0.0.1", p.port)
    d = await decode_site({"fra/p0": port, "fra/p2": other}, limits={"connect_timeout_s": 0.5})
    await d.ready("fra/p0", "fra/p2")
    prompt, params = tokens(PROMPT), d.params("fra/p0", "fra/p2")
    answer, _ = await d.half_sent(p, params, prompt)
    link.retarget(port, "127.0.0.1", new.port)
    link.drop_connections()
    await whole(d, answer, prompt)
    (start,) = prefills(other)
    assert start.send_from == 8
    assert (await d.outcome(params)).tried == ("fra/p0", "fra/p2")
    await d.clean(p, new, other)


# --- one flipped bit in a frame of each kind ---


def flip_control(monkeypatch: pytest.MonkeyPatch, kind: FrameType, at: int) -> Callable[[], int]:
    """Flip a bit of byte `at` in the next control frame of one kind; how many were flipped."""
    serialize, flipped = Frame.serialize, 0

    def bent(self: Frame) -> bytes:
        nonlocal flipped
        data = serialize(self)
        if self.type is not kind or flipped or len(data) <= at:
            return data
        flipped += 1
        return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]

    monkeypatch.setattr(Frame, "serialize", bent)
    return lambda: flipped


@pytest.mark.parametrize("at", [0, 12, 60, HEADER_BYTES + 1], ids=["magic", "id", "crc", "payload"])
@pytest.mark.parametrize(
    "kind",
    [
        FrameType.OPEN,
        FrameType.ACCEPT,
        FrameType.SEAL,
        FrameType.ERROR,
        FrameType.ACK,
        FrameType.RESUME,
        FrameType.ATTACH,
    ],
)
async def test_a_flipped_bit_in_a_control_frame_breaks_the_stream_and_not_the_session(
    prefill_site: Any,
    decode_site: Any,
    tokens: Any,
    link: BendableLink,
    monkeypatch: pytest.MonkeyPatch,
    kind: FrameType,
    at: int,
) -> None:
    p, d = await pair(prefill_site, decode_site, link)
    prompt, params = tokens(PROMPT), d.params("fra/p0")
    flipped = flip_control(monkeypatch, kind, at)
    if kind is FrameType.ERROR:
        p.engine.script.fail_before = (2, 1)
        done = await d.engine.fetch(params, prompt)
        assert done.reason == "engine_unavailable"  # that of the next try: the first was lost
        if done.status == "partial":
            assert d.engine.staged_is_right(done, prompt)
            d.engine.release(done)
    elif kind in (FrameType.RESUME, FrameType.ATTACH):
        answer, _ = await d.half_sent(p, params, prompt)
        link.drop_connections()
        await eventually(flipped)
        p.engine.script.go.set()
        await whole(d, answer, prompt)
    else:
        await whole(d, d.engine.begin_fetch(params, prompt)[1], prompt)
    assert flipped() == 1
    await d.clean(p)
    await d.ready("fra/p0")


async def test_a_flipped_bit_in_a_cancel_does_not_leave_p_working(
    prefill_site: Any, decode_site: Any, tokens: Any, link: BendableLink,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    p, d = await pair(prefill_site, decode_site, link)
    params = d.params("fra/p0")
    p.engine.script.stop_before = (1, 1)
    session, _ = d.engine.begin_fetch(params, tokens(PROMPT))
    await eventually(lambda: prefills(p))
    flipped = flip_control(monkeypatch, FrameType.CANCEL, 12)
    d.engine.abort(session)
    await eventually(lambda: p.engine.ended and p.engine.ended[-1].status == "cancelled")
    assert flipped() == 1
    await d.clean(p)


@pytest.mark.parametrize("at", [0, 12, 21, 60], ids=["magic", "id", "chunk", "crc"])
async def test_a_flipped_bit_in_a_kv_header_costs_the_lane_and_nothing_else(
    prefill_site: Any,
    decode_site: Any,
    tokens: Any,
    link: BendableLink,
    monkeypatch: pytest.MonkeyPatch,
    at: int,
) -> None:
    p, d = await pair(prefill_site, decode_site, link)
    flipped = 0

    def bent(frames: list[Frame]) -> bytes:
        nonlocal flipped
        data = message_of(frames)
        if flipped or frames[0].sequence < 3:
            return data
        flipped += 1
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]

    monkeypatch.setattr(served_link, "message_of", bent)
    p.engine.script.layer_s = 0.002
    prompt = tokens(PROMPT)
    await whole(d, d.engine.begin_fetch(d.params("fra/p0"), prompt)[1], prompt)
    assert flipped == 1
    await d.clean(p)
    await eventually(lambda: counted(d.agent.metrics.lanes_opened, "fra", "p0") == 3)


async def test_control_that_is_always_broken_ends_the_try(
    prefill_site: Any, decode_site: Any, tokens: Any, link: BendableLink,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    p, d = await pair(prefill_site, decode_site, link)
    serialize = Frame.serialize

    def bent(self: Frame) -> bytes:
        data = serialize(self)
        return data if self.type is not FrameType.ACCEPT else data[:-1] + b"\x00\x00"

    monkeypatch.setattr(Frame, "serialize", bent)
    params = d.params("fra/p0")
    p.engine.script.stop_before = (0, 0)
    done = await d.engine.fetch(params, tokens(PROMPT))
    assert (done.status, done.reason) == ("local", "peer_unavailable")
    p.engine.script.go.set()
    await d.clean(p)
