"""The simulator agrees with queueing theory where theory has an answer."""

from __future__ import annotations

import random
from collections.abc import Callable
from statistics import fmean, stdev

import pytest

from policies.mix import mix_of_lengths
from policies.planner import Queues
from policies.queueing import mgc_wait, shared_link_stretch
from policies.registry import make_policy
from policies.scenario import QueueOrder, load_scenario
from policies.simulator.events import EventLoop
from policies.simulator.job import Job
from policies.simulator.link import Flow, SharedLink
from policies.simulator.order import order_key
from policies.simulator.pool import PrefillPool
from policies.simulator.run import simulate, with_rate
from policies.throughput import Fleet, Split
from policies.workload.generate import Lengths
from policies.workload.request import Request
from prfaas.profile import Profile
from prfaas.settings import PolicySettings


def waits(
    profile: Profile,
    servers: int,
    rate: float,
    draw: Callable[[random.Random], int],
    count: int,
    seed: int = 7,
) -> list[float]:
    """Seconds in the queue of Poisson arrivals at a pool; a warm-up is left out."""
    loop, rng = EventLoop(), random.Random(seed)
    key = order_key(QueueOrder())
    pool = PrefillPool(loop, profile, servers, key, False, lambda job: None, lambda job: None)
    jobs, now = [], 0.0
    for number in range(count):
        now += rng.expovariate(rate)
        job = Job(Request(number, now, draw(rng), 1), number)
        job.uncached = job.request.prompt_tokens
        loop.run_until(now)
        pool.put(job)
        jobs.append(job)
    loop.run_out()
    assert pool.idle
    return [job.queue_s for job in jobs[count // 10 :]]


@pytest.mark.parametrize(("servers", "load"), [(1, 0.7), (4, 0.7), (8, 0.8)])
def test_exponential_service_waits_as_mmc(
    profile: Callable[..., Profile], servers: int, load: float
) -> None:
    mean_tokens = 10_000  # ten seconds
    means: list[float] = []
    found: list[float] = []
    for seed in range(8):
        some = waits(
            profile(),
            servers,
            load * servers / 10.0,
            lambda rng: max(1, round(rng.expovariate(1 / mean_tokens))),
            8_000,
            seed,
        )
        means.append(fmean(some))
        found += some
    theory = mgc_wait(load * servers / 10.0, servers, 10.0, 200.0)
    error = stdev(means) / len(means) ** 0.5
    assert error < 0.1 * theory.overall_mean_s
    assert abs(fmean(means) - theory.overall_mean_s) < 3 * error
    share = sum(w > 0 for w in found) / len(found)
    assert share == pytest.approx(theory.probability, abs=0.03)


@pytest.mark.parametrize("sigma", [0.0, 0.6, 1.0])
def test_any_service_at_one_server_waits_as_mg1(
    profile: Callable[..., Profile], sigma: float
) -> None:
    lengths = [round(10_000 * random.Random(i).lognormvariate(0, sigma)) for i in range(2000)]
    mean = fmean(lengths) * 1e-3
    second = fmean((x * 1e-3) ** 2 for x in lengths)
    rate = 0.7 / mean
    found = waits(profile(), 1, rate, lambda rng: rng.choice(lengths), 40_000)
    theory = mgc_wait(rate, 1, mean, second)
    assert fmean(found) == pytest.approx(theory.overall_mean_s, rel=0.08)


@pytest.mark.parametrize("varied", [False, True])
@pytest.mark.parametrize("load", [0.5, 0.8])
def test_a_shared_link_is_processor_sharing(load: float, varied: bool) -> None:
    """Mean time of a transfer is that alone over (1 - load), however lengths vary."""
    loop, rng = EventLoop(), random.Random(3)
    started: dict[Job, float] = {}
    took: list[float] = []
    link = SharedLink(loop, 1000.0, lambda job: took.append(loop.now - started[job]))
    now = 0.0
    for number in range(20_000):
        now += rng.expovariate(load)  # transfers of 1000 B in the mean, one second alone
        loop.run_until(now)
        job = Job(Request(number, now, 10, 1), number)
        flow = Flow(job, rng.expovariate(1 / 1000.0) if varied else 1000.0)
        started[job] = now
        link.open(flow)
        link.seal(flow)
    loop.run_out()
    assert len(link) == 0
    assert fmean(took) == pytest.approx(shared_link_stretch(load), rel=0.08)


def test_the_planners_queues_are_those_of_the_simulator() -> None:
    """TTFT of the paper's site at 2.5 requests a second, mean and tails, without caches."""
    scenario, profiles = load_scenario("paper")
    local = scenario.local.model_copy(update={"prefill_instances": 3})
    workload = scenario.workload.model_copy(update={"requests": 8_000})
    scenario = with_rate(scenario.model_copy(update={"local": local, "workload": workload}), 2.5)
    policy = make_policy(PolicySettings(name="length_threshold", threshold_tokens=19_600))
    simulated = simulate(scenario, profiles, scenario.workload.stream(), policy).summary(200.0)
    fleet = Fleet.of(scenario, profiles)
    planned = Queues(fleet, mix_of_lengths(Lengths(), 1024), Split(19_600, 3, 5), 20).load(2.5)
    assert simulated.ttft_mean_s == pytest.approx(planned.mean_ttft_s, rel=0.06)
    assert simulated.ttft_p50_s == pytest.approx(planned.ttft_s[0.5], rel=0.06)
    assert simulated.ttft_p90_s == pytest.approx(planned.ttft_s[0.9], rel=0.08)
    assert simulated.ttft_p99_s == pytest.approx(planned.ttft_s[0.99], rel=0.15)
    assert simulated.offload_share == pytest.approx(planned.remote_share, abs=0.02)
    for stage, name in (("remote_prefill", "peer.prefill"), ("local_prefill", "local_prefill")):
        assert simulated.utilisation[name] == pytest.approx(
            planned.utilisation[stage],
            abs=0.04,  # type: ignore[index]
        )
