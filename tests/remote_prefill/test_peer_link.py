"""Pairing: handshake, numeric probe, restarts, reconnects, measurements of an idle link."""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import AsyncExitStack
from typing import Any

import pytest

from prfaas.layout import GroupKind, KvLayout, LayerGroup
from prfaas.tcp_info import Unavailable, find_sockets
from prfaas.testing.link import BendableLink, LinkShape
from prfaas.testing.scripted_port import ScriptedEngine
from prfaas.testing.waiting import eventually


async def down(site: Any, name: str = "fra/p0") -> str:
    """The detail of a link that cannot be paired."""
    await eventually(lambda: site.link(name).state == "down")
    return str(site.link(name).detail)


def layout(**changes: Any) -> KvLayout:
    fields = {"layers": (0, 1, 2), "kv_heads": 2, "head_dim": 4, "dtype": "bfloat16"} | changes
    return KvLayout((LayerGroup(GroupKind.FULL, **fields),))


@pytest.mark.parametrize(
    ("p_engine", "says"),
    [
        ({"config_digest": "other rope"}, "config_digest differs"),
        ({"tokenizer_digest": "other"}, "tokenizer_digest differs"),
        ({"model_identity": "other"}, "model_identity differs"),
        ({"layout": layout(kv_heads=4)}, "groups[0].kv_heads differs"),
        ({"layout": layout(layers=(0, 1))}, "groups[0].layers differs"),
        ({"layout": layout(head_dim=8)}, "groups[0].head_dim differs"),
        ({"layout": layout(dtype="float16")}, "groups[0].dtype differs"),
        ({"weights": 0.5}, "numeric probe failed: layers["),
    ],
)
async def test_an_engine_that_differs_is_not_ready_and_the_field_is_named(
    prefill_site: Any, decode_site: Any, tokens: Any, p_engine: dict[str, Any], says: str
) -> None:
    p = await prefill_site(engine=p_engine)
    d = await decode_site({"fra/p0": p})
    assert says in await down(d)
    info = d.link("fra/p0").info()
    assert (info.ready, info.detail) == (False, d.link("fra/p0").detail)
    done = await d.engine.fetch(d.params("fra/p0"), tokens(22))
    assert (done.status, done.reason) == ("local", "peer_unavailable")
    await d.clean(p)


async def test_other_names_engines_and_blocks_of_the_same_model_are_ready(
    prefill_site: Any, decode_site: Any
) -> None:
    p = await prefill_site(engine={"model": "another-name", "engine": "v2", "block_tokens": 7})
    d = await decode_site({"fra/p0": p})
    await d.ready("fra/p0")


async def test_a_difference_within_the_tolerance_is_ready(
    prefill_site: Any, decode_site: Any
) -> None:
    p = await prefill_site(engine={"weights": 0.001})
    d = await decode_site({"fra/p0": p}, probe_tolerance=1e-3)
    await d.ready("fra/p0")


async def test_probes_use_no_cache_on_either_side(prefill_site: Any, decode_site: Any) -> None:
    p0, p1 = await prefill_site("p0"), await prefill_site("p1")
    d = await decode_site({"fra/p0": p0, "fra/p1": p1})
    await d.ready("fra/p0", "fra/p1")
    here = d.engine.prefills
    assert [(s.use_cache, len(t)) for s, t in here] == [(False, 64)]  # once for both peers
    for p in (p0, p1):
        assert [(s.use_cache, len(t)) for s, t in p.engine.prefills] == [(False, 64)]
        assert (p.engine.prefills[0][1] == here[0][1]).all()


async def test_a_decode_engine_without_prefill_cannot_be_paired(
    prefill_site: Any, decode_site: Any
) -> None:
    p = await prefill_site()
    d = await decode_site({"fra/p0": p}, engine={"roles": ["decode"]})
    assert "does not offer prefill" in await down(d)


async def test_a_prefill_engine_that_restarts_is_probed_again(
    prefill_site: Any, decode_site: Any, tokens: Any
) -> None:
    p = await prefill_site()
    d = await decode_site({"fra/p0": p}, limits={"watch_stale_s": 0.2})
    await d.ready("fra/p0")
    await p.engine.close()
    assert "its engine" in await down(d)
    again = ScriptedEngine(p.socket, epoch="epoch-2")
    try:
        await again.start()
        await d.ready("fra/p0")
        assert [s.use_cache for s, _ in again.prefills] == [False]
        done = await d.engine.fetch(d.params("fra/p0"), tokens(22))
        assert done.status == "staged"
        d.engine.release(done)
        await d.clean(p)
    finally:
        await again.close()
    other = ScriptedEngine(p.socket, epoch="epoch-3", weights=1.0)
    try:
        await other.start()
        await eventually(lambda: "numeric probe failed" in d.link("fra/p0").detail)
    finally:
        await other.close()


