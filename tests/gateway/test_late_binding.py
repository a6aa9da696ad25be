"""A request that waits moves to a place that stands idle, on real sockets; its answer is whole."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from gateway.live_policy import Running
from policies.registry import make_policy
from prfaas.settings import PolicySettings
from prfaas.snapshot import Outcome
from prfaas.testing.gateway_setup import INSTANCE, PEER, PLACE, completion, until
from prfaas.testing.scripted_engine import Script
from prfaas.transfer import parse

LIMITS = {"engine_active_requests": 0, "watch_interval_s": 0.1}
"""However long an engine's queue is, all of it waits there; a report is soon a young one."""
POLICY = {"name": "priced", "move_gain_s": 0.1}
MOVES = "prfaas_gateway_moves_total"
HELD = Script(first_delay_s=60.0)
"""An engine that does not come to it."""
TEXT = "Hello, world."


def texts(answer: str) -> str:
    events = [line[6:] for line in answer.splitlines() if line.startswith("data: {")]
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


async def decided_while(cluster: Any, *, d_tokens: int, p_tokens: int) -> None:
    """Queues of so many tokens at D and at P, known to the gateway."""
    cluster.d.change(queue_tokens=d_tokens, waiting=min(1, d_tokens))
    cluster.p.change(queue_tokens=p_tokens, waiting=min(1, p_tokens))
    feeds = cluster.gateway.view.feeds
    await until(lambda: feeds["d-0"].engine.queue_tokens == d_tokens, "D's queue")
    await until(lambda: feeds[PLACE].engine.queue_tokens == p_tokens, "P's queue")


async def sent(cluster: Any, count: int = 1) -> None:
    await until(lambda: len(cluster.engine.seen) == count, f"request {count}")


def params_of(cluster: Any, at: int) -> Any:
    found = cluster.engine.seen[at].body.get("kv_transfer_params")
    return None if found is None else parse(found)


async def told_by_d(cluster: Any, queue_tokens: int) -> None:
    """D tells of what was sent to it, in a load report that is clearly younger."""
    sent_ledger, more = cluster.gateway.view.sent, 0
    while sent_ledger.unshown("d-0").tokens:
        more = 1 - more
        cluster.d.change(queue_tokens=queue_tokens + more, waiting=2)
        await asyncio.sleep(0.02)


async def wait_at_d(cluster: Any, **fields: Any) -> asyncio.Task[Any]:
    """A request that was sent to D behind 3,000 tokens, as P was busier still."""
    await decided_while(cluster, d_tokens=3000, p_tokens=30_000)
    cluster.engine.queue.append(HELD)
    task = asyncio.create_task(cluster.post(completion(**{"stream": True, **fields})))
    await sent(cluster)
    assert params_of(cluster, 0) is None
    await told_by_d(cluster, 5000)
    return task


async def wait_at_p(cluster: Any, **fields: Any) -> asyncio.Task[Any]:
    """A request that was sent to P behind 1,000 tokens, as D was busier still."""
    await decided_while(cluster, d_tokens=30_000, p_tokens=1000)
    cluster.engine.queue.append(HELD)
    task = asyncio.create_task(cluster.post(completion(**{"stream": True, **fields})))
    await sent(cluster)
    transfer_id = params_of(cluster, 0).transfer_id
    cluster.d.started(transfer_id)
    cluster.p.started(transfer_id)
    cluster.p.change(queue_tokens=3000, waiting=2)
    return task


@pytest.fixture
def cluster_of(make_cluster: Any) -> Any:
    def make(**fields: Any) -> Any:
        return make_cluster(policy={**POLICY, **fields}, limits=LIMITS)

    return make


