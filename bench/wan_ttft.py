"""TTFT over its bound with real engines at both ends of an emulated link: real TCP, TLS, `exact`.

The points are those of the ttft benchmark that lie on its 40 ms links.
"""

from __future__ import annotations

import asyncio
import socket
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.harness import Report, run_interleaved
from bench.prompts import PromptSource, natural_text
from bench.site import Site, watched
from bench.ttft import RATES, SEED, Point, TtftBench
from bench.wan_site import D, P
from bench.wanlink import TcpSettings, WanLink, namespaces
from bench.wanlink.measure import ping
from bench.wanlink.shape import Side, default_queue_bytes
from local_engine.demo_model import fetch_demo_model
from prfaas.settings import load_settings
from prfaas.testing.link import LinkShape
from prfaas.testing.link_process import LinkMeasurement
from prfaas.up.client import OpenAIClient, SocketFactory
from prfaas.up.cluster import paired, wait_cluster
from prfaas.up.paths import default_cache_dir
from prfaas.up.process import ProcessSpec
from prfaas.up.stack import READY_TIMEOUT_S, Stack, StackPlan, engine_cores
from prfaas.up.supervisor import Supervisor

ROUNDS, QUICK_ROUNDS = 5, 1
RTT_MS = 40
TOKENS, QUICK_TOKENS = 2000, 500
LINE_BITS_OF_PAYLOAD_BIT = 1538 / 1448
"""Ethernet, IP and TCP headers: the line is so much faster than the rate a bound is made of."""

_REQUEST_TIMEOUT_S = 300.0
_PAIRED_TIMEOUT_S = 60.0
_STOP_GRACE_S = 15.0
_MODEL_NAME = "smollm2-135m-instruct"
_PINGS = 5


