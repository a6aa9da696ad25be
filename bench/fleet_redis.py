"""What a shared Redis costs a decision, and how exactly two gateways keep one budget through it."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from bench import gateway_routers, shared_state
from bench.gateway_engine import MODEL
from bench.gateway_load import CHAT
from bench.harness import Report
from gateway.upstream import HttpUpstream
from prfaas.limits import Limits
from prfaas.tenants import Tenant, TenantFile, new_key, save_tenants
from prfaas.testing.redis_server import RedisServer

ANSWER_TOKENS = 11
"""Usage of every answer of the benchmark's engine."""
BUDGET_PER_MINUTE = 12_000.0
CLIENTS = 8
_PAUSE_S = 0.02


async def add_redis_rows(
    report: Report, redis: RedisServer, directory: Path, flood_s: float
) -> None:
    """Both rows; the server stays up."""
    await _added_p50(report)
    core = min(os.sched_getaffinity(0))
    engine = [sys.executable, "-m", "bench.gateway_engine"]
    async with gateway_routers.process(engine, directory / "engine.log", core, reads_line=True) as (
        _,
        line,
    ):
        url = f"http://127.0.0.1:{line.split()[0]}"
        await _quota_error(report, redis, directory, url, flood_s)


async def _added_p50(report: Report) -> None:
    with tempfile.TemporaryDirectory() as own:
        alone, shared, exchanges = await shared_state.measure(Path(own))
    medians = [statistics.median(took) for took in (alone, shared)]
    report.add(
        "redis_added_p50_us",
        medians[1] - medians[0],
        "us",
        f"{len(shared)} decisions each, in {shared_state.TURNS} turns: P50 {medians[0]:.2f} us in "
        f"memory, {medians[1]:.2f} us beside {exchanges} exchanges",
    )


async def _quota_error(
    report: Report, redis: RedisServer, directory: Path, engine: str, flood_s: float
) -> None:
    key, stored = new_key()
    free, stored_free = new_key()
    tenants = (
        Tenant(name="flood", keys=(stored,), tokens_per_minute=BUDGET_PER_MINUTE),
        Tenant(name="free", keys=(stored_free,)),
    )
    file = directory / "tenants.yaml"
    save_tenants(file, TenantFile(tenants=tenants))
    shared = {
        "state": {"redis": redis.url(), "prefix": "quota"},
        "tenants": {"file": str(file)},
        "cache_secret": "a secret of this benchmark",
    }
    names = {"gateway-a": shared, "gateway-b": shared}
    async with _gateways(report, directory, engine, names, free) as urls:
        began = time.perf_counter()
        counts = await asyncio.gather(
            *(_flood(url, key, began + flood_s) for url in urls.values() for _ in range(CLIENTS))
        )
        took_s = time.perf_counter() - began
    admitted = sum(counts) * ANSWER_TOKENS
    # A minute's worth may come at once, and what flows in while it lasts.
    allowed = BUDGET_PER_MINUTE * (1 + took_s / 60)
    report.add(
        "quota_error.2_gateways",
        max(0.0, admitted / allowed - 1),
        "ratio",
        f"one run of {took_s:.0f} s, {2 * CLIENTS} clients at two gateways, "
        f"{BUDGET_PER_MINUTE:.0f} tokens a minute: {admitted} tokens of {allowed:.0f} that may be "
        "admitted",
    )


async def _flood(url: str, key: str, end: float) -> int:
    """How many of one client's requests were admitted."""
    upstream = HttpUpstream(url, "gateway", Limits())
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    body = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
    admitted = 0
    try:
        while time.perf_counter() < end:
            async with upstream.post(CHAT, headers, json.dumps(body).encode()) as response:
                await response.read(1 << 20)
                if response.status == 200:
                    admitted += 1
                elif response.status == 429:
                    await asyncio.sleep(_PAUSE_S)
                else:
                    raise RuntimeError(f"the gateway answered {response.status}")
    finally:
        await upstream.close()
    return admitted


@asynccontextmanager
async def _gateways(
    report: Report, directory: Path, engine: str, sections: dict[str, Any], key: str = ""
) -> AsyncIterator[dict[str, str]]:
    """Gateways with these sections over the least there has to be; their URLs by name.

    `key`: for the question whether they are up.
    """
    core = max(os.sched_getaffinity(0))

    def command(name: str, port: int) -> list[str]:
        return gateway_routers.ours(directory, port, engine, sections[name], name)

    commands = {name: partial(command, name) for name in sections}
    async with gateway_routers.running(commands, directory, core, report.say, key) as routers:
        if len(routers) != len(sections):
            raise RuntimeError("not all gateways came up")
        yield {name: router.url for name, router in routers.items()}