async def test_what_waits_at_d_moves_to_a_peer_that_stands_idle(
    cluster_of: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="gateway.request")
    async with cluster_of() as cluster:
        task = await wait_at_d(cluster)
        cluster.p.change(queue_tokens=0, waiting=0)
        status, answer, response = await task
        assert (status, texts(answer)) == (200, TEXT)
        assert response.headers["x-prfaas-target"] == "remote"
        assert params_of(cluster, 1).plan[0].peer == PEER
        await until(lambda: cluster.engine.seen[0].cancelled, "the end of the first try")
        assert await cluster.metric(MOVES, direction="to_remote") == 1
        record = await cluster.record(response.headers["x-request-id"])
        (move,) = record["moves"]
        assert (move["from"], move["to"], move["why"]) == ("local", PLACE, "peer_idle")
        assert move["stay_s"] - move["go_s"] > POLICY["move_gain_s"]
        assert move["after_s"] >= 0
        # The log has what the policy said at first, with what it saw, to replay.
        assert record["decision"]["target"] == "local"
        assert record["snapshot"]["remotes"][0]["load"]["queue_tokens"] == 30_000
        assert record["target"] == "remote"
        assert record["tried"] == ["d-0"]


async def test_what_waits_at_a_peer_comes_home_to_d_that_stands_idle(cluster_of: Any) -> None:
    async with cluster_of() as cluster:
        task = await wait_at_p(cluster)
        first = params_of(cluster, 0).transfer_id
        cluster.d.change(queue_tokens=0, waiting=0)
        status, answer, response = await task
        assert (status, texts(answer)) == (200, TEXT)
        assert response.headers["x-prfaas-target"] == "local"
        assert params_of(cluster, 1) is None
        assert await cluster.metric(MOVES, direction="to_local") == 1
        assert await cluster.metric("prfaas_gateway_outcomes_total", status="moved") == 1
        # What D's agent says of the transfer that was called off concerns no request any more.
        cluster.d.outcome(Outcome(first, "aborted", peer=PEER, instance=INSTANCE))
        record = await cluster.record(response.headers["x-request-id"])
        assert (record["moves"][0]["from"], record["moves"][0]["to"]) == (PLACE, "local")
        assert record["outcome"] is None
        assert cluster.gateway.budget.granted_tokens == 0
        assert len(cluster.gateway.view.sent) == 0


async def test_a_transfer_that_d_has_no_room_for_comes_home_too(cluster_of: Any) -> None:
    """P is idle and has never heard of it: D's agent waits for staging."""
    async with cluster_of() as cluster:
        await decided_while(cluster, d_tokens=30_000, p_tokens=0)
        cluster.engine.queue.append(HELD)
        task = asyncio.create_task(cluster.post(completion(stream=True)))
        await sent(cluster)
        cluster.d.started(params_of(cluster, 0).transfer_id)
        cluster.d.change(queue_tokens=0, waiting=0)
        cluster.d.change_link(goodput_bytes_per_s=1e4, in_flight_bytes=1_000_000)
        status, answer, _ = await task
        assert (status, texts(answer)) == (200, TEXT)
        assert params_of(cluster, 1) is None
        assert await cluster.metric(MOVES, direction="to_local") == 1


async def test_an_answer_that_is_not_streamed_moves_while_it_must_be_waiting(
    cluster_of: Any,
) -> None:
    async with cluster_of() as cluster:
        task = await wait_at_d(cluster, stream=False)
        cluster.p.change(queue_tokens=0, waiting=0)
        status, answer, _ = await task
        assert (status, answer["choices"][0]["text"]) == (200, TEXT)
        assert await cluster.metric(MOVES, direction="to_remote") == 1


async def test_what_has_begun_stays(cluster_of: Any) -> None:
    """Nothing is ahead of it any more, or its answer has begun to come."""
    async with cluster_of() as cluster:
        await decided_while(cluster, d_tokens=3000, p_tokens=30_000)
        cluster.engine.queue.append(Script(token_delay_s=0.15))
        answering = asyncio.create_task(cluster.post(completion(stream=True)))
        await sent(cluster)
        cluster.engine.queue.append(Script(first_delay_s=1.5))
        next_one = asyncio.create_task(cluster.post(completion(stream=True)))
        await sent(cluster, 2)
        await told_by_d(cluster, 1500)  # of its own 1,999
        cluster.p.change(queue_tokens=0, waiting=0)
        for task in (answering, next_one):
            status, answer, _ = await task
            assert (status, texts(answer)) == (200, TEXT)
        assert len(cluster.engine.seen) == 2
        assert await cluster.metric(MOVES, direction="to_remote") == 0


