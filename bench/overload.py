"""Live engines of a few slots under more than they can do: what is answered in time, and the rest.

Requests come at a rate, whatever becomes of those before. Twice the same, with a gateway that lets
engines have what they say that they can take, and with one that sends everything on
(`limits.engine_active_requests: 0`).
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness import Report, percentile
from prfaas.errors import PrfaasError
from prfaas.up.client import OpenAIClient, StreamedAnswer
from prfaas.up.fleet import FleetPlan
from prfaas.up.fleet_file import Fleet
from prfaas.up.fleet_processes import FleetProcesses

PROFILES = Path(__file__).parents[1] / "deploy" / "profiles"
MODEL = "small"
ENGINES, SLOTS, TOKENS, STEP_S = 2, 8, 48, 0.02
PROMPT_TOKENS = 40
PREFILL_S = 0.01 + PROMPT_TOKENS * 0.001
"""As `small-decode` has it; decoding waits meanwhile."""
SERVICE_S = TOKENS * STEP_S + SLOTS * PREFILL_S
CAPACITY_PER_S = ENGINES * SLOTS / SERVICE_S
WAIT_S = 5.0
GOOD_S = WAIT_S + SERVICE_S
"""To the first token of an answer that is worth something: a short wait, a turn in the engine."""
SHARES = (0.5, 1.0, 1.5, 3.0)
WARM_S = 5.0
"""Answers before that are not counted, nor those after the last request."""
ARMS: dict[str, dict[str, Any]] = {
    "bounded": {"gateway_wait_s": WAIT_S},
    "unbounded": {"engine_active_requests": 0},
}


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: seconds to its first token, or why there is none, and from the start on."""

    ttft_s: float
    done_s: float
    failure: str = ""


def fleet(limits: dict[str, Any]) -> Fleet:
    """Paced decode engines with agents, and no peer."""
    return Fleet.model_validate(
        {
            "fleet_version": 1,
            "model": MODEL,
            "limits": {"engine_max_waiting": 4096, "gateway_max_in_flight": 8192, **limits},
            "engines": {
                "count": ENGINES,
                "engine": {
                    "paced": str(PROFILES / "small-decode.yaml"),
                    "kv_memory_bytes": 16 << 20,
                    "max_batch": SLOTS,
                    "prefix_cache": False,
                },
                "agent": {"staging_bytes": 16 << 20},
            },
        }
    )


async def ask(client: OpenAIClient, prompt: str, began: float) -> Asked:
    now = asyncio.get_running_loop().time
    sink = StreamedAnswer("", 0.0)
    try:
        await client.complete(prompt, max_tokens=TOKENS, sink=sink, model=MODEL, ignore_eos=True)
    except PrfaasError as exc:
        return Asked(float("inf"), now() - began, exc.kind)
    return Asked(sink.ttft_s, now() - began)


async def offered(client: OpenAIClient, per_s: float, seconds: float, seed: str) -> list[Asked]:
    """Poisson arrivals for so long; all answers."""
    rng = random.Random(seed)
    loop = asyncio.get_running_loop()
    began, at, tasks = loop.time(), 0.0, []
    while (at := at + rng.expovariate(per_s)) < seconds:
        await asyncio.sleep(began + at - loop.time())
        prompt = "".join(rng.choices("abcdefgh ", k=PROMPT_TOKENS))
        tasks.append(asyncio.create_task(ask(client, prompt, began)))
    return await asyncio.gather(*tasks)


async def measure(
    limits: dict[str, Any], seconds: float, report: Report, arm: str
) -> dict[float, list[Asked]]:
    """All loads on a fleet of its own, each after the one before has ended."""
    found: dict[float, list[Asked]] = {}
    with tempfile.TemporaryDirectory(prefix="prfaas-") as directory:
        folder = Path(directory)
        plan = FleetPlan.create(fleet(limits), folder / "fleet", folder)
        processes = FleetProcesses(plan, report.say)
        try:
            await processes.start()
            async with OpenAIClient(plan.gateway_urls[0], timeout_s=600.0) as client:
                for share in SHARES:
                    rate = share * CAPACITY_PER_S
                    found[share] = await offered(client, rate, seconds, f"{share}")
                    failures = Counter(each.failure for each in found[share] if each.failure)
                    report.say(
                        f"{arm} {share:g}x: {len(found[share])} asked, "
                        f"{goodput(found[share], seconds):.2f} good/s, {dict(failures)}"
                    )
        finally:
            await processes.stop()
    return found


def goodput(asked: list[Asked], seconds: float) -> float:
    """Good answers a second, of those that end while requests come."""
    good = [each for each in asked if each.ttft_s <= GOOD_S and WARM_S <= each.done_s <= seconds]
    return len(good) / (seconds - WARM_S)


def run(quick: bool) -> None:
    """Entry of `python -m bench overload`."""
    seconds = 15.0 if quick else 35.0
    report = Report("overload", quick=quick)
    what = (
        f"{ENGINES} paced engines of {SLOTS} slots, {TOKENS} tokens each; good: first token "
        f"within {GOOD_S:.1f} s; {seconds:g} s each"
    )
    for arm, limits in ARMS.items():
        found = asyncio.run(measure(limits, seconds, report, arm))
        rates = {share: goodput(asked, seconds) for share, asked in found.items()}
        for share, rate in rates.items():
            report.add(f"goodput_{share:g}x.{arm}", rate, "req/s", what)
        best = max(rates.values())
        report.add(f"goodput_3x_over_best.{arm}", rates[3.0] / best, "ratio", what)
        served = [each.ttft_s for each in found[3.0] if not each.failure]
        report.add(f"ttft_3x_p99.{arm}", percentile(served, 99), "s", f"of those served; {what}")
        refused = sum(bool(each.failure) for each in found[3.0]) / len(found[3.0])
        report.add(f"refused_3x.{arm}", refused, "ratio", what)
    report.finish()
