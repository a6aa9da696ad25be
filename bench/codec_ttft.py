"""TTFT of remote prefill over a thin link, with KV as it is and with KV of class `compact`.

Both engines, both agents and the gateways are real processes; the link is emulated and carries a
quarter of Phi, the rate at which P alone makes raw KV. Two Ds ask the same P: one that speaks no
codec but `raw`, and one whose gateway allows `compact`.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness import Report, Samples, run_interleaved
from bench.prompts import PromptSource, natural_text
from bench.site import RemoteAnswer, remote_answer, watched
from prfaas.errors import PrfaasError
from prfaas.settings import load_settings
from prfaas.testing.link import LinkShape
from prfaas.testing.link_process import LinkProcess
from prfaas.up.client import OpenAIClient
from prfaas.up.cluster import paired, wait_cluster
from prfaas.up.stack import READY_TIMEOUT_S, Stack, StackPlan, engine_cores
from prfaas.up.supervisor import Supervisor

TOKENS = 2000
RTT_S = 0.04
SHARE = 0.25
"""Of Phi, that the link carries."""
ROUNDS = 5
ARMS = ("raw", "compact")
_ANSWER_TOKENS = 2
_REQUEST_TIMEOUT_S = 300.0
_PAIRED_TIMEOUT_S = 60.0
_STOP_GRACE_S = 15.0


@dataclass(frozen=True, slots=True)
class Site:
    """Clients of what runs; closed by `running`."""

    link: LinkProcess
    p_engine: OpenAIClient
    d_engine: OpenAIClient
    gateways: dict[str, OpenAIClient]
    """By arm; all always offload."""


@asynccontextmanager
async def running(model: Path, calibration: Path) -> AsyncIterator[Site]:
    """Start everything, wait until both Ds are paired with P, and end everything."""
    base = load_settings()
    plan = StackPlan(base=base, model=model, served_model_name=model.stem, threads=1)
    d_core, p_core = engine_cores(plan.pin)
    always = {**dict(base.gateway.policy), "name": "always_remote"}
    # No bursts of the link meter: here the link is what the benchmark says it is.
    ds: dict[str, dict[str, Any]] = {
        "raw": {"probe_bytes": 0, "slower_by": 0, "codecs": ["raw"]},
        "compact": {"probe_bytes": 0, "slower_by": 0, "codec_calibration": calibration},
    }
    async with AsyncExitStack() as stack:
        stacks = {
            arm: Stack.create(
                plan, Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="prfaas-")))
            )
            for arm in ARMS
        }
        first = stacks[ARMS[0]]
        link = await stack.enter_async_context(
            LinkProcess("127.0.0.1", first.ports.p_agent, LinkShape())
        )
        supervisor = await stack.enter_async_context(Supervisor(stop_grace_s=_STOP_GRACE_S))
        specs = list(first.prefill_side(core=p_core, agent={"codec_calibration": calibration}))
        for arm, each in stacks.items():
            specs += each.decode_side(
                prefill_port=link.port, core=d_core, agent=ds[arm], suffix=f"-{arm}"
            )
        await supervisor.start(specs, READY_TIMEOUT_S)
        gateways = tuple(
            each.gateway(
                name=f"gateway-{arm}",
                prefill_port=link.port,
                settings={
                    "policy": always, "kv_quality": "exact" if arm == "raw" else arm
                },
            )
            for arm, each in stacks.items()
        )  # fmt: skip
        await supervisor.start(gateways, READY_TIMEOUT_S)

        async def client(url: str) -> OpenAIClient:
            return await stack.enter_async_context(OpenAIClient(url, timeout_s=_REQUEST_TIMEOUT_S))

        site = Site(
            link,
            await client(first.p_engine_url),
            await client(first.d_engine_url),
            {arm: await client(each.gateway_url) for arm, each in stacks.items()},
        )
        for gateway in site.gateways.values():
            await wait_cluster(gateway, "P to be paired", paired, _PAIRED_TIMEOUT_S)
        async with watched(supervisor):
            yield site


async def add_ttft(
    report: Report, model: Path, calibration: Path, *, rounds: int = ROUNDS, tokens: int = TOKENS
) -> None:
    """The row `ttft_raw_over_compact.phi_4`, and what it was measured on."""
    async with running(model, calibration) as site:
        ids = await site.d_engine.post("/tokenize", {"prompt": natural_text()})
        prompts = PromptSource(ids["tokens"], seed=5)
        loop = asyncio.get_running_loop()
        answers: dict[str, list[RemoteAnswer]] = {arm: [] for arm in ARMS}

        async def prefill_alone() -> float:
            body = {"prompt": prompts.cut(tokens), "max_tokens": 1, "temperature": 0}
            started = loop.time()
            await site.p_engine.post("/v1/completions", body)
            return loop.time() - started

        async def remote(arm: str, count: int = tokens) -> float:
            gateway = site.gateways[arm]
            answer = await gateway.complete(
                prompts.cut(count), max_tokens=_ANSWER_TOKENS, ignore_eos=True
            )
            answers[arm].append(await remote_answer(gateway, answer))
            return answer.ttft_s

        for arm in ARMS:
            await remote(arm, tokens // 4)
        cost = answers["raw"][0]
        bits = cost.raw_bytes / cost.received_tokens * 8 * tokens
        phi = bits / statistics.median([await prefill_alone() for _ in range(3)])
        shape = LinkShape(SHARE * phi, RTT_S)
        await site.link.set_shape(shape)
        for arm in ARMS:  # the agents get to know the link
            await remote(arm, tokens // 4)
            answers[arm].clear()
        arms = {"t_prefill": prefill_alone} | {arm: _arm(remote, arm) for arm in ARMS}
        samples = await run_interleaved(arms, rounds, report.say, seed=5)
        link = await site.link.measure(1.0)
    _write(report, samples, answers, f"{tokens} tokens, RTT {RTT_S * 1e3:.0f} ms, link "
           f"{link.rate_bits_per_s / 1e6:.1f} of {phi / 1e6:.1f} Mbit/s that P makes")  # fmt: skip


def _arm(remote: Any, name: str) -> Any:
    return lambda: remote(name)


def _write(
    report: Report,
    samples: dict[str, Samples],
    answers: dict[str, list[RemoteAnswer]],
    note: str,
) -> None:
    for found in answers["compact"]:
        if found.wire_bytes * 3 > found.raw_bytes:
            raise PrfaasError(f"KV of class compact was not compact: {found}")
    raw, compact = samples["raw"], samples["compact"]
    quotients = Samples(tuple(a / b for a, b in zip(raw.values, compact.values, strict=True)))
    note = f"{note}; raw {raw.median:.2f} s, compact {compact.median:.2f} s, P alone "
    note += f"{samples['t_prefill'].median:.2f} s; {quotients.spread}"
    report.add("ttft_raw_over_compact.phi_4", quotients.median, "ratio", note)
    for arm, found in answers.items():
        ratio = statistics.median(each.raw_bytes / each.wire_bytes for each in found)
        report.add(f"ttft.{arm}", samples[arm].median, "s", f"{samples[arm].spread}")
        report.add(f"ttft.{arm}.ratio", ratio, "raw over wire", "frames of the link, with headers")
    report.add("ttft.t_prefill", samples["t_prefill"].median, "s", samples["t_prefill"].spread)