@pytest.mark.parametrize("policy", [{"name": "least_ttft"}, {**POLICY, "move_gain_s": None}])
async def test_a_policy_that_does_not_bind_late_moves_nothing(
    make_cluster: Any, policy: dict[str, Any]
) -> None:
    async with make_cluster(policy=policy, limits=LIMITS) as cluster:
        await decided_while(cluster, d_tokens=3000, p_tokens=30_000)
        cluster.engine.queue.append(Script(first_delay_s=1.0))
        task = asyncio.create_task(cluster.post(completion(stream=True)))
        await sent(cluster)
        await told_by_d(cluster, 5000)
        cluster.p.change(queue_tokens=0, waiting=0)
        status, _, _ = await task
        assert status == 200
        assert len(cluster.engine.seen) == 1


async def test_a_policy_that_took_over_meanwhile_has_the_say(
    cluster_of: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with cluster_of() as cluster:
        task = await wait_at_d(cluster)
        policy = cluster.gateway.policy
        other = make_policy(PolicySettings(name="always_local"))
        policy._running["active"] = Running(other, 2)
        cluster.p.change(queue_tokens=0, waiting=0)
        feed = cluster.gateway.view.feeds[PLACE]
        await until(lambda: feed.engine.queue_tokens == 0, "P's queue")
        cluster.gateway.generation._attempts._binding.look()
        assert len(cluster.engine.seen) == 1
        assert "cannot say" not in caplog.text
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_to_one_idle_peer_goes_the_one_that_gains_most(cluster_of: Any) -> None:
    async with cluster_of() as cluster:
        await decided_while(cluster, d_tokens=3000, p_tokens=90_000)
        cluster.engine.queue.extend([HELD] * 3)
        tasks = []
        for at in range(3):
            tasks.append(asyncio.create_task(cluster.post(completion(stream=True, seed=at))))
            await sent(cluster, at + 1)
        await told_by_d(cluster, 9000)
        cluster.p.change(queue_tokens=0, waiting=0)
        await sent(cluster, 4)
        assert cluster.engine.seen[3].body["seed"] == 2
        assert params_of(cluster, 3) is not None
        await tasks[2]
        for task in tasks[:2]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_client_who_leaves_as_it_moves_is_gone(cluster_of: Any) -> None:
    async with cluster_of() as cluster:
        task = await wait_at_d(cluster)
        binding = cluster.gateway.generation._attempts._binding
        binding.close()  # it looks when it is told to
        (waiting,) = binding._waiting.values()
        cluster.p.change(queue_tokens=0, waiting=0)
        feed = cluster.gateway.view.feeds[PLACE]
        await until(lambda: feed.engine.queue_tokens == 0, "P's queue")
        waiting.task.cancel()
        binding.look()
        assert waiting.moving is not None
        await until(lambda: waiting.job.record.status == "499", "its end")
        assert len(cluster.engine.seen) == 1
        assert len(binding) == 0
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_request_moves_twice_and_no_more(cluster_of: Any) -> None:
    async with cluster_of() as cluster:
        task = await wait_at_d(cluster)
        cluster.engine.queue.append(HELD)
        cluster.p.change(queue_tokens=0, waiting=0)
        await sent(cluster, 2)
        cluster.p.started(params_of(cluster, 1).transfer_id)
        cluster.d.started(params_of(cluster, 1).transfer_id)
        cluster.engine.queue.append(Script(first_delay_s=1.5))
        cluster.p.change(queue_tokens=9000, waiting=2)
        cluster.d.change(queue_tokens=0, waiting=0)
        await sent(cluster, 3)
        await told_by_d(cluster, 9000)
        cluster.p.change(queue_tokens=0, waiting=0)
        status, answer, response = await task
        assert (status, texts(answer)) == (200, TEXT)
        assert len(cluster.engine.seen) == 3
        record = await cluster.record(response.headers["x-request-id"])
        assert [move["to"] for move in record["moves"]] == [PLACE, "local"]
