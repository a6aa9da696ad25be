"""Two gateways on real sockets that meet in a real Redis, and go on without it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from gateway.app import Gateway
from policies.registry import make_policy
from prfaas.errors import ConfigError
from prfaas.settings import PolicySettings
from prfaas.testing.gateway_setup import gateway_settings, until
from prfaas.testing.redis_server import WHY_SKIPPED, RedisServer, found, redis_server
from prfaas.testing.tenant_files import TenantFixture
from prfaas.testing.waiting import eventually

pytestmark = pytest.mark.skipif(not found(), reason=WHY_SKIPPED)

SHORT = {"model": "tiny", "prompt": "hello", "max_tokens": 4}
PASSWORD = "a-password-that-nobody-prints"
ACL = (f"user default on >{PASSWORD} ~* +@all",)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[RedisServer]:
    folder = tmp_path / "redis"
    folder.mkdir()
    async with redis_server(folder, acl=ACL) as running:
        yield running


@pytest.fixture
def file(tmp_path: Path) -> TenantFixture:
    made = TenantFixture(tmp_path / "tenants.yaml")
    made.put("acme")
    made.put("boss", admin=True)
    return made


@pytest.fixture
async def two(
    make_cluster: Callable[..., Any], server: RedisServer, file: TenantFixture
) -> AsyncIterator[Callable[..., Any]]:
    """Starts two gateways, each with an engine of its own."""
    async with AsyncExitStack() as stack:

        async def start(**fields: Any) -> list[Any]:
            state = {
                "redis": server.url("default", PASSWORD),
                "interval_s": 0.02,
                "timeout_s": 5.0,
                **fields.pop("state", {}),
            }
            made = [
                await stack.enter_async_context(
                    make_cluster(tenants={"file": file.path}, state=state, **fields)
                )
                for _ in range(2)
            ]
            await until(lambda: all(each.gateway.state.shares == 2 for each in made), "both")
            return made

        yield start


async def test_one_budget_for_both_also_where_redis_is_gone_for_a_while(
    two: Callable[..., Any],
    server: RedisServer,
    file: TenantFixture,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.DEBUG)
    file.put("few", requests_per_minute=10)
    made = await two(state={"timeout_s": 0.2})
    began = time.monotonic()

    async def asked(count: int) -> list[int]:
        return [(await made[at % 2].post(SHORT, **file.bearer("few")))[0] for at in range(count)]

    served = 0

    def within_the_budget() -> bool:
        return served <= 10 + (time.monotonic() - began) * 10 / 60 + 2

    async def used_up() -> bool:
        nonlocal served
        statuses = await asked(2)
        served += statuses.count(200)
        return statuses == [429, 429]

    await eventually(used_up, within_s=30)
    # Each has half of what is left, and what is left of less than two requests is nobody's.
    assert served >= 8
    assert within_the_budget()

    await server.stop()
    up = "prfaas_gateway_state_up"
    for each in made:

        async def down(each: Any = each) -> bool:
            return await each.metric(up) == 0

        await eventually(down, within_s=30)
        status, _, _ = await each.post(SHORT, **file.bearer("acme"))
        assert status == 200
        async with each.client.get("/ready") as response:
            assert response.status == 200
    served += (await asked(4)).count(200)
    assert within_the_budget(), "what was known to be used up is still"

    await server.start()
    for each in made:

        async def up_again(each: Any = each) -> bool:
            return await each.metric(up) == 1

        await eventually(up_again, within_s=30)
        heard = each.gateway.view.neighbours
        await until(lambda heard=heard: heard.members, "the other one", timeout_s=30)
    assert await made[0].metric("prfaas_gateway_state_losses_total") >= 1
    served += (await asked(4)).count(200)
    assert within_the_budget(), "and Redis was told"
    texts = [caplog.text, "".join(capfd.readouterr())]
    for each in made:
        for path in ("/metrics", "/prfaas/cluster", "/prfaas/requests"):
            async with each.client.get(path, headers=file.bearer("boss")) as response:
                texts.append(await response.text())
                if path == "/prfaas/cluster":
                    other = made[1 - made.index(each)].gateway.state.address
                    assert other in texts[-1]
    assert "the shared state is away (Redis: ConnectionError" in caplog.text
    assert [text for text in texts if PASSWORD in text] == []


async def test_a_redis_that_hangs_delays_nobody(
    two: Callable[..., Any], server: RedisServer, file: TenantFixture
) -> None:
    made = await two()
    server.freeze()
    try:
        for each in made * 3:
            # No answer of Redis comes for as long as it is frozen: these need none.
            status, _, _ = await each.post(SHORT, **file.bearer("acme"))
            assert status == 200
        assert made[0].gateway.state.up, "it is not even known yet that it hangs"
    finally:
        server.thaw()


async def test_a_policy_that_changes_at_one_is_taken_over_by_the_other(
    make_cluster: Callable[..., Any], server: RedisServer, tmp_path: Path
) -> None:
    files = [tmp_path / "one.yaml", tmp_path / "other.yaml"]
    for policy in files:
        policy.write_text("policy_version: 1\npolicy: always_local\n")
    state = {"redis": server.url("default", PASSWORD), "interval_s": 0.02, "share_policy": True}
    async with AsyncExitStack() as stack:
        one, other = [
            await stack.enter_async_context(make_cluster(policy={"file": policy}, state=state))
            for policy in files
        ]
        await until(lambda: one.gateway.state.shares == 2, "both")
        files[0].write_text("policy_version: 1\npolicy: always_remote\n")
        await one.gateway.policy.look()

        def taken_over() -> bool:
            return other.gateway.policy.running("active").policy.name == "always_remote"

        await until(taken_over, "the policy", timeout_s=30)
        assert one.gateway.policy.running("active").version == 2
        name = "prfaas_gateway_policy_changes_total"
        assert await other.metric(name, role="active", result="loaded") == 1


async def test_a_gateway_alone_starts_and_stops_without_its_redis(
    make_cluster: Callable[..., Any], file: TenantFixture
) -> None:
    state = {"redis": "redis://127.0.0.1:1/0", "interval_s": 0.01, "timeout_s": 0.5}
    async with make_cluster(tenants={"file": file.path}, state=state) as cluster:
        assert (await cluster.post(SHORT, **file.bearer("acme")))[0] == 200

        async def noticed() -> bool:
            name = "prfaas_gateway_state_exchanges_total"
            return await cluster.metric(name, result="failed") >= 3

        await eventually(noticed, within_s=30)
        assert await cluster.metric("prfaas_gateway_state_up") == 0
        assert await cluster.metric("prfaas_gateway_state_gateways") == 2


def test_a_url_that_is_none_stops_the_start() -> None:
    chosen = gateway_settings(state={"redis": "nonsense"})
    with pytest.raises(ConfigError, match=r"gateway\.state\.redis"):
        Gateway(chosen, make_policy(PolicySettings()), None)


async def test_gateways_without_tenants_share_loads_all_the_same(
    make_cluster: Callable[..., Any], server: RedisServer
) -> None:
    state = {"redis": server.url("default", PASSWORD), "interval_s": 0.02}
    async with make_cluster(state=state) as one, make_cluster(state=state) as other:
        one.gateway.view.sent.add_local("r1", "d-0", 500, 0.0)
        seen = other.gateway.view
        await until(lambda: seen.local("d-0", {}).load.sent_tokens == 500, "its load")
        one.gateway.view.sent.finish("r1")
        await until(lambda: seen.local("d-0", {}).load.sent_tokens == 0, "that it is over")
        await asyncio.sleep(0)