class _BentLink:
    """The emulated link as the ttft benchmark bends it; rates are those of TCP's payload."""

    def __init__(self, link: WanLink) -> None:
        self._link = link
        self._shape = LinkShape()
        self._measured: dict[LinkShape, float] = {}

    async def set_shape(self, shape: LinkShape) -> None:
        rtt_ms, line_bits = shape.rtt_s * 1e3, shape.rate_bits_per_s * LINE_BITS_OF_PAYLOAD_BIT
        queue_bytes = default_queue_bytes(line_bits, rtt_ms)
        self._link.set(rate_bits=line_bits, rtt_ms=rtt_ms, queue_bytes=queue_bytes)
        self._shape = shape

    async def measure(self, seconds: float) -> LinkMeasurement:
        """Round trip now; what bulk TCP gets, once for each shape, as it takes some seconds."""
        rtts_s = await asyncio.to_thread(ping, self._link, _PINGS)
        if self._shape not in self._measured:
            report = await asyncio.to_thread(self._link.measure, seconds, (1,))
            self._measured[self._shape] = report.arrangements[0].goodput_bits
        return LinkMeasurement(self._measured[self._shape], sorted(rtts_s)[_PINGS // 2])


async def add_ttft(report: Report, *, quick: bool) -> None:
    """Measure and add the row."""
    tokens, rounds = (QUICK_TOKENS, QUICK_ROUNDS) if quick else (TOKENS, ROUNDS)
    points = tuple(Point(rate, RTT_MS, tokens) for rate in RATES)
    async with _running_site(report.say) as site:
        ids = await site.d_engine.post("/tokenize", {"prompt": natural_text()})
        bench = TtftBench(site, PromptSource(ids["tokens"], SEED), report)
        await bench.calibrate(1 if quick else 3)
        wanted = ("t_prefill.", "ttft.", "decode_step")
        arms = {k: v for k, v in bench.arms(points).items() if k.startswith(wanted)}
        samples = await run_interleaved(arms, rounds, report.say, seed=SEED)
    step_s = samples["decode_step"].median
    prefill = samples[f"t_prefill.{tokens}"]
    ratios = {p: bench.over_bound(p.name, p, prefill.median, step_s) for p in points}
    worst = max(points, key=lambda point: ratios[point].median)
    rest = ", ".join(
        f"{p.name} {ratios[p].median:.3f} ({ratios[p].spread})" for p in points if p != worst
    )
    links = "; ".join(
        f"{shape.rate_bits_per_s / 1e6:.1f} Mbit/s of payload gave "
        f"{found[0].rate_bits_per_s / 1e6:.1f} at {found[0].rtt_s * 1e3:.1f} ms"
        for shape, found in bench.measured.links.items()
    )
    report.add(
        "ttft_over_bound.worst",
        ratios[worst].median,
        "ratio",
        f"{worst.name}: {ratios[worst].spread}; {rest}; Phi {bench.phi_bits_per_s / 1e6:.1f} "
        f"Mbit/s, prefill of P alone {prefill.median:.2f} s ({prefill.spread}), decode step "
        f"{step_s * 1e3:.1f} ms; real TCP, TLS; emulator on D's core; {links}",
    )


@asynccontextmanager
async def _running_site(say: Callable[[str], None]) -> AsyncIterator[Site]:
    """P on one side of a link, D and an always-remote gateway on the other."""
    model = fetch_demo_model(default_cache_dir(), say)
    base = load_settings()
    settings = TcpSettings(congestion_control="bbr")
    async with AsyncExitStack() as stack:
        d_core, p_core = engine_cores(pin=True)
        # The emulator stands for a network outside and runs before other processes: beside P it
        # would be measured as a slower P. D has nothing to do until the KV is there.
        link = stack.enter_context(WanLink(100e6, RTT_MS, cpu=d_core, tcp_settings=settings))
        plan = StackPlan(
            base=base,
            model=model,
            served_model_name=_MODEL_NAME,
            tls=True,
            prefill_host=link.address(P),
        )
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="prfaas-bench-"))
        main = Stack.create(plan, Path(directory))
        supervisor = await stack.enter_async_context(Supervisor(stop_grace_s=_STOP_GRACE_S))
        say("starting P and D at both ends of an emulated link")
        quiet: dict[str, Any] = {"probe_bytes": 0, "slower_by": 0}
        always: dict[str, Any] = {"policy": {**dict(base.gateway.policy), "name": "always_remote"}}
        await supervisor.start(
            (
                *_on(link, P, main.prefill_side(core=p_core)),
                *_on(link, D, main.decode_side(core=d_core, agent=quiet)),
            ),
            READY_TIMEOUT_S,
        )
        await supervisor.start(_on(link, D, (main.gateway(settings=always),)), READY_TIMEOUT_S)

        async def client(side: Side, url: str) -> OpenAIClient:
            return await stack.enter_async_context(
                OpenAIClient(
                    url, timeout_s=_REQUEST_TIMEOUT_S, socket_factory=_sockets_in(link, side)
                )
            )

        remote, d_engine = await client(D, main.gateway_url), await client(D, main.d_engine_url)
        site = Site(
            link=_BentLink(link),
            p_engine=await client(P, main.p_engine_url),
            d_engine=d_engine,
            remote=remote,
            # Of no arm that runs here; calibration warms them.
            local=d_engine,
            serial=remote,
        )
        await wait_cluster(remote, "P to be paired", paired, _PAIRED_TIMEOUT_S)
        async with watched(supervisor):
            yield site


def _on(link: WanLink, side: Side, specs: tuple[ProcessSpec, ...]) -> tuple[ProcessSpec, ...]:
    prefix = tuple(link.command_in(side, []))
    return tuple(replace(spec, prefix=prefix) for spec in specs)


def _sockets_in(link: WanLink, side: Side) -> SocketFactory:
    name = link.namespace(side)

    def make(address: tuple[Any, ...]) -> socket.socket:
        with namespaces.entered(name):
            return socket.socket(*address[:3])

    return make
