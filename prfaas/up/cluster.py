"""What a gateway says of its cluster and requests, for the demonstration and benchmarks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from prfaas.errors import PrfaasError
from prfaas.up.client import OpenAIClient

_POLL_S = 0.05
_OUTCOME_TIMEOUT_S = 10.0

Record = Mapping[str, Any]
"""JSON of `GET /prfaas/requests/{id}`."""


class Gets(Protocol):
    """A client of a server's JSON documents."""

    async def get(self, path: str) -> dict[str, Any]: ...


async def wait_cluster(
    gateway: OpenAIClient, what: str, holds: Callable[[Mapping[str, Any]], bool], timeout_s: float
) -> Mapping[str, Any]:
    """The cluster once `holds` of it. Raises PrfaasError with its last state after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        cluster = await gateway.get("/prfaas/cluster")
        if holds(cluster):
            return cluster
        if time.monotonic() > deadline:
            raise PrfaasError(f"waited {timeout_s:.0f} s for {what}; the gateway sees {cluster}")
        await asyncio.sleep(_POLL_S)


def paired(cluster: Mapping[str, Any]) -> bool:
    """D's agent is there, and every prefill instance is paired and probed."""
    remotes = cluster["remotes"]
    ready = bool(remotes) and all(remote["ready"] for remote in remotes)
    return ready and bool(cluster["local"]["offload_ready"])


def measured(cluster: Mapping[str, Any]) -> bool:
    """Paired, and the policy has all it needs: prefill curves and the link's goodput."""
    curves = [place["curve"]["token_s"] for place in (cluster["local"], *cluster["remotes"])]
    goodputs = [remote["link"]["goodput_bytes_per_s"] for remote in cluster["remotes"]]
    return paired(cluster) and all(value > 0 for value in (*curves, *goodputs))


def d_has_queue(cluster: Mapping[str, Any]) -> bool:
    """The gateway has heard that a prompt of more than a chunk waits at D."""
    local = cluster["local"]
    return bool(local["load"]["queue_tokens"] > local["curve"]["chunk_tokens"])


async def wait_record(gateway: Gets, request_id: str) -> Record:
    """What the gateway knows of a request, with the outcome where one is due."""
    deadline = time.monotonic() + _OUTCOME_TIMEOUT_S
    while True:
        record = await gateway.get(f"/prfaas/requests/{request_id}")
        if record["target"] == "local" or record["outcome"] is not None:
            return record
        if time.monotonic() > deadline:
            raise PrfaasError(f"no outcome of request {request_id}: {record}")
        await asyncio.sleep(_POLL_S)
