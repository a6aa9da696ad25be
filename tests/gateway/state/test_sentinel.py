"""With Sentinels gateways find whoever is the primary, and what it knows of budgets."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import redis.asyncio

from gateway.state.redis_client import client_of
from gateway.state.redis_store import RedisStore
from prfaas.errors import ConfigError, StateUnavailable
from prfaas.settings import StateSettings
from prfaas.testing.redis_server import WHY_SKIPPED, RedisServer, found
from prfaas.testing.state_contract import TOKENS, Gateway, spend
from prfaas.testing.waiting import eventually

NAME = "state"
PASSWORD = "a-password-that-nobody-prints"
ACL = (f"user gateway on >{PASSWORD} ~* +@all", "user default on nopass ~* &* +@all")


@pytest.mark.skipif(not found(), reason=WHY_SKIPPED)
async def test_a_primary_that_dies_is_followed_by_its_replica(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:

        async def start(name: str, **how: object) -> RedisServer:
            folder = tmp_path / name
            folder.mkdir()
            server = RedisServer(folder, **how)  # type: ignore[arg-type]
            stack.push_async_callback(server.stop)
            await server.start()
            return server

        primary = await start("primary", acl=ACL)
        replica = await start("replica", acl=ACL, replica_of=primary)
        of_replica = redis.asyncio.Redis.from_url(replica.url())
        stack.push_async_callback(of_replica.aclose)

        async def follows() -> bool:
            return (await of_replica.info("replication"))["master_link_status"] == "up"

        await eventually(follows, within_s=30)
        sentinel = await start("sentinel", sentinel_of=(NAME, primary))
        gone = RedisServer(tmp_path)
        hosts = f"127.0.0.1:{gone.port},127.0.0.1:{sentinel.port}"
        url = f"redis+sentinel://gateway:{PASSWORD}@{hosts}/{NAME}/0"
        store = RedisStore(StateSettings(redis=url, timeout_s=5.0))
        stack.push_async_callback(store.close)
        gateway = Gateway(store, "a")
        before = await gateway.tell(spend(30))

        async def replicated() -> bool:
            return await of_replica.hget("{prfaas}:meta", "epoch") == before.epoch.encode()

        await eventually(replicated, within_s=30)
        of_sentinel = redis.asyncio.Redis.from_url(sentinel.url(), decode_responses=True)
        stack.push_async_callback(of_sentinel.aclose)

        async def watched() -> bool:
            return len(await of_sentinel.sentinel_slaves(NAME)) == 1

        await eventually(watched, within_s=30)

        await primary.stop()
        said: list[str] = []

        async def found_again() -> bool:
            try:
                await gateway.tell(spend(0))
            except StateUnavailable as exc:
                said.append(exc.message)
                return False
            return True

        await eventually(found_again, within_s=60)
        after = gateway.heard
        assert after is not None
        assert said, "it says so while there is none"
        assert [text for text in said if PASSWORD in text] == []
        assert after.epoch == before.epoch
        assert after.levels[TOKENS] == pytest.approx(70, abs=0.1)


@pytest.mark.parametrize(
    "url",
    [
        "redis+sentinel://h:1,h:2",
        "redis+sentinel:///state/0",
        "redis+sentinel://h:none/state",
        "redis+sentinel://h/state/none",
        "redis+sentinel://h/state?db=0",
        "http+sentinel://u:secret-word@h/state",
    ],
)
def test_a_url_of_sentinels_that_is_none_is_told(url: str) -> None:
    with pytest.raises(ConfigError, match=r"gateway\.state\.redis: not a URL") as caught:
        client_of(StateSettings(redis=url))
    assert "secret-word" not in caught.value.message


async def test_what_a_url_of_sentinels_says_is_used(tmp_path: Path) -> None:
    settings = StateSettings(
        redis="rediss+sentinel://me:a%2Fb@one,[::1]:5/state/3",
        redis_ca=tmp_path / "ca.pem",
        redis_sentinel_password="theirs",
        timeout_s=3.0,
    )
    client, close = client_of(settings)
    used = client.connection_pool.connection_kwargs
    assert (used["username"], used["password"], used["db"]) == ("me", "a/b", 3)
    assert (used["ssl_ca_certs"], used["ssl_check_hostname"]) == (str(tmp_path / "ca.pem"), True)
    asked = client.connection_pool.sentinel_manager.sentinels
    found_ = [each.connection_pool.connection_kwargs for each in asked]
    assert [(each["host"], each["port"]) for each in found_] == [("one", 26379), ("::1", 5)]
    assert {(each["password"], each["socket_timeout"]) for each in found_} == {("theirs", 1.0)}
    assert {each["ssl_ca_certs"] for each in found_} == {str(tmp_path / "ca.pem")}
    await close()
