"""The simulator against the real thing: a fleet is calibrated, loaded, and simulated with the same
requests."""

from __future__ import annotations

import asyncio
import math
import os
import random
import statistics
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from bench.fidelity_sites import (
    CALIBRATED_BY,
    D_ENGINE,
    LOADED_BY,
    MODEL,
    Kind,
    kinds,
    loaded_by,
    write_fleet,
    write_policy,
)
from bench.harness import Report, percentile
from local_engine.demo_model import fetch_demo_model
from policies.registry import make_policy
from policies.scenario import Objectives, Profiles, Scenario, load_scenario
from policies.simulator.capacity import capacity
from policies.simulator.run import simulate
from policies.workload.request import Request
from prfaas.clock import Deadline
from prfaas.errors import ConfigError, PrfaasError
from prfaas.limits import Limits
from prfaas.up.calibration import Plan, Samples, measure, profiles, scenario
from prfaas.up.client import OpenAIClient, StreamedAnswer
from prfaas.up.cluster import measured as known
from prfaas.up.cluster import wait_cluster
from prfaas.up.fleet import FleetPlan
from prfaas.up.fleet_file import read_fleet
from prfaas.up.fleet_processes import FleetProcesses
from prfaas.up.paths import default_cache_dir

LOADS = (0.5, 0.7, 0.9)
GOALS = {"median": 0.05, "p90": 0.10}
DISAGREEMENT = 1.5
"""How much more than two identical runs differ the simulation may."""
RUNS = 2
WARM_UP_SHARE = 0.1
_TIMEOUT_S = 300.0
_MEASURED_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Fleet:
    """A running fleet and how to reach it."""

    kind: Kind
    directory: Path
    gateway: OpenAIClient
    engine: OpenAIClient


@dataclass(frozen=True, slots=True)
class Error:
    """Of the simulation, and of one real run as a forecast of the other, both relative."""

    load: float
    simulated: dict[str, float]
    real: dict[str, float]


def run(quick: bool) -> None:
    """Paced engines first, then a pair that computes; BENCH_ONLY names one of them."""
    only = os.environ.get("BENCH_ONLY")
    command = "" if only is None or quick else f"BENCH_ONLY={only} make bench NAME=fidelity"
    report = Report("fidelity", quick=quick, command=command)
    chosen = [kind for kind in kinds() if only in (None, kind.name)]
    if not chosen:
        raise ConfigError(
            f"BENCH_ONLY: {only!r} is not one of {', '.join(k.name for k in kinds())}"
        )
    for kind in chosen:
        asyncio.run(_kind(kind, report, 40 if quick else 200, quick))
    report.finish()


async def _kind(kind: Kind, report: Report, requests: int, quick: bool) -> None:
    errors: list[Error] = []
    async with _running(kind, report) as fleet:
        samples: Samples | None = None
        for number, load in enumerate(LOADS[-1:] if quick else LOADS):
            rounds = 2 if quick else kind.rounds
            plan = Plan(MODEL, kind.lengths, rounds, seed=number, step_length=kind.step_length)
            await _decided_by(fleet, CALIBRATED_BY)
            found = await measure(fleet.gateway, fleet.engine, plan, report.say)
            samples = found if samples is None else _joined(samples, found)
            site = _site(kind, samples)
            rate = load * _capacity(kind, *site, requests)
            rows = _requests(kind, requests, rate, seed=number)
            await _decided_by(fleet, LOADED_BY)
            runs = [await _measured(fleet, rows, seed=10 * number + at) for at in range(RUNS)]
            errors.append(_error(kind, load, rate, site, rows, runs, report))
    for name, goal in GOALS.items():
        if name == "p90" and not kind.p90:
            continue
        worst = max(errors, key=lambda error: error.simulated[name])
        real = max(error.real[name] for error in errors)
        allowed = max(goal, DISAGREEMENT * real)
        loads = ", ".join(f"{e.load:.0%} {e.simulated[name]:.3f}" for e in errors)
        report.add(
            f"{kind.name}.{name}_error",
            worst.simulated[name],
            "of the measured TTFT",
            f"worst load of {loads}; {requests} requests each, {RUNS} runs, of which one differs "
            f"from the other by up to {real:.3f}, so {allowed:.3f} is allowed",
        )
        report.add(f"{kind.name}.{name}_disagreement", real, "of the measured TTFT", "two runs")


@asynccontextmanager
async def _running(kind: Kind, report: Report) -> AsyncIterator[Fleet]:
    model = fetch_demo_model(default_cache_dir(), report.say) if kind.computes else None
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="prfaas-fidelity-")))
        file = write_fleet(kind, folder, model)
        plan = FleetPlan.create(read_fleet(file), file, folder)
        cores = stack.enter_context(_apart()) if kind.computes else {}
        fleet = FleetProcesses(plan, report.say, cores)
        stack.push_async_callback(fleet.stop)
        await fleet.start()
        clients = [
            await stack.enter_async_context(OpenAIClient(url, timeout_s=_TIMEOUT_S))
            for url in (plan.gateway_urls[0], f"http://127.0.0.1:{plan.engine_ports[0]}")
        ]
        # The link is measured by bursts at first, and D's and P's curves as they warm up.
        await wait_cluster(clients[0], "curves and goodput", known, _MEASURED_TIMEOUT_S)
        yield Fleet(kind, folder, *clients)


