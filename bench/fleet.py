"""Live fleets of paced engines with the paper's profiles: what the paper promises, and faults."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from bench.fleet_load import Asked, FleetLoad, drawn
from bench.fleet_redis import add_redis_rows
from bench.fleet_site import (
    BYTES_OF_ONE,
    TIME_SCALE,
    TOKENS_OF_ONE,
    Instances,
    paper_seconds,
    running_fleet,
    simulated_site,
    write_fleet,
)
from bench.harness import Report, Samples, percentile, run_interleaved
from policies.registry import make_policy
from policies.scenario import Profiles, Scenario, load_scenario
from policies.simulator.run import simulate
from policies.workload.request import Request
from prfaas.settings import PolicySettings
from prfaas.testing.redis_server import WHY_SKIPPED, RedisServer, found
from prfaas.up.fleet_file import FleetFault
from prfaas.up.fleet_processes import FleetProcesses

ROUNDS = 5
PRFAAS: Instances = {"decode": 5, "prefill": 3, "remote": 4}
HOMOGENEOUS: Instances = {"decode": 3, "prefill": 9, "remote": 0}
"""The optima of the paper's Table 6: 12 instances each."""
PAPER_RATE = 3.24
"""Requests a second there, at the optimum."""
LOAD = 0.7
CLIENTS = 160
WARM_S, COUNTED_S, LOADED_S = 30.0, 40.0, 50.0
QUICK_S = 20.0
FAULT_AT_S = 8.0
FAULT_S = 32.0
REDIS_DOWN_S = 60.0
SEED = 7


def run(quick: bool) -> None:
    """Run it, print the table, write the file."""
    asyncio.run(_run(quick))


async def _run(quick: bool) -> None:
    report = Report("fleet", quick=quick)
    directory = Path(tempfile.mkdtemp(prefix="prfaas-bench-fleet-"))
    redis = None
    if found():
        redis = RedisServer(directory)
        await redis.start()
    else:
        report.say(f"{WHY_SKIPPED}: its rows are left out")
    try:
        await FleetBench(report, directory, redis, quick).run()
        if redis is not None:
            await add_redis_rows(report, redis, directory, 10.0 if quick else 60.0)
    finally:
        if redis is not None:
            await redis.stop()
        shutil.rmtree(directory, ignore_errors=True)
    report.finish()


