"""Time to first token of remote prefill against its physical bound, and what it spares D.

The bound of a request is max(T_prefill, wire bytes / rate) + RTT + one decode step: P computes,
the link carries, and at best both overlap completely. Phi is the rate at which P alone makes raw
KV, so links at Phi/4, Phi and 4 Phi are bound by the wire, by neither, and by P.
"""

from __future__ import annotations

import asyncio
import statistics
from dataclasses import dataclass, field
from functools import partial

from bench.harness import Arm, Report, Samples, percentile, run_interleaved
from bench.prompts import PromptSource, natural_text
from bench.site import RemoteAnswer, Site, remote_answer, running_site
from prfaas.testing.link import LinkShape
from prfaas.testing.link_process import LinkMeasurement
from prfaas.up.client import OpenAIClient, StreamedAnswer

ROUNDS = 5
LENGTHS = (500, 2000)
RATES = {"phi_quarter": 0.25, "phi": 1.0, "phi_4": 4.0}
RTTS_MS = (10, 40, 80)
RUNNING_CHATS = 4
CHAT_PROMPT_TOKENS = 32
CHAT_MAX_TOKENS = 1500
ANSWER_TOKENS = 4
SEED = 20


@dataclass(frozen=True, slots=True, order=True)
class Point:
    """One link and one prompt length."""

    rate: str
    rtt_ms: int
    tokens: int

    @property
    def name(self) -> str:
        return f"{self.rate}.rtt{self.rtt_ms}.{self.tokens}"


PHI_POINT = Point("phi", 40, 2000)
ALL_POINTS = tuple(Point(r, ms, n) for r in RATES for ms in RTTS_MS for n in LENGTHS)
QUICK_POINTS = (
    Point("phi_quarter", 10, 500),
    Point("phi", 40, 500),
    Point("phi_4", 80, 500),
    Point("phi_4", 80, 2000),
    PHI_POINT,
)


@dataclass(slots=True)
class Measured:
    """What the arms find beside their main figure."""

    remote: dict[str, list[RemoteAnswer]] = field(default_factory=dict)
    links: dict[LinkShape, list[LinkMeasurement]] = field(default_factory=dict)
    itl_s: dict[str, list[float]] = field(default_factory=dict)
    decode_step_s: list[float] = field(default_factory=list)


