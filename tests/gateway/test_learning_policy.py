"""A policy that learns from every request sees each of them in the gateway, offloaded or not."""

from __future__ import annotations

from typing import Any

from prfaas.testing.gateway_setup import completion


async def test_every_request_reaches_a_policy_that_learns(make_cluster: Any) -> None:
    async with make_cluster(policy={"name": "paper", "threshold_tokens": 10**6}) as cluster:
        for seen in range(3):
            _, _, response = await cluster.post(completion())
            assert response.headers["x-prfaas-target"] == "local"
            record = await cluster.record(response.headers["x-request-id"])
            assert record["policy_state"]["seen"] == seen
            assert record["decision"]["reason"] == "below_threshold"