@contextmanager
def _apart() -> Iterator[dict[str, int]]:
    """The core of D's engine, which nothing else runs on: this process and its children share the
    others.

    What agents, line, gateway and load compute for a prompt that P gets would else slow now the one
    engine and now the other under load, and neither in a calibration with prompts one at a time. So
    it is P's that it slows, in both. Where there is one core they share it.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) < 2:
        yield {}
        return
    os.sched_setaffinity(0, cores[:-1])
    try:
        yield {D_ENGINE: cores[-1]}
    finally:
        os.sched_setaffinity(0, cores)


async def _decided_by(fleet: Fleet, policy: str) -> None:
    """Let the gateway take over a policy, and wait until it has. Raises PrfaasError."""
    write_policy(fleet.directory, policy)
    prompt = [fleet.kind.token_ids[0]] * fleet.kind.least_tokens
    deadline = Deadline.after(_MEASURED_TIMEOUT_S)
    while not deadline.expired():
        answer = await fleet.gateway.complete(prompt, max_tokens=1, model=MODEL)
        record = await fleet.gateway.get(f"/prfaas/requests/{answer.request_id}")
        if record["policy"] == policy:
            return
        await asyncio.sleep(0.2)
    raise PrfaasError(f"the gateway does not take over the policy {policy}")


def _joined(one: Samples, other: Samples) -> Samples:
    """All samples of two calibrations."""
    return replace(
        other,
        local=one.local + other.local,
        remote={k: one.remote.get(k, []) + v for k, v in other.remote.items()},
        carried={k: one.carried.get(k, []) + v for k, v in other.carried.items()},
        steps=one.steps + other.steps,
    )


def _site(kind: Kind, samples: Samples) -> tuple[Scenario, Profiles]:
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        for name, profile in profiles(samples, kind.max_batch, "bench fidelity").items():
            (directory / f"{name}.yaml").write_text(yaml.safe_dump(profile))
        site = scenario(samples, kind.name, Limits().watch_interval_s)
        (directory / "scenario.yaml").write_text(yaml.safe_dump(site))
        return load_scenario(str(directory / "scenario.yaml"))


def _capacity(kind: Kind, site: Scenario, found: Profiles, requests: int) -> float:
    """Requests a second at which the simulation still holds the kind's objective."""
    return capacity(
        site,
        found,
        lambda rate: _requests(kind, requests, rate, seed=99),
        lambda: make_policy(loaded_by()),
        Objectives(ttft_p90_s=kind.ttft_p90_s),
        start_rate_per_s=1.0,
    ).rate_per_s


def _requests(kind: Kind, count: int, rate: float, seed: int) -> list[Request]:
    """Poisson arrivals of log-normal prompts."""
    draws, at, rows = random.Random(seed), 0.0, []
    for number in range(count):
        at += draws.expovariate(rate)
        tokens = round(draws.lognormvariate(math.log(kind.median_tokens), kind.sigma))
        tokens = min(max(tokens, kind.least_tokens), kind.most_tokens)
        rows.append(Request(number, at, tokens, kind.output_tokens))
    return rows


async def _measured(fleet: Fleet, rows: Sequence[Request], seed: int) -> list[StreamedAnswer]:
    """Ask all of them at their times; answers in their order. Raises PrfaasError if one fails."""
    words, loop = random.Random(seed), asyncio.get_running_loop()
    began, asked = loop.time(), []

    async def ask(prompt: list[int]) -> StreamedAnswer:
        return await fleet.gateway.complete(
            prompt, max_tokens=fleet.kind.output_tokens, model=MODEL, ignore_eos=True
        )

    for row in rows:
        prompt = [words.choice(fleet.kind.token_ids) for _ in range(row.prompt_tokens)]
        await asyncio.sleep(began + row.arrival_s - loop.time())
        asked.append(asyncio.create_task(ask(prompt)))
    found = await asyncio.gather(*asked, return_exceptions=True)
    failed = [one for one in found if isinstance(one, BaseException)]
    if failed:
        raise PrfaasError(f"{len(failed)} of {len(rows)} requests failed, first {failed[0]!r}")
    return [one for one in found if not isinstance(one, BaseException)]


def _error(
    kind: Kind,
    load: float,
    rate: float,
    site: tuple[Scenario, Profiles],
    rows: Sequence[Request],
    runs: Sequence[Sequence[StreamedAnswer]],
    report: Report,
) -> Error:
    warm = math.ceil(WARM_UP_SHARE * len(rows))
    result = simulate(*site, rows, make_policy(loaded_by()))
    simulated = _figures([row.ttft_s for row in result.rows][warm:])
    measured = [_figures([answer.ttft_s for answer in run][warm:]) for run in runs]
    told = ", ".join(f"{name} {value:.3g}" for name, value in simulated.items())
    report.say(f"{kind.name} at {load:.0%} ({rate:.3g}/s): simulated TTFT {told} s; measured")
    for figures in measured:
        report.say(", ".join(f"{name} {value:.3g}" for name, value in figures.items()))
    mean = {name: statistics.fmean(figures[name] for figures in measured) for name in GOALS}
    spread = {name: [figures[name] for figures in measured] for name in GOALS}
    return Error(
        load,
        {name: abs(simulated[name] / mean[name] - 1) for name in GOALS},
        {name: max(values) / min(values) - 1 for name, values in spread.items()},
    )


def _figures(ttft_s: Sequence[float]) -> dict[str, float]:
    return {"median": percentile(ttft_s, 50), "p90": percentile(ttft_s, 90)}
