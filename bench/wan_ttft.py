"""TTFT over its bound on three links, with real engines: a few points of the ttft benchmark."""

from __future__ import annotations

from bench.harness import Report, run_interleaved
from bench.prompts import PromptSource, natural_text
from bench.site import running_site
from bench.ttft import RATES, SEED, Point, TtftBench

ROUNDS, QUICK_ROUNDS = 5, 1
RTT_MS = 40
TOKENS, QUICK_TOKENS = 2000, 500


async def add_ttft(report: Report, *, quick: bool) -> None:
    """Measure and add the row."""
    tokens, rounds = (QUICK_TOKENS, QUICK_ROUNDS) if quick else (TOKENS, ROUNDS)
    points = tuple(Point(rate, RTT_MS, tokens) for rate in RATES)
    async with running_site(report.say) as site:
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
    rest = ", ".join(f"{p.name} {ratios[p].median:.3f}" for p in points if p != worst)
    report.add(
        "ttft_over_bound.worst",
        ratios[worst].median,
        "ratio",
        f"{worst.name}: {ratios[worst].spread}; {rest}; Phi {bench.phi_bits_per_s / 1e6:.1f} "
        f"Mbit/s, prefill of P alone {prefill.median:.2f} s ({prefill.spread}), decode step "
        f"{step_s * 1e3:.1f} ms",
    )