async def test_an_instance_is_paired_when_it_comes_up_and_again_after_a_cut(
    prefill_site: Any, decode_site: Any, stack: AsyncExitStack
) -> None:
    p = await prefill_site(engine=None)
    link = await stack.enter_async_context(BendableLink(LinkShape()))
    port = await link.forward("127.0.0.1", p.port)
    d = await decode_site({"fra/p0": port}, limits={"watch_stale_s": 0.2})
    assert "no engine is connected" in await down(d)
    engine = ScriptedEngine(p.socket)
    try:
        await engine.start()
        await d.ready("fra/p0")
        link.refuse = True
        link.drop_connections()
        assert "fra/p0" in await down(d)
        link.refuse = False
        await d.ready("fra/p0")
    finally:
        await engine.close()


async def test_a_link_that_goes_silent_is_not_ready_soon(
    prefill_site: Any, decode_site: Any, stack: AsyncExitStack
) -> None:
    p = await prefill_site()
    link = await stack.enter_async_context(BendableLink(LinkShape()))
    port = await link.forward("127.0.0.1", p.port)
    limits = {"watch_stale_s": 0.2, "control_timeout_s": 0.2}
    d = await decode_site({"fra/p0": port}, limits=limits)
    await d.ready("fra/p0")
    link.stall(True)
    assert "no answer to a ping" in await down(d)
    assert d.link("fra/p0").info().age_s >= 0.2
    link.stall(False)
    await d.ready("fra/p0")


async def test_an_idle_link_is_measured_by_pings_and_bursts(
    prefill_site: Any, decode_site: Any, stack: AsyncExitStack
) -> None:
    p = await prefill_site()
    shape = LinkShape(rate_bits_per_s=20e6, rtt_s=0.02)
    link = await stack.enter_async_context(BendableLink(shape))
    port = await link.forward("127.0.0.1", p.port)
    d = await decode_site(
        {"fra/p0": port},
        probe_bytes=1 << 18,
        probe_interval_s=0.1,
        limits={"watch_stale_s": 0.2},
    )
    await d.ready("fra/p0")
    info = d.link("fra/p0").info()
    assert 0.019 < info.rtt_s < 0.5  # bursts of others delay a ping
    assert 1e6 < info.goodput_bytes_per_s < 4e6
    link.set_shape(rate_bits_per_s=5e6)
    await eventually(lambda: d.link("fra/p0").info().goodput_bytes_per_s < 1e6)
    assert d.link("fra/p0").info().goodput_age_s < 5


async def test_sockets_and_lanes_stay_the_same_over_a_thousand_small_transfers(
    prefill_site: Any, decode_site: Any, tokens: Any
) -> None:
    p = await prefill_site()
    d = await decode_site({"fra/p0": p})
    await d.ready("fra/p0")
    before = sockets_to(p.port)

    async def fetch(seed: int) -> None:
        prompt = tokens(9, seed)
        done = await d.engine.fetch(d.params("fra/p0"), prompt)
        assert done.status == "staged"
        assert d.engine.staged_is_right(done, prompt)
        d.engine.release(done)

    for first in range(0, 1000, 20):
        await asyncio.gather(*(fetch(seed) for seed in range(first, first + 20)))
    assert sockets_to(p.port) == before
    assert len(before) == 1 + 2
    assert d.agent.metrics.lanes_opened.labels("fra", "p0")._value.get() == 2
    await d.clean(p)


def sockets_to(port: int) -> set[tuple[str, int]]:
    """Local ends of this process's connections to a port."""
    found = find_sockets(f"ipv4:127.0.0.1:{port}")
    assert not isinstance(found, Unavailable)
    names = {sock.getsockname() for sock in found}
    for sock in found:
        sock.close()
    return names


async def test_pairing_in_progress_does_not_delay_a_fetch(
    decode_site: Any, tokens: Any, stack: AsyncExitStack
) -> None:
    silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    d = await decode_site({"fra/p0": silent.getsockname()[1]})
    assert d.link("fra/p0").state == "pairing"
    started = time.monotonic()
    done = await d.engine.fetch(d.params("fra/p0"), tokens(22))
    assert time.monotonic() - started < 0.5
    assert (done.status, done.reason) == ("local", "peer_unavailable")
