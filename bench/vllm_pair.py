"""What prfaas gives two real vLLMs: TTFT against its bound and against shared storage, ITL, CPU.

The points and the bound are those of the ttft benchmark. Shared storage is vLLM's own
ExampleConnector: P saves each layer as a file, the files are copied over a link of the same shape
when P has answered, and D reads them.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import dataclass, field

from bench import shared_storage
from bench.cpu_time import descendants_cpu_s, process_cpu_s
from bench.harness import Arm, Report, Samples, run_interleaved
from bench.prompts import PromptSource, natural_text
from bench.ttft import (
    ANSWER_TOKENS,
    PHI_POINT,
    RATES,
    RTTS_MS,
    SEED,
    Point,
    TtftBench,
    add_conditions,
    add_itl,
    cost_note,
)
from bench.vllm_site import BLOCK_TOKENS, VllmSite, running_vllm_site
from prfaas.errors import PrfaasError
from prfaas.testing.vllm_server import vllm_is_here
from prfaas.tokens import Tokenizer
from prfaas.up.client import OpenAIClient, StreamedAnswer

ROUNDS = 5
POINTS = (
    *(Point(rate, ms, 500) for rate in RATES for ms in RTTS_MS),
    *(Point(rate, 40, 2000) for rate in ("phi", "phi_4")),
)
"""Long prompts not at a quarter of Phi: half a minute each, and short ones fare worse there."""
QUICK_POINTS = (Point("phi_4", 80, 500), Point("phi", 40, 500), PHI_POINT)

IDLE_PROMPT_TOKENS = 64
IDLE_OUTPUT_TOKENS = 32
IDLE_AT_ONCE = 4
IDLE_TURNS = 2
"""Of so many requests at once, in each of four visits."""


@dataclass(slots=True)
class IdleCost:
    """CPU seconds for each request that is never offloaded, by round."""

    connected_s: list[float] = field(default_factory=list)
    alone_s: list[float] = field(default_factory=list)
    agent_s: list[float] = field(default_factory=list)


class VllmBench:
    """The arms that the ttft benchmark does not have; owns what they measure."""

    def __init__(self, running: VllmSite, prompts: PromptSource, ttft: TtftBench) -> None:
        self._running = running
        self._prompts = prompts
        self._ttft = ttft
        self.copied_bytes: list[int] = []
        self.idle = IdleCost()

    async def warm_up(self) -> None:
        """Every path once; the ttft benchmark has warmed its own."""
        await self._stored(100)
        await self._answer_idle(self._running.alone)
        await self._answer_idle(self._running.site.d_engine)
        self.copied_bytes.clear()

    async def storage_ttft(self) -> float:
        """TTFT at PHI_POINT when KV goes through files."""
        storage, shape = self._running.storage, self._ttft.shape(PHI_POINT)
        await storage.link.set_shape(shape)
        found = await storage.link.measure(0.3)
        self._ttft.measured.links.setdefault(shape, []).append(found)
        return await self._stored(PHI_POINT.tokens)

    async def _stored(self, tokens: int) -> float:
        storage, prompt = self._running.storage, self._prompts.cut(tokens)
        started = time.perf_counter()
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
        await storage.p_engine.post("/v1/completions", body)
        copied = await shared_storage.copy_all(storage.link.port, storage.d_root)
        answer = await storage.d_engine.complete(prompt, max_tokens=ANSWER_TOKENS, ignore_eos=True)
        for root in (storage.p_root, storage.d_root):
            shared_storage.clear(root)
        require_loaded(answer, tokens)
        self.copied_bytes.append(copied)
        return answer.sent_at + answer.ttft_s - started

    async def idle_cpu(self) -> float:
        """CPU of requests that are not offloaded, with the connector over without.

        In the order with, without, without, with: what drifts hits both alike.
        """
        connected = [await self._visit(self._running.site.d_engine, "d-engine")]
        alone = [await self._visit(self._running.alone, "d-alone") for _ in range(2)]
        connected.append(await self._visit(self._running.site.d_engine, "d-engine"))
        requests = 2 * IDLE_TURNS * IDLE_AT_ONCE
        with_s, without_s = (
            sum(engine_s for engine_s, _ in visits) / requests for visits in (connected, alone)
        )
        self.idle.connected_s.append(with_s)
        self.idle.alone_s.append(without_s)
        self.idle.agent_s.append(sum(agent_s for _, agent_s in connected) / requests)
        return with_s / without_s

    async def _visit(self, engine: OpenAIClient, name: str) -> tuple[float, float]:
        """CPU seconds of the vLLM `name` and of D's agent while `engine` answers."""
        pids = self._running.pids
        engine_s, agent_s = -descendants_cpu_s(pids[name]), -process_cpu_s(pids["d-agent"])
        for _ in range(IDLE_TURNS):
            await self._answer_idle(engine)
        return (
            engine_s + descendants_cpu_s(pids[name]),
            agent_s + process_cpu_s(pids["d-agent"]),
        )

    async def _answer_idle(self, engine: OpenAIClient) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(IDLE_AT_ONCE):
                prompt = self._prompts.cut(IDLE_PROMPT_TOKENS)
                group.create_task(
                    engine.complete(prompt, max_tokens=IDLE_OUTPUT_TOKENS, ignore_eos=True)
                )


