"""What the gateway costs before an engine, beside routers that people use today.

One interleaved run, medians of rounds. Routers share one core; load and a mock engine have another.
CPU is what the scheduler counted for all threads of a router. All have one engine, so a row says
what a request costs; those that look for a prompt's prefix have two, to have something to look for.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import uvloop

from bench import gateway_routers as routers_
from bench.gateway_load import Driver, Load
from bench.gateway_routers import Router
from bench.harness import Arm, Report, Samples, run_interleaved
from local_engine.demo_model import fetch_demo_model
from prfaas.errors import PrfaasError
from prfaas.up.paths import default_cache_dir

OURS = "ours"
PLAIN = "aiohttp"
OFFLOADING, TWO_LEGS = "ours-offloading", "vllm-pd"
PLACING, EXACT = "ours-placing", "ours-exact"
OURS_FOR = {"remote": OFFLOADING, "64KB-prefix": PLACING, "64KB-exact": EXACT}
"""Which of ours a load is for, where it is not the plain one."""
ROUNDS, QUICK_ROUNDS = 7, 3
RSS_REQUESTS = 100_000
RSS_WARM_UP = 10_000

# Row, load, baseline.
ROWS = (
    ("cpu_200B_over_sglang", "200B", "sglang-rr"),
    ("cpu_200B_over_vllm", "200B", "vllm-rr"),
    ("cpu_200B_over_aiohttp", "200B", PLAIN),
    ("cpu_64KB_over_sglang", "64KB", "sglang-rr"),
    ("cpu_64KB_over_vllm", "64KB", "vllm-rr"),
    ("cpu_64KB_over_aiohttp", "64KB", PLAIN),
    ("cpu_64KB_prefix_over_sglang_cache", "64KB-prefix", "sglang-cache2"),
    ("cpu_64KB_prefix_over_vllm_cache", "64KB-prefix", "vllm-cache2"),
    ("cpu_64KB_exact_tokens_over_sglang_cache", "64KB-exact", "sglang-cache2"),
    ("cpu_sse32_over_sglang_cache", "sse32", "sglang-cache"),
    ("cpu_sse32_over_vllm", "sse32", "vllm-rr"),
    ("cpu_sse32_over_aiohttp", "sse32", PLAIN),
    ("cpu_paced_token_over_vllm", "paced", "vllm-rr"),
    ("cpu_paced_token_over_aiohttp", "paced", PLAIN),
    ("cpu_remote_decision_over_vllm_pd", "remote", TWO_LEGS),
)


REMOTE_ROUTERS = frozenset({OFFLOADING, TWO_LEGS})
PREFIX_ROUTERS = frozenset({PLACING, "sglang-cache2", "vllm-cache2"})
EXACT_ROUTERS = frozenset({EXACT, "sglang-cache2"})
SPECIAL = REMOTE_ROUTERS | PREFIX_ROUTERS | EXACT_ROUTERS


def loads(quick: bool) -> tuple[Load, ...]:
    scale = 1 if quick else 3
    return (
        Load("200B", 200, clients=16, requests=1000 * scale),
        Load("64KB", 64_000, clients=16, requests=250 * scale),
        Load("sse32", 200, clients=16, requests=400 * scale, stream=True),
        Load("64KB-prefix", 64_000, clients=16, requests=250 * scale, routers=PREFIX_ROUTERS),
        # As many as with prefixes: of a few dozen, a fifth of either router's CPU is what a pause
        # before them costs.
        Load("64KB-exact", 64_000, clients=16, requests=250 * scale, routers=EXACT_ROUTERS),
        Load("remote", 200, clients=16, requests=500 * scale, remote=True, routers=REMOTE_ROUTERS),
        Load("paced", 200, clients=32, requests=192 * scale, stream=True, paced=True),
    )


def run(quick: bool) -> None:
    """Raises PrfaasError where not even the gateway comes up."""
    uvloop.run(_run(quick, Report("gateway", quick=quick)))


async def _run(quick: bool, report: Report) -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise PrfaasError("two cores are needed: one for routers, one for load and engine")
    router_core, load_core = cores[0], cores[1]
    pythons = {name: routers_.environment(name, report.say) for name in routers_.VERSIONS}
    os.sched_setaffinity(0, {load_core})
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="prfaas-bench-")))
        engine = [sys.executable, "-m", "bench.gateway_engine"]
        _, line = await stack.enter_async_context(
            routers_.process(engine, directory / "engine.log", load_core, reads_line=True)
        )
        port, other_port, d_agent, p_agent = line.split()
        engine_url, other_url = (f"http://127.0.0.1:{each}" for each in (port, other_port))
        commands: dict[str, Callable[[int], list[str]]] = {
            OURS: lambda port: routers_.ours(directory, port, engine_url),
            OFFLOADING: lambda port: routers_.ours_offloading(
                directory, port, engine_url, d_agent, p_agent
            ),
            PLACING: lambda port: routers_.ours_placing(directory, port, (engine_url, other_url)),
            PLAIN: lambda port: routers_.plain_proxy(port, engine_url),
        }
        if (model := _demo_model(report)) is not None:
            commands[EXACT] = lambda port: routers_.ours_placing(
                directory, port, (engine_url, other_url), model
            )
        for name, python in pythons.items():
            if python is not None:
                for short, policy in (("rr", "round_robin"), ("cache", "cache_aware")):
                    commands[f"{name}-{short}"] = _baseline(python, name, policy, engine_url)
                commands[f"{name}-cache2"] = _baseline(
                    python, name, "cache_aware", engine_url, other_url
                )
        if (vllm := pythons["vllm"]) is not None:
            commands[TWO_LEGS] = lambda port: routers_.vllm_two_legs(
                vllm, port, other_url, engine_url
            )
        routers = await stack.enter_async_context(
            routers_.running(commands, directory, router_core, report.say)
        )
        if OURS not in routers:
            raise PrfaasError("the gateway did not come up")
        drivers = {name: Driver(router.url) for name, router in routers.items()}
        drivers["direct"] = Driver(engine_url)
        for driver in drivers.values():
            stack.push_async_callback(driver.close)
        await _measure(quick, report, routers, drivers)


def _baseline(python: Path, name: str, policy: str, *urls: str) -> Callable[[int], list[str]]:
    return lambda port: routers_.baseline(python, name, policy, port, *urls)


def _demo_model(report: Report) -> Path | None:
    """Its tokenizer is what counts; None, said aloud, where it cannot be had."""
    try:
        return fetch_demo_model(default_cache_dir(), report.say)
    except PrfaasError as exc:
        report.say(f"no tokenizer, so the row of exact tokens is left out: {exc.message}")
        return None


def _runs(load: Load, name: str) -> bool:
    """Whether this router gets this load."""
    if load.paced and name.startswith("sglang"):
        return False  # it does not pass on the field by which the engine paces its events
    return name in load.routers if load.routers else name not in SPECIAL


async def _measure(
    quick: bool, report: Report, routers: dict[str, Router], drivers: dict[str, Driver]
) -> None:
    arms: dict[str, Arm] = {}
    for load in loads(quick):
        for name, router in routers.items():
            if _runs(load, name):
                arms[f"{load.name} {name}"] = _cpu_us(router, drivers[name], load)
    one = Load("c1", 200, clients=1, requests=200 if quick else 800)
    for name in ("direct", OURS, "vllm-rr"):
        if name in drivers:
            arms[f"c1 {name}"] = _p50_us(drivers[name], one)
    for load in loads(True):  # warm: pools, caches, branches
        for name in routers:
            if _runs(load, name):
                await drivers[name].run(load)
    rounds = QUICK_ROUNDS if quick else ROUNDS
    found = await run_interleaved(arms, rounds, report.say)
    _write(report, found)
    if not quick:
        growth = await _rss_growth(routers[OURS], drivers[OURS])
        note = f"own RSS after {RSS_WARM_UP} requests of 200 B and after {RSS_REQUESTS} more"
        report.add("rss_growth_100k_requests_MiB", growth / 2**20, "MiB", note)
    report.finish()


def _cpu_us(router: Router, driver: Driver, load: Load) -> Arm:
    """Router CPU microseconds of one request; of one token where tokens are paced."""

    async def arm() -> float:
        before = router.cpu_s()
        await driver.run(load)
        each = load.requests * (load.tokens if load.paced else 1)
        return (router.cpu_s() - before) / each * 1e6

    return arm


def _p50_us(driver: Driver, load: Load) -> Arm:
    async def arm() -> float:
        return statistics.median(await driver.run(load)) * 1e6

    return arm


def _write(report: Report, found: dict[str, Samples]) -> None:
    """Ratios of medians, of what ran; then the medians themselves."""
    for row, load, name in ROWS:
        ours = f"{load} {OURS_FOR.get(load, OURS)}"
        if f"{load} {name}" not in found or ours not in found:
            continue
        mine = found[ours]
        theirs = found[f"{load} {name}"]
        what = "token" if load == "paced" else "request"
        note = (
            f"router CPU of a {what}: {mine.median:.0f} us ({mine.spread}) against "
            f"{theirs.median:.0f} us ({theirs.spread}) of {_named(name)}"
        )
        report.add(row, mine.median / theirs.median, "ratio", note)
    if "c1 vllm-rr" in found:
        direct, mine, theirs = (found[f"c1 {name}"] for name in ("direct", OURS, "vllm-rr"))
        note = (
            f"p50 of one client: {mine.median:.0f} us ({mine.spread}) and {theirs.median:.0f} us "
            f"({theirs.spread}) of {_named('vllm-rr')}, each minus {direct.median:.0f} us direct"
        )
        added = (mine.median - direct.median) / (theirs.median - direct.median)
        report.add("added_p50_over_vllm.c1", added, "ratio", note)
    for arm, samples in found.items():
        load, name = arm.split(" ")
        kind = "p50" if load == "c1" else "router CPU"
        row = f"{'latency' if load == 'c1' else 'cpu'}_{load}_{name}"
        report.add(row, samples.median, "us", f"{kind}, {samples.spread}; {_named(name)}")


def _named(name: str) -> str:
    """A router as it can be had."""
    package, _, policy = name.partition("-")
    if package not in routers_.VERSIONS:
        named = {PLAIN: "a plain aiohttp proxy", OURS: "this gateway"}
        named[OFFLOADING] = "this gateway, every request offloaded"
        named[PLACING] = "this gateway, two engines, an index of text"
        named[EXACT] = "this gateway, two engines, prompts tokenised"
        return named.get(name, name)
    how = {
        "cache": "cache aware",
        "cache2": "cache aware, two engines",
        "pd": "prefill and decode as two legs",
    }
    return f"{routers_.VERSIONS[package]}, {how.get(policy, 'round robin')}"


async def _rss_growth(router: Router, driver: Driver) -> float:
    """Bytes; the requests before fill what is bounded: the history, pools, histograms."""
    await driver.run(Load("warm", 200, clients=16, requests=RSS_WARM_UP))
    before = router.rss_bytes()
    await driver.run(Load("rss", 200, clients=16, requests=RSS_REQUESTS))
    return router.rss_bytes() - before
