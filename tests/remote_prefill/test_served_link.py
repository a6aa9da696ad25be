"""Over real sockets both ends of a link tell what limits it, and gateways see both views."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import numpy as np
import pytest

from prfaas.clock import SYSTEM_CLOCK
from prfaas.dialling import Endpoint
from prfaas.frames import Frame, FrameType
from prfaas.layout import GroupKind, KvLayout, LayerGroup
from prfaas.rpc import convert
from prfaas.rpc.convert_watch import watch_from_pb
from prfaas.rpc.v1 import prefill_pb2, prefill_pb2_grpc
from prfaas.session_messages import LaneAttach
from prfaas.telemetry import LinkInfo, LinkLimit
from prfaas.testing.bare_client import DATA
from prfaas.testing.link import BendableLink, LinkShape
from prfaas.testing.waiting import eventually
from remote_prefill.served_link import MAX_NAME, LinkTable, ServedLane
from remote_prefill.transport import UNSENT_BYTES, open_channel

LAYOUT = KvLayout((LayerGroup(GroupKind.FULL, (0, 1), 8, 128, "bfloat16"),))
"""8 KiB a token."""
TOKENS = 512
SIZES: dict[str, Any] = {"ring_bytes": 16 << 20, "codecs": ["raw"]}


async def start(
    prefill_site: Any, decode_site: Any, *, through: Callable[[int], Any] | None = None, **d: Any
) -> tuple[Any, Any]:
    """P and D with some megabytes of KV for a prompt."""
    engine = {"layout": LAYOUT, "chunk_tokens": 64}
    p = await prefill_site(engine=engine, retention_bytes=64 << 20, **SIZES)
    port = p.port if through is None else await through(p.port)
    d = await decode_site(
        {"fra/p0": port}, engine=engine, staging_bytes=64 << 20, probe_bytes=0, **SIZES, **d
    )
    await d.ready("fra/p0")
    await d.clean(p)
    return p, d


def views(p: Any, d: Any) -> tuple[LinkInfo, LinkInfo]:
    """P's and D's."""
    served = {info.agent: info for info in p.agent.links.infos("fra", "p0")}
    return served["d0"], d.link("fra/p0").info()


@asynccontextmanager
async def fetching(p: Any, d: Any, tokens: Any) -> AsyncIterator[None]:
    """While a long prompt's KV is on its way; it comes right in the end."""
    prompt = tokens(TOKENS)
    fetch = asyncio.create_task(d.engine.fetch(d.params("fra/p0"), prompt))
    try:
        yield
        done = await fetch
        assert done.status == "staged"
        assert d.engine.staged_is_right(done, prompt, 0)
        d.engine.release(done)
        await d.clean(p)
    finally:
        fetch.cancel()
        await asyncio.gather(fetch, return_exceptions=True)


async def limited_by(limit: LinkLimit, p: Any, d: Any) -> None:
    """Both ends say so, within some seconds."""
    await eventually(lambda: [view.limit for view in views(p, d)] == [limit, limit], within_s=10)


async def test_a_slow_link_is_the_link_and_idle_when_all_is_over(
    prefill_site: Any, decode_site: Any, tokens: Any
) -> None:
    async with BendableLink(LinkShape(16e6, 0.04)) as wan:
        p, d = await start(
            prefill_site, decode_site, through=lambda port: wan.forward("127.0.0.1", port)
        )
        await limited_by(LinkLimit.IDLE, p, d)
        async with fetching(p, d, tokens):

            def both_have_measured() -> None:
                for view in views(p, d):
                    assert view.limit is LinkLimit.LINK
                    assert 0.5e6 < view.rate_bytes_per_s < 2.5e6
                    assert 0.5e6 < view.goodput_bytes_per_s < 5e6
                    assert view.in_flight_bytes > 0
                    assert view.age_s < 1.0
                    assert view.goodput_age_s < 2.0
                served, here = views(p, d)
                assert served.under_way_bytes > 0
                assert here.rtt_s > 0.03
                assert 0 <= here.queueing_s < here.rtt_s

            await eventually(both_have_measured)
        await limited_by(LinkLimit.IDLE, p, d)
        await eventually(lambda: [view.rate_bytes_per_s for view in views(p, d)] == [0.0, 0.0])
        for view in views(p, d):
            assert (view.in_flight_bytes, view.under_way_bytes, view.held_bytes) == (0, 0, 0)
            assert view.sessions == 0


