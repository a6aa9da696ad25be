"""Requests that wait in the gateway go in the order that is set, the same as in the simulator."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.queue_order import QueueOrder
from policies.scenario import QueueOrder as Simulated
from policies.simulator import order as simulator
from prfaas.errors import ConfigError
from prfaas.queue_settings import QueueSettings, order_key
from prfaas.settings import Settings, load_settings
from prfaas.snapshot import UNKNOWN_CURVE, EngineLoad, LocalEngine, PrefillCurve
from prfaas.testing.gateway_setup import completion, until
from prfaas.testing.scripted_engine import Script


@pytest.mark.parametrize("name", ["fcfs", "srpt", "slack"])
def test_the_orders_are_those_of_the_simulator(name: str) -> None:
    live = order_key(QueueSettings(name=name))
    simulated = simulator.order_key(Simulated(name=name))
    for arrival_s, seconds in ((0.0, 3.0), (5.0, 0.5), (7.5, 20.0)):
        job: Any = SimpleNamespace(request=SimpleNamespace(arrival_s=arrival_s))
        assert live(arrival_s, seconds) == simulated(job, seconds)
    defaults = Simulated().model_dump()
    assert QueueSettings().model_dump() == defaults


def test_nothing_goes_first_that_came_later_than_it_may() -> None:
    key = order_key(QueueSettings(name="srpt", ageing=2.0, overtaken_s=4.0))
    assert key(10.0, 0.5) == 11.0
    assert key(10.0, 2.0) == key(10.0, 200.0) == 14.0
    assert key(13.9, 0.01) < key(10.0, 200.0) < key(14.1, 0.0)


def policy_of(queue: QueueSettings | None = None) -> Any:
    return SimpleNamespace(queue=queue)


def view_of(*locals_: LocalEngine) -> Any:
    by_name = {local.name: local for local in locals_}
    engines = [SimpleNamespace(name=name) for name in by_name]
    return SimpleNamespace(engines=engines, local=lambda name, chains: by_name[name])


def job_of(tokens: int, arrival_s: float) -> Any:
    prompt = SimpleNamespace(tokens=tokens, chains={})
    return SimpleNamespace(prompt=prompt, record=SimpleNamespace(started_at=arrival_s))


def test_a_prompt_counts_by_what_the_best_engine_would_compute() -> None:
    curve = PrefillCurve(0.0, 0.001, 0.0, 256)
    busy = LocalEngine("a", EngineLoad(), curve, 0)
    cached = LocalEngine("b", EngineLoad(), curve, 4000)
    order = QueueOrder(QueueSettings(name="srpt"), policy_of(), view_of(busy, cached))
    assert order.key(job_of(5001, 10.0)) == pytest.approx(10.0 + 2 * 1.0)
    assert order.key(job_of(101, 10.0)) == pytest.approx(10.0)


def test_the_order_that_comes_with_the_policy_holds_as_long_as_that_is_active() -> None:
    view = view_of(LocalEngine("a", EngineLoad(), PrefillCurve(0.0, 0.001, 0.0, 256), 0))
    policy = policy_of()
    order = QueueOrder(QueueSettings(), policy, view)
    job = job_of(2001, 10.0)
    assert order.key(job) == 10.0
    policy.queue = QueueSettings(name="srpt", ageing=0.5)
    assert order.key(job) == pytest.approx(10.0 + 0.5 * 2.0)
    policy.queue = QueueSettings(name="slack", deadline_s=4.0)
    assert order.key(job) == pytest.approx(10.0 + 4.0 - 2.0)
    policy.queue = None
    assert order.key(job) == 10.0


def test_without_curves_it_is_first_come_first_served() -> None:
    unknown = LocalEngine("a", EngineLoad(), UNKNOWN_CURVE, 0)
    for view in (view_of(unknown), view_of()):
        for name in ("srpt", "slack"):
            order = QueueOrder(QueueSettings(name=name), policy_of(), view)
            keys = [order.key(job_of(tokens, at)) for at, tokens in enumerate((900, 5, 70))]
            assert keys == sorted(keys)


async def test_a_short_prompt_overtakes_a_long_one_on_its_way_to_a_full_engine(
    make_cluster: Any,
) -> None:
    limits = {"engine_active_requests": 1}
    async with make_cluster(queue={"name": "srpt"}, offload=False, limits=limits) as cluster:
        cluster.engine.queue.append(Script(first_delay_s=0.5))
        tasks: list[asyncio.Task[Any]] = []
        turns = cluster.gateway.engines.turns
        for number, tokens in enumerate((1000, 3000, 300)):
            body = completion("x" * tokens, seed=number)
            tasks.append(asyncio.create_task(cluster.post(body)))
            await until(lambda: turns.active + turns.waiting == len(tasks), "its place")
        assert [status for status, _, _ in await asyncio.gather(*tasks)] == [200] * 3
        assert [seen.body["seed"] for seen in cluster.engine.seen] == [0, 2, 1]
        assert await cluster.metric("prfaas_gateway_overtakes_total") == 1


def test_an_order_that_does_not_exist_is_an_error_that_names_the_key(tmp_path: Any) -> None:
    file = tmp_path / "prfaas.yaml"
    file.write_text("gateway: {queue: {name: lifo}}")
    with pytest.raises(ConfigError, match=r"gateway\.queue\.name"):
        load_settings(file)
    assert Settings().gateway.queue.name == "fcfs"