class TtftBench:
    """Runs the arms against a site; owns what they measure."""

    def __init__(self, site: Site, prompts: PromptSource, report: Report) -> None:
        self._site = site
        self._prompts = prompts
        self._report = report
        self.phi_bits_per_s = 0.0
        self.measured = Measured()

    async def calibrate(self, repeats: int) -> None:
        """Warm every path, then find Phi from the longest prompt on P alone."""
        warm = await self._ask(self._site.remote, LENGTHS[0])
        cost = await remote_answer(self._site.remote, warm)
        await remote_answer(self._site.serial, await self._ask(self._site.serial, LENGTHS[0]))
        await self._ask(self._site.local, LENGTHS[0])
        token_bytes = cost.raw_bytes / cost.received_tokens
        tokens = LENGTHS[-1]
        times = [await self.prefill_alone(tokens) for _ in range(repeats)]
        self.phi_bits_per_s = token_bytes * 8 * tokens / statistics.median(times)
        self._report.say(
            f"P alone prefills {tokens} tokens in {statistics.median(times):.2f} s and makes "
            f"{token_bytes:.0f} B of KV a token: Phi is {self.phi_bits_per_s / 1e6:.1f} Mbit/s"
        )

    def arms(self, points: tuple[Point, ...]) -> dict[str, Arm]:
        """Everything one round runs."""
        lengths = sorted({point.tokens for point in points})
        return {
            **{f"t_prefill.{n}": partial(self.prefill_alone, n) for n in lengths},
            **{f"ttft.{point.name}": partial(self.remote_ttft, point) for point in points},
            "ttft_serial.phi": self.serial_ttft,
            "decode_step": self.decode_step,
            "itl_p99.local": partial(self.running_itl, "local"),
            "itl_p99.remote": partial(self.running_itl, "remote"),
        }

    async def prefill_alone(self, tokens: int) -> float:
        """Seconds P takes for a prompt nobody else sees: no streaming of KV, no link."""
        loop = asyncio.get_running_loop()
        body = {"prompt": self._prompts.cut(tokens), "max_tokens": 1, "temperature": 0}
        started = loop.time()
        await self._site.p_engine.post("/v1/completions", body)
        return loop.time() - started

    async def remote_ttft(self, point: Point) -> float:
        """TTFT over the link of `point`."""
        await self._bend(point)
        return await self._remote(self._site.remote, point.name, point.tokens)

    async def serial_ttft(self) -> float:
        """TTFT at PHI_POINT when frames are held until prefill has ended."""
        await self._bend(PHI_POINT)
        return await self._remote(self._site.serial, "serial", PHI_POINT.tokens)

    async def decode_step(self) -> float:
        """Median ITL of an otherwise idle D."""
        answer = await self._site.d_engine.complete(
            self._prompts.cut(CHAT_PROMPT_TOKENS), max_tokens=48, ignore_eos=True
        )
        step = statistics.median(answer.itl_s)
        self.measured.decode_step_s.append(step)
        return step

    async def running_itl(self, where: str) -> float:
        """P99 ITL of the running chats while a long prompt is prefilled `where`."""
        await self._bend(PHI_POINT)
        gateway = self._site.local if where == "local" else self._site.remote
        chats = [StreamedAnswer("", 0.0) for _ in range(RUNNING_CHATS)]
        tasks = [asyncio.create_task(self._chat(chat)) for chat in chats]
        try:
            while not all(len(chat.token_at) >= 3 for chat in chats):
                if any(task.done() for task in tasks):
                    await asyncio.gather(*tasks)
                await asyncio.sleep(0.01)
            answer = await self._ask(gateway, PHI_POINT.tokens)
            if where == "remote":
                await remote_answer(gateway, answer)
            ended = [task for task in tasks if task.done()]
            if ended:
                raise RuntimeError("a running chat ended before the long prompt was prefilled")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        end = answer.sent_at + answer.ttft_s
        found = [gap for chat in chats for gap in chat.itl_between(answer.sent_at, end)]
        self.measured.itl_s.setdefault(where, []).extend(found)
        return percentile(found, 99)

    async def _chat(self, sink: StreamedAnswer) -> None:
        prompt = self._prompts.cut(CHAT_PROMPT_TOKENS)
        await self._site.d_engine.complete(
            prompt, max_tokens=CHAT_MAX_TOKENS, ignore_eos=True, sink=sink
        )

    async def _remote(self, gateway: OpenAIClient, key: str, tokens: int) -> float:
        found = await remote_answer(gateway, await self._ask(gateway, tokens))
        self.measured.remote.setdefault(key, []).append(found)
        return found.answer.ttft_s

    async def _ask(self, gateway: OpenAIClient, tokens: int) -> StreamedAnswer:
        return await gateway.complete(
            self._prompts.cut(tokens), max_tokens=ANSWER_TOKENS, ignore_eos=True
        )

    async def _bend(self, point: Point) -> None:
        """Give the link its shape and measure what it achieves, while nothing else uses it."""
        shape = self.shape(point)
        await self._site.link.set_shape(shape)
        found = await self._site.link.measure(0.3)
        self.measured.links.setdefault(shape, []).append(found)

    def shape(self, point: Point) -> LinkShape:
        return LinkShape(RATES[point.rate] * self.phi_bits_per_s, point.rtt_ms / 1e3)

    def over_bound(self, key: str, point: Point, t_prefill_s: float, step_s: float) -> Samples:
        """TTFT over its bound, for each request measured under `key`."""
        shape = self.shape(point)
        ratios = []
        for found in self.measured.remote[key]:
            wire_s = found.wire_bytes * 8 / shape.rate_bits_per_s
            ratios.append(found.answer.ttft_s / (max(t_prefill_s, wire_s) + shape.rtt_s + step_s))
        return Samples(tuple(ratios))


def run(quick: bool) -> None:
    """Run it, print the table, write the file."""
    asyncio.run(_run(quick))