class FleetBench:
    """Runs both fleets side by side, one of them loaded at a time."""

    def __init__(
        self, report: Report, directory: Path, redis: RedisServer | None, quick: bool
    ) -> None:
        """`redis`, where there is one, is what the gateways share."""
        self._report, self._directory, self._redis, self._quick = report, directory, redis, quick
        self._rounds = 1 if quick else ROUNDS
        self._seed = SEED
        self._rate = LOAD * PAPER_RATE / TIME_SCALE
        self._loaded_s = QUICK_S if quick else LOADED_S

    async def run(self) -> None:
        """All rows."""
        say = self._report.say
        url = "" if self._redis is None else self._redis.url()
        ours = write_fleet(self._directory / "prfaas", **PRFAAS, gateways=3, redis=url)
        baseline = write_fleet(self._directory / "homogeneous", **HOMOGENEOUS)
        async with running_fleet(ours, say) as fleet, running_fleet(baseline, say) as other:
            urls = fleet.plan.gateway_urls
            arms = {
                "throughput.prfaas": partial(self._throughput, urls[:1]),
                "throughput.homogeneous": partial(self._throughput, other.plan.gateway_urls),
                "p90_ttft.1_gateway": partial(self._p90_ttft, urls[:1], itertools.count()),
                "p90_ttft.3_gateways": partial(self._p90_ttft, urls, itertools.count()),
            }
            samples = await run_interleaved(arms, self._rounds, say, seed=SEED)
            self._add_rates(samples)
            self._add_simulated(samples["p90_ttft.1_gateway"])
            await self._add_faults(fleet)

    async def _throughput(self, urls: Sequence[str]) -> float:
        """Answers a second, in the paper's time, of a fleet that always has enough to do."""
        async with FleetLoad(urls, self._next_seed()) as load:
            warm_s, counted_s = (QUICK_S, QUICK_S) if self._quick else (WARM_S, COUNTED_S)
            rate = await load.saturated(CLIENTS, warm_s, counted_s)
        return rate * TIME_SCALE

    async def _p90_ttft(self, urls: Sequence[str], rounds: Iterator[int]) -> float:
        """P90 of TTFT at LOAD of the paper's rate, in the paper's seconds. In one round all arms
        have prompts of the same lengths at the same times.
        """
        async with FleetLoad(urls, next(rounds), words=self._next_seed()) as load:
            answers = await load.at_rate(self._rate, self._loaded_s)
        failed = [one.failure for one in answers if one.failure]
        if failed:
            raise RuntimeError(f"{len(failed)} requests failed: {failed[0]}")
        return paper_seconds(percentile([one.ttft_s for one in answers], 90))

    def _next_seed(self) -> int:
        """Arms of one round get different prompts: what one left in a cache helps no other."""
        self._seed += 1
        return self._seed

    def _add_rates(self, samples: dict[str, Samples]) -> None:
        scale = (
            f"paced engines, 1 token for {TOKENS_OF_ONE}, KV and link 1/{BYTES_OF_ONE}, "
            f"1 s in {TIME_SCALE:g} s"
        )
        ours, theirs = samples["throughput.prfaas"], samples["throughput.homogeneous"]
        self._report.add(
            "throughput_over_homogeneous.paper_profile",
            ours.median / theirs.median,
            "ratio",
            f"saturated by {CLIENTS} clients: 5 D + 3 H20 + 4 H200 {ours.median:.3f} requests/s "
            f"({ours.spread}), 3 D + 9 H20 {theirs.median:.3f} ({theirs.spread}); {scale}",
        )
        one, three = samples["p90_ttft.1_gateway"], samples["p90_ttft.3_gateways"]
        self._report.add(
            "p90_ttft_over_one_gateway.3_gateways",
            three.median / one.median,
            "ratio",
            f"{self._rate * TIME_SCALE:.2f} requests/s of the paper's time: three "
            f"{three.median:.2f} s ({three.spread}), one {one.median:.2f} s ({one.spread}); "
            f"{'with' if self._redis else 'without'} a shared Redis; {scale}",
        )

    def _add_simulated(self, live: Samples) -> None:
        """The simulator on the same fleet and the same requests, round by round; it is told nothing
        of what was measured.
        """
        site = load_scenario(str(simulated_site(self._directory, **PRFAAS)))
        predicted = Samples(
            tuple(
                simulated_p90_ttft(site, drawn(seed, self._rate, self._loaded_s))
                for seed in range(len(live.values))
            )
        )
        ratios = Samples(tuple(a / b for a, b in zip(live.values, predicted.values, strict=True)))
        self._report.add(
            "live_over_simulated.p90_ttft",
            ratios.median,
            "ratio",
            f"{ratios.spread}; live {live.median:.2f} s ({live.spread}), simulated with the same "
            f"requests and the profiles as they are {predicted.median:.2f} s ({predicted.spread})",
        )

    async def _add_faults(self, fleet: FleetProcesses) -> None:
        gateway = fleet.plan.gateway_urls[1]
        self._add_failed(
            "gateway_killed", await self._while_killed(fleet, ["gateway-1"]), spared=gateway
        )
        if self._quick:
            return
        peer = [n for n in (p.spec.name for p in fleet.supervisor.processes) if "far-" in n]
        self._add_failed("peer_killed", await self._while_killed(fleet, peer))
        if self._redis is not None:
            self._add_failed("redis_down_60s", await self._without_redis(fleet, self._redis))

    def _add_failed(self, row: str, answers: Sequence[Asked], spared: str = "") -> None:
        """`spared`: the gateway whose own requests do not count."""
        counted = [one for one in answers if one.url != spared]
        failed = [one.failure for one in counted if one.failure]
        self._report.add(
            f"failed_requests.{row}",
            len(failed),
            "requests",
            f"of {len(counted)} at {LOAD:.0%} of the paper's rate"
            + (f"; first: {failed[0]}" if failed else ""),
        )

    async def _without_redis(self, fleet: FleetProcesses, redis: RedisServer) -> list[Asked]:
        """Load while Redis is away for a minute, and after."""
        async with FleetLoad(fleet.plan.gateway_urls, self._next_seed()) as load:
            asked = asyncio.create_task(load.at_rate(self._rate, REDIS_DOWN_S + 2 * FAULT_AT_S))
            await asyncio.sleep(FAULT_AT_S)
            await redis.stop()
            await asyncio.sleep(REDIS_DOWN_S)
            await redis.start()
            return await asked

    async def _while_killed(self, fleet: FleetProcesses, killed: Sequence[str]) -> list[Asked]:
        """Load for FAULT_S; after a third `killed` die, and later they come back."""
        async with FleetLoad(fleet.plan.gateway_urls, self._next_seed()) as load:
            asked = asyncio.create_task(load.at_rate(self._rate, FAULT_S))
            await asyncio.sleep(FAULT_AT_S)
            for name in killed:
                await fleet.carry_out(FleetFault(at_s=0, do="kill", what=name))
            await asyncio.sleep(FAULT_S - 2 * FAULT_AT_S)
            starts = [FleetFault(at_s=0, do="start", what=name) for name in killed]
            await asyncio.gather(*map(fleet.carry_out, starts))
            answers = await asked
        await fleet.wait_paired()
        return answers


def simulated_p90_ttft(site: tuple[Scenario, Profiles], requests: Sequence[Request]) -> float:
    """In the paper's seconds."""
    policy = make_policy(PolicySettings(name="least_ttft", min_uncached_tokens=1))
    rows = simulate(*site, requests, policy).rows
    return paper_seconds(percentile([row.ttft_s for row in rows], 90))
