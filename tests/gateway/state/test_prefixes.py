"""Gateways that tell each other what they sent where, over a store that comes and goes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import redis.asyncio
from prometheus_client import CollectorRegistry

from gateway.app import Gateway
from gateway.cluster_view import ClusterView
from gateway.shared_prefixes import SharedPrefixes
from gateway.state.memory import MemoryStore
from gateway.state.metrics import StateMetrics
from gateway.state.starting import prefixes_of
from gateway.state.sync import StateSync
from policies.registry import make_policy
from prfaas.cluster_state import PREFIX_BATCHES, PrefixDelta, Report, Shared
from prfaas.errors import StateUnavailable
from prfaas.settings import StateSettings
from prfaas.testing.clock import ManualClock
from prfaas.testing.gateway_setup import ENGINE, MODEL, ByteTokenizer, gateway_settings, until
from prfaas.testing.redis_server import WHY_SKIPPED, RedisServer, found, redis_server
from prfaas.testing.scripted_engine import ScriptedEngine, scripted_engine
from prfaas.testing.state_contract import Gateway as Teller

NAMES = [bytes([at]) * 8 for at in range(1, 9)]
SECRET = "a secret of all gateways"


class LossyStore(MemoryStore):
    """Takes reports and is not heard, while it is `mute`."""

    mute = False

    async def exchange(self, report: Report) -> Shared:
        answer = await super().exchange(report)
        if self.mute:
            raise StateUnavailable("Redis did not answer within 0.5 s")
        return answer


class Member:
    """The parts of a gateway that take part."""

    def __init__(self, store: LossyStore, clock: ManualClock) -> None:
        settings = gateway_settings()
        view = ClusterView(settings.gateway, settings.limits, clock)
        self.prefixes = SharedPrefixes(SECRET.encode(), clock)
        self.registry = CollectorRegistry()
        metrics = StateMetrics(self.registry)
        self.sync = StateSync(
            StateSettings(), store, view, None, tuple, None, metrics, clock, self.prefixes
        )

    def value(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"prfaas_gateway_state_{name}_total", labels) or 0

    @property
    def matched(self) -> int:
        return self.prefixes.match(ENGINE, NAMES)


@pytest.fixture
def store() -> LossyStore:
    return LossyStore(ManualClock())


@pytest.fixture
def two(store: LossyStore) -> list[Member]:
    clock = ManualClock()
    return [Member(store, clock) for _ in range(2)]


async def exchange(members: list[Member]) -> None:
    for member in members:
        await member.sync.exchange()


async def test_what_one_sent_the_other_knows_after_an_exchange(two: list[Member]) -> None:
    one, other = two
    one.prefixes.sent(ENGINE, NAMES)
    await exchange(two)
    assert (one.matched, other.matched) == (0, len(NAMES))
    assert one.value("prefix_names", direction="told") == len(NAMES)
    assert other.value("prefix_names", direction="heard") == len(NAMES)
    one.prefixes.cleared(ENGINE)
    await exchange(two)
    assert other.matched == 0


async def test_an_answer_that_is_lost_changes_nothing(two: list[Member], store: LossyStore) -> None:
    one, other = two
    await exchange(two)
    store.mute = True
    one.prefixes.sent(ENGINE, NAMES)
    await exchange(two)
    assert other.matched == 0
    store.mute = False
    await exchange(two)
    assert other.matched == len(NAMES)
    assert one.value("prefix_names", direction="told") == len(NAMES)


async def test_who_missed_some_forgets_what_it_heard(two: list[Member], store: LossyStore) -> None:
    one, other = two
    one.prefixes.sent(ENGINE, NAMES)
    await exchange(two)
    third = Teller(store, "third")
    for _ in range(PREFIX_BATCHES + 1):
        await third.tell(prefixes=(PrefixDelta(ENGINE, b"another."),))
    assert other.matched == len(NAMES)
    await exchange([other])
    assert other.matched == 0
    assert other.value("prefix_resets") == 1


async def test_a_store_that_forgot_is_told_again(two: list[Member], store: LossyStore) -> None:
    one, other = two
    one.prefixes.sent(ENGINE, NAMES)
    await exchange(two)
    store.forget()
    await exchange([other])
    assert other.matched == 0, "what was lost with it may have been that the engine lost all"
    await exchange([one, one, other])
    assert other.matched == len(NAMES)
    assert other.value("prefix_resets") == 1


@pytest.mark.parametrize(
    ("secret", "state", "shares"),
    [
        (SECRET, {"redis": "redis://h"}, True),
        ("", {"redis": "redis://h"}, False),
        (SECRET, {}, False),
        (SECRET, {"redis": "redis://h", "share_prefixes": False}, False),
    ],
)
def test_prefixes_are_shared_where_they_can_be(
    secret: str, state: dict[str, Any], shares: bool
) -> None:
    settings = gateway_settings(cache_secret=secret, state=state).gateway
    assert (prefixes_of(settings, ManualClock()) is not None) is shares


# --- two gateways before the same engines, with a real Redis ---


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[RedisServer]:
    if not found():
        pytest.skip(WHY_SKIPPED)
    async with redis_server(tmp_path) as running:
        yield running


@pytest.fixture
async def engines() -> AsyncIterator[list[ScriptedEngine]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(scripted_engine(MODEL)) for _ in range(4)]


async def started(
    stack: AsyncExitStack, server: RedisServer, engines: list[ScriptedEngine], tokenizer: Any
) -> tuple[Gateway, aiohttp.ClientSession]:
    chosen = gateway_settings(
        engines=tuple(
            {"name": f"d-{at}", "url": engine.url, "agent": None}
            for at, engine in enumerate(engines)
        ),
        peers=(),
        cache_secret=SECRET,
        short_body_bytes=0,
        state={"redis": server.url(), "interval_s": 0.02, "timeout_s": 10.0},
    )
    gateway = Gateway(chosen, make_policy(chosen.gateway.policy), tokenizer)
    await stack.enter_async_context(gateway.running())
    url = f"http://127.0.0.1:{gateway.port}"
    client = await stack.enter_async_context(aiohttp.ClientSession(url))
    await until(lambda: all(engine.probe.reachable for engine in gateway.engines), "engines")
    return gateway, client


async def engine_of(client: aiohttp.ClientSession, prompt: str) -> str:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
    async with client.post("/v1/completions", json=body) as response:
        assert response.status == 200
        request_id = response.headers["x-request-id"]
    async with client.get(f"/prfaas/requests/{request_id}") as response:
        return str((await response.json())["engine"])


@pytest.mark.parametrize("tokenizer", [None, ByteTokenizer()], ids=["texts", "tokens"])
async def test_what_shares_a_prefix_meets_at_one_engine_whichever_gateway_it_comes_by(
    server: RedisServer, engines: list[ScriptedEngine], tokenizer: Any
) -> None:
    async with AsyncExitStack() as stack:
        one, by_one = await started(stack, server, engines, tokenizer)
        other, by_other = await started(stack, server, engines, tokenizer)
        await until(lambda: one.state is not None and one.state.shares == 2, "both")
        prompts = [f"{number} secret words " + "and some more " * 500 for number in range(8)]
        took = [await engine_of(by_one, prompt) for prompt in prompts]
        assert len(set(took)) > 1, "or they would meet in any case"

        def hears_all() -> bool:
            told, heard = one.engines._shared, other.engines._shared
            assert told is not None
            assert heard is not None
            names = [f"d-{at}" for at in range(len(engines))]
            return [told._own.blocks(name) for name in names] == [
                heard.blocks(name) for name in names
            ]

        await until(hears_all, "what it heard", timeout_s=30)
        assert [await engine_of(by_other, f"{prompt} and then?") for prompt in prompts] == took

        store = redis.asyncio.Redis.from_url(server.url())
        kept = b"".join(await store.zrange("{prfaas}:prefixes", 0, -1))
        await store.aclose()
        assert took[0].encode() in kept
        assert b"secret" not in kept

        await server.stop()
        await until(lambda: not (one.state and one.state.up), "that it is gone", timeout_s=30)
        late = "told when it is back " * 400
        place = await engine_of(by_one, late)
        await server.start()
        await until(hears_all, "what was sent meanwhile", timeout_s=30)
        assert await engine_of(by_other, late) == place