async def _run(quick: bool) -> None:
    report = Report("ttft", quick=quick)
    points, rounds = (QUICK_POINTS, 1) if quick else (ALL_POINTS, ROUNDS)
    async with running_site(report.say) as site:
        tokens = await site.d_engine.post("/tokenize", {"prompt": natural_text()})
        bench = TtftBench(site, PromptSource(tokens["tokens"], SEED), report)
        await bench.calibrate(1 if quick else 3)
        samples = await run_interleaved(bench.arms(points), rounds, report.say, seed=SEED)
    _write(report, bench, points, samples)


def _write(
    report: Report, bench: TtftBench, points: tuple[Point, ...], samples: dict[str, Samples]
) -> None:
    step_s = samples["decode_step"].median
    ratios = {
        point: bench.over_bound(
            point.name, point, samples[f"t_prefill.{point.tokens}"].median, step_s
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
    serial = bench.over_bound(
        "serial", PHI_POINT, samples[f"t_prefill.{PHI_POINT.tokens}"].median, step_s
    )
    report.add(
        "ttft_serial_over_bound.phi",
        serial.median,
        "ratio",
        f"frames held until prefill ends, {PHI_POINT.name}: {serial.spread}",
    )
    add_itl(report, bench, samples)
    add_conditions(report, bench, samples)
    for point in points:
        note = cost_note(bench, point, ratios[point], samples[f"ttft.{point.name}"])
        report.add(f"ttft_over_bound.{point.name}", ratios[point].median, "ratio", note)
    report.finish()


def add_itl(report: Report, bench: TtftBench, samples: dict[str, Samples]) -> None:
    """What it spares running chats when P prefills a long prompt."""
    local, remote = samples["itl_p99.local"], samples["itl_p99.remote"]
    pooled = {where: percentile(found, 99) for where, found in bench.measured.itl_s.items()}
    by_round = Samples(tuple(a / b for a, b in zip(local.values, remote.values, strict=True)))
    report.add(
        "itl_p99_running.local_over_remote",
        pooled["local"] / pooled["remote"],
        "ratio",
        f"{RUNNING_CHATS} chats, P99 over all rounds: local {pooled['local']:.4f} s, remote "
        f"{pooled['remote']:.4f} s; by round {by_round.spread}",
    )


def cost_note(bench: TtftBench, point: Point, ratios: Samples, ttft: Samples) -> str:
    """What requests of one point cost."""
    found = bench.measured.remote[point.name]
    wire = statistics.median(one.wire_bytes for one in found)
    hidden = statistics.median(one.hidden_wire_bytes / one.wire_bytes for one in found)
    return (
        f"{ratios.spread}; TTFT {ttft.median:.3f} s, {wire / 1e6:.2f} MB on the wire, "
        f"{hidden:.0%} of it at D before P's last layer was computed"
    )


def add_conditions(report: Report, bench: TtftBench, samples: dict[str, Samples]) -> None:
    """What the ratios were measured against: Phi, T_prefill, the decode step, the links."""
    report.add(
        "phi", bench.phi_bits_per_s / 1e6, "Mbit/s", f"raw KV of P alone, {LENGTHS[-1]} tokens"
    )
    for name, found in sorted(samples.items()):
        if name.startswith("t_prefill.") or name == "decode_step":
            report.add(name, found.median, "s", found.spread)
    for shape, measured in sorted(
        bench.measured.links.items(), key=lambda item: (item[0].rate_bits_per_s, item[0].rtt_s)
    ):
        nominal = shape.rate_bits_per_s / 1e6
        name = f"link.{nominal:.1f}mbit.rtt{shape.rtt_s * 1e3:.0f}"
        rate = Samples(tuple(one.rate_bits_per_s / 1e6 for one in measured))
        rtt = Samples(tuple(one.rtt_s * 1e3 for one in measured))
        report.add(f"{name}.rate", rate.median, "Mbit/s", f"nominal {nominal:.2f}; {rate.spread}")
        report.add(
            f"{name}.rtt", rtt.median, "ms", f"nominal {shape.rtt_s * 1e3:.0f}; {rtt.spread}"
        )