async def test_a_receiver_that_decodes_slowly_is_the_receiver(
    prefill_site: Any, decode_site: Any, tokens: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = await start(prefill_site, decode_site, window_bytes=2 << 20)
    executor = d.agent._executor
    submit = executor.submit

    def slow(work: Callable[..., Any], *args: Any) -> Any:
        def run() -> Any:
            time.sleep(0.25)
            return work(*args)

        return submit(run)

    monkeypatch.setattr(executor, "submit", slow)
    async with fetching(p, d, tokens):
        await limited_by(LinkLimit.RECEIVER, p, d)
        served, here = views(p, d)
        assert here.held_bytes > 0
        assert served.free_staging_bytes == here.free_staging_bytes < 64 << 20
        assert served.held_bytes > 0
        monkeypatch.undo()


async def test_a_prefill_that_takes_longer_than_the_link_is_the_sender(
    prefill_site: Any, decode_site: Any, tokens: Any
) -> None:
    p, d = await start(prefill_site, decode_site)
    p.engine.script.layer_s = 0.15  # a megabyte and a half in a second
    async with fetching(p, d, tokens):
        await eventually(lambda: all(view.rate_bytes_per_s > 1e5 for view in views(p, d)))
        await limited_by(LinkLimit.SENDER, p, d)
        seen = []
        for _ in range(10):
            await asyncio.sleep(0.1)
            seen.append([view.limit for view in views(p, d)])
            assert all(view.rate_bytes_per_s > 1e5 for view in views(p, d))
        # What arrives while a process does not run lies in its socket, which looks like the link.
        assert seen.count([LinkLimit.SENDER] * 2) >= 7, seen
        p.engine.script.layer_s = 0.0


class SilentReader:
    """A D agent of another make: it opens a session and a lane, reads nothing and reports nothing,
    but renews its lease.
    """

    def __init__(self, channel: Any, client: Any) -> None:
        self._client = client
        self._lane = channel.stream_stream(DATA)(timeout=20)

    async def open(self) -> None:
        machine = self._client.machine
        attach = convert.attach_to_bytes(LaneAttach(machine.request.link, 0))
        await self._lane.write(Frame(FrameType.ATTACH, 0, payload=attach).serialize())
        await self._lane.read()
        await self._client.call.write(machine.open().serialize())

    async def ack(self) -> None:
        machine = self._client.machine
        machine.grant(64 << 20)
        await self._client.call.write(machine.ack(0.0, (0,), 1).serialize())

    def close(self) -> None:
        self._lane.cancel()
        self._client.call.cancel()


@pytest.mark.parametrize(
    ("rate_bits_per_s", "limit"), [(0.0, LinkLimit.RECEIVER), (2e6, LinkLimit.LINK)]
)
async def test_of_a_receiver_that_says_nothing_the_kernel_knows(
    prefill_site: Any,
    tokens: Any,
    stack: AsyncExitStack,
    rate_bits_per_s: float,
    limit: LinkLimit,
) -> None:
    """Where its host has taken all that left, the receiver is slow; where not, the link is."""
    p = await prefill_site(
        engine={"layout": LAYOUT, "chunk_tokens": 64}, retention_bytes=64 << 20, **SIZES
    )
    wan = await stack.enter_async_context(BendableLink(LinkShape(rate_bits_per_s, 0.01)))
    port = await wan.forward("127.0.0.1", p.port)
    channel = open_channel(Endpoint(f"127.0.0.1:{port}"))
    stack.push_async_callback(channel.close)
    token = p.agent.links.open("", "other", b"").token
    client = p.client(tokens(TOKENS), link=token, credit_bytes=64 << 20)
    reader = SilentReader(channel, client)
    await reader.open()
    try:

        def seen() -> LinkInfo:
            return next(k for k in p.agent.links.infos("fra", "p0") if k.agent == "other")

        await eventually(lambda: seen().limit is limit, within_s=5)
        await reader.ack()
        await eventually(lambda: seen().age_s < 1.0)
        await eventually(lambda: seen().stalls == 1, within_s=5)
        assert seen().under_way_bytes > 0
        assert seen().goodput_age_s > 1e6  # nobody has said
    finally:
        reader.close()
        for served in list(p.agent.sessions.values()):
            p.agent.cancel(served.machine.session, served.client)
    await p.clean()


async def test_gateways_see_both_views_through_watch(
    prefill_site: Any, decode_site: Any, tokens: Any
) -> None:
    p, d = await start(prefill_site, decode_site)
    async with fetching(p, d, tokens):
        pass
    for site, agent in ((p, "d0"), (d, "")):
        stub = prefill_pb2_grpc.TelemetryStub(site.channel)
        call = stub.Watch(prefill_pb2.WatchRequest(gateway="g"), timeout=5)
        update = watch_from_pb(await call.read())
        call.cancel()
        (link,) = update.links
        assert (link.peer, link.instance, link.agent, link.ready) == ("fra", "p0", agent, True)
        assert link.limit is not None
        assert 0 < link.rtt_s < 1
        assert link.age_s < 5
        assert (link.stalls, link.stalled_s) == (0, 0.0)
        assert link.wire_ratio == pytest.approx(1.0, abs=0.01)


async def test_tcp_info_of_every_lane_is_read(prefill_site: Any, decode_site: Any) -> None:
    p, d = await start(prefill_site, decode_site)
    await eventually(lambda: views(p, d)[0].retransmitted_bytes == 0)
    served, here = views(p, d)
    assert 0 < served.rtt_s < 0.5
    assert here.retransmitted_bytes is None  # D sends no KV


def test_an_agent_that_came_anew_is_one_link_and_its_name_is_short() -> None:
    table = LinkTable(SYSTEM_CLOCK)
    first = table.open("id", "d" * 1000, b"")
    first.meter.heard(0, None)
    table.open("id", "d" * 1000, b"")
    table.open("id", "other", b"")
    assert [k.agent for k in table.infos("p", "i")] == ["d" * MAX_NAME, "other"]
    assert table.infos("p", "i")[0].age_s < 60
    assert np.isfinite(table.infos("p", "i")[1].age_s)


def test_a_lane_s_queue_grows_at_once_and_shrinks_only_where_it_is_far_too_long() -> None:
    lane = ServedLane(0)
    assert not lane.resize_queue(UNSENT_BYTES)
    assert lane.resize_queue(4 * UNSENT_BYTES)
    assert not lane.resize_queue(2 * UNSENT_BYTES)
    assert lane.queue_bytes == 4 * UNSENT_BYTES
    assert lane.resize_queue(UNSENT_BYTES)
    assert lane.queue_bytes == UNSENT_BYTES