def require_loaded(answer: StreamedAnswer, tokens: int) -> None:
    """Raise PrfaasError unless D read from storage all that ExampleConnector can bring."""
    expected = (tokens - 2) // BLOCK_TOKENS * BLOCK_TOKENS
    details = answer.usage.get("prompt_tokens_details") or {}
    if (details.get("cached_tokens") or 0) < expected:
        raise PrfaasError(
            f"ExampleConnector brought less than {expected} of {tokens} tokens: {answer.usage}"
        )


def run(quick: bool) -> None:
    """Run it, print the table, write the file; or say why there is nothing to run."""
    report = Report("vllm_pair", quick=quick)
    if not vllm_is_here():
        report.say("bench vllm_pair: SKIPPED, there is no vLLM here; make venv-vllm builds it")
        return
    asyncio.run(_run(report, quick))


async def _run(report: Report, quick: bool) -> None:
    points, rounds = (QUICK_POINTS, 1) if quick else (POINTS, ROUNDS)
    async with running_vllm_site(report.say) as running:
        text_ids = Tokenizer.load(running.model).encode(natural_text())
        prompts = PromptSource(text_ids, SEED)
        ttft = TtftBench(running.site, prompts, report)
        bench = VllmBench(running, prompts, ttft)
        await ttft.calibrate(1 if quick else 3)
        await bench.warm_up()
        arms: dict[str, Arm] = ttft.arms(points)
        del arms["ttft_serial.phi"]
        arms |= {"ttft_storage.phi": bench.storage_ttft, "idle_cpu_overhead": bench.idle_cpu}
        samples = await run_interleaved(arms, rounds, report.say, seed=SEED)
    _write(report, ttft, bench, points, samples)


def _write(
    report: Report,
    ttft: TtftBench,
    bench: VllmBench,
    points: tuple[Point, ...],
    samples: dict[str, Samples],
) -> None:
    ratios = {
        point: ttft.over_bound(
            point.name,
            point,
            samples[f"t_prefill.{point.tokens}"].median,
            samples["decode_step"].median,
        )
        for point in points
    }
    worst = max(points, key=lambda point: ratios[point].median)
    report.add(
        "ttft_over_bound.worst",
        ratios[worst].median,
        "ratio",
        f"worst of the medians of {len(points)} points, {worst.name}: {ratios[worst].spread}",
    )
    ours, stored = samples[f"ttft.{PHI_POINT.name}"], samples["ttft_storage.phi"]
    by_round = over(ours, stored)
    report.add(
        "ttft_over_shared_storage.phi",
        ours.median / stored.median,
        "ratio",
        f"{PHI_POINT.name}: TTFT {ours.median:.3f} s, with ExampleConnector {stored.median:.3f} s "
        f"(prefill, then {statistics.median(bench.copied_bytes) / 1e6:.1f} MB of its files in one "
        f"stream, no round trip for control); by round {by_round.spread}",
    )
    add_itl(report, ttft, samples)
    idle, overhead = bench.idle, samples["idle_cpu_overhead"]
    report.add(
        "idle_cpu_overhead",
        overhead.median,
        "ratio",
        f"{overhead.spread}; {IDLE_PROMPT_TOKENS} tokens in, {IDLE_OUTPUT_TOKENS} out, "
        f"{IDLE_AT_ONCE} at once: {statistics.median(idle.connected_s):.4f} CPU seconds of vLLM "
        f"for each request with connector, KV events and an agent that reads its metrics, "
        f"{statistics.median(idle.alone_s):.4f} without; the agent itself "
        f"{statistics.median(idle.agent_s):.4f}",
    )
    add_conditions(report, ttft, samples)
    for point in points:
        note = cost_note(ttft, point, ratios[point], samples[f"ttft.{point.name}"])
        report.add(f"ttft_over_bound.{point.name}", ratios[point].median, "ratio", note)
    report.finish()


def over(above: Samples, below: Samples) -> Samples:
    """Quotients by round."""
    return Samples(tuple(a / b for a, b in zip(above.values, below.values, strict=True)))
