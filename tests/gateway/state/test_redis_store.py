"""The store in Redis keeps the contract, and says what is wrong where Redis is not as it should."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio

from gateway.state.redis_store import RedisStore
from prfaas.cluster_state import ClusterStore, Member, Report, Sent
from prfaas.errors import ConfigError, StateUnavailable
from prfaas.settings import StateSettings
from prfaas.testing.pki import Pki
from prfaas.testing.redis_server import WHY_SKIPPED, RedisServer, found, redis_server
from prfaas.testing.state_contract import ClusterStateContract, Gateway, spend
from prfaas.testing.waiting import eventually

needs_redis = pytest.mark.skipif(not found(), reason=WHY_SKIPPED)
PASSWORD = "a password that nobody prints"
ACL = (
    "user default off",
    f"user gateway on >{PASSWORD.replace(' ', '-')} ~{{prfaas}}:* -@all +@connection +eval "
    "+evalsha +script|load +time +zadd +zrem +zrangebyscore +hget +hset +hdel +hvals +hincrby "
    "+pexpire &{prfaas}:* +publish +subscribe +unsubscribe",
    f"user silent on >{PASSWORD.replace(' ', '-')} resetchannels ~{{prfaas}}:* -@all +@connection "
    "+eval +evalsha +script|load +time +zadd +zrem +zrangebyscore +hget +hset +hdel +hvals "
    "+hincrby +pexpire",
    f"user reader on >{PASSWORD.replace(' ', '-')} ~* -@all +@connection +get",
)


def store_of(url: str, **fields: Any) -> RedisStore:
    return RedisStore(StateSettings(redis=url, **{"timeout_s": 10.0, **fields}))


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[RedisServer]:
    async with redis_server(tmp_path) as running:
        yield running


@needs_redis
class TestRedisStore(ClusterStateContract):
    """Against a real server."""

    @pytest.fixture
    async def store(self, server: RedisServer) -> AsyncIterator[ClusterStore]:
        store = store_of(server.url())
        yield store
        await store.close()

    async def forget(self, store: ClusterStore) -> None:
        assert isinstance(store, RedisStore)
        client: redis.asyncio.Redis = store._client
        await client.flushall()
        await client.script_flush()


@needs_redis
async def test_prefixes_are_apart(server: RedisServer) -> None:
    one, other = store_of(server.url(), prefix="one"), store_of(server.url(), prefix="other")
    await Gateway(one, "a").tell(spend(5))
    heard = await Gateway(other, "b").tell()
    assert ([member.id for member in heard.members], heard.levels) == (["b"], {})
    await one.close()
    await other.close()


@needs_redis
async def test_a_server_that_was_restarted_is_found_again(server: RedisServer) -> None:
    store = store_of(server.url())
    gateway = Gateway(store, "a")
    before = await gateway.tell(spend(5))
    await server.stop()
    with pytest.raises(StateUnavailable, match="Redis: ConnectionError"):
        await gateway.tell()
    await server.start()
    assert (await gateway.tell()).epoch != before.epoch
    await store.close()


@needs_redis
async def test_a_server_that_says_nothing_is_given_up_in_time(server: RedisServer) -> None:
    store = store_of(server.url(), timeout_s=0.1)
    await Gateway(store, "a").tell()
    server.freeze()
    try:
        with pytest.raises(StateUnavailable, match=r"did not answer|Timeout"):
            await Gateway(store, "a").tell()
    finally:
        server.thaw()
    await store.close()


@needs_redis
async def test_who_can_hear_no_more_is_told(server: RedisServer) -> None:
    store = store_of(server.url(), timeout_s=0.3)
    client = redis.asyncio.Redis.from_url(server.url())
    heard: list[Sent] = []

    async def hearing() -> asyncio.Task[None]:
        task = asyncio.create_task(store.hear_sent(heard.append))
        before = len(heard)

        async def begun() -> bool:
            await store.tell_sent(Sent("a", 1))
            return len(heard) > before

        await eventually(begun)
        return task

    task = await hearing()
    await client.publish("{prfaas}:sent", b"\xc1 of another version")
    await store.tell_sent(Sent("a", 2))
    await eventually(lambda: heard[-1] == Sent("a", 2))
    await client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
    with pytest.raises(StateUnavailable, match="Redis: ConnectionError"):
        await asyncio.wait_for(task, 20)

    task = await hearing()
    store._channel = "{prfaas}:where-nobody-hears"
    await store.tell_sent(Sent("a", 3))
    with pytest.raises(StateUnavailable, match="nothing comes of what is told"):
        await asyncio.wait_for(task, 20)
    await client.aclose()
    await store.close()


@needs_redis
async def test_what_others_wrote_there_is_no_gateway_and_no_crash(server: RedisServer) -> None:
    store = store_of(server.url())
    client = redis.asyncio.Redis.from_url(server.url())
    await Gateway(store, "a").tell()
    await client.zadd("{prfaas}:members", {"odd": 1e18})
    await client.hset("{prfaas}:infos", "odd", "{]")
    heard = await Gateway(store, "b").tell()
    assert len(heard.members) == 3, "what cannot be read takes its share of budgets nevertheless"
    for number, rubbish in enumerate(("text", "1|2|odd|\xc1", "1|2|odd|[", "|||", "9|9|odd|")):
        await client.zadd("{prfaas}:prefixes", {rubbish: 1 + number})
    await client.hset("{prfaas}:meta", "prefixes", 6)
    heard = await Gateway(store, "c").tell()
    assert (heard.prefixes, heard.prefixes_seq) == ((), 6)
    await client.delete("{prfaas}:buckets")
    await client.set("{prfaas}:buckets", "text")
    with pytest.raises(StateUnavailable, match="WRONGTYPE"):
        await Gateway(store, "a").tell(spend(1))
    await client.aclose()
    await store.close()


@needs_redis
async def test_tls_with_a_certificate_and_an_acl_user(tmp_path: Path) -> None:
    pki = Pki(tmp_path / "pki")
    password = PASSWORD.replace(" ", "-")
    ours = pki.settings("gateway")
    folder = tmp_path / "redis"
    folder.mkdir()
    async with redis_server(folder, pki.settings("127.0.0.1"), ACL) as server:
        files = {"redis_ca": ours.ca, "redis_cert": ours.cert, "redis_key": ours.key}
        store = store_of(server.url("gateway", password), **files)
        heard = await Gateway(store, "a").tell(spend(5), publish="policy: one")
        assert [member.id for member in heard.members] == ["a"]
        assert heard.policy is not None
        await store.leave("a")
        heard_sent: list[Sent] = []
        hearing = asyncio.create_task(store.hear_sent(heard_sent.append))

        async def through() -> bool:
            await store.tell_sent(Sent("a", 1))
            return bool(heard_sent)

        await eventually(through)
        hearing.cancel()
        await asyncio.gather(hearing, return_exceptions=True)
        await store.close()

        silent = store_of(server.url("silent", password), **files)
        await Gateway(silent, "b").tell()
        with pytest.raises(StateUnavailable, match=r"Redis: NoPermission"):
            await silent.hear_sent(heard_sent.append)
        with pytest.raises(StateUnavailable, match=r"Redis: NoPermission"):
            await silent.tell_sent(Sent("b", 1))
        await Gateway(silent, "b").tell()
        await silent.close()
        refused = (
            (server.url("gateway", "wrong-password"), files, "WRONGPASS|invalid username"),
            (server.url("reader", password), files, "permission|NoPermission"),
            (server.url(), files, "Authentication|NOAUTH"),
            (server.url("gateway", password), {"redis_ca": ours.ca}, "Redis: ConnectionError"),
            (server.url("gateway", password), {}, "(?i)certificate"),
        )
        for url, chosen, says in refused:
            store = store_of(url, **chosen)
            with pytest.raises(StateUnavailable, match=says) as caught:
                await store.exchange(Report(Member("a"), 1.0))
            for secret in (password, "wrong-password"):
                assert secret not in caught.value.message
            await store.close()


@pytest.mark.parametrize("url", ["", "http://x", "redis", "redis://:secret-word@host:port/0"])
def test_a_url_that_is_none_is_told_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError, match=r"gateway\.state\.redis: not a URL") as caught:
        store_of(url)
    assert "secret-word" not in caught.value.message
    assert "secret-word" not in repr(StateSettings(redis=url))


@needs_redis
async def test_a_primary_that_became_a_replica_is_left(server: RedisServer) -> None:
    store = store_of(server.url())
    client = redis.asyncio.Redis.from_url(server.url())
    gateway = Gateway(store, "a")
    await gateway.tell(spend(1))
    await client.replicaof("127.0.0.1", 1)
    connected = (await client.info("clients"))["connected_clients"]
    with pytest.raises(StateUnavailable, match="ReadOnlyError"):
        await gateway.tell(spend(1))
    assert (await client.info("clients"))["connected_clients"] < connected
    await client.replicaof("NO", "ONE")
    await gateway.tell(spend(1))
    await client.aclose()
    await store.close()
