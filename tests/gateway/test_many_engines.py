"""Several decode engines behind one gateway: which one, and what happens when one cannot."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import pytest

from gateway.app import Gateway
from gateway.breaker import FAILURES, BreakerState
from gateway.outliers import SAMPLES
from policies.registry import make_policy
from prfaas.errors import Overloaded, PrfaasError
from prfaas.hashing import block_chain
from prfaas.snapshot import Outcome
from prfaas.testing.gateway_setup import (
    BLOCK_TOKENS,
    INSTANCE,
    MODEL,
    PEER,
    PLACE,
    ByteTokenizer,
    completion,
    d_engine,
    gateway_settings,
    link,
    long_prompt,
    p_engine,
    until,
)
from prfaas.testing.scripted_agent import ScriptedAgent, scripted_agent
from prfaas.testing.scripted_engine import Script, ScriptedEngine, scripted_engine

IDLE = {"queue_tokens": 0, "waiting": 0, "running": 0}


@dataclass(slots=True)
class Fleet:
    """Everything of one test; engines are called `d-0`, `d-1`, ..."""

    gateway: Gateway
    engines: list[ScriptedEngine]
    agents: list[ScriptedAgent]
    p: ScriptedAgent
    client: aiohttp.ClientSession

    async def post(self, body: Any) -> tuple[int, Any, str]:
        """Status, answer and request id."""
        async with self.client.post("/v1/completions", json=body) as response:
            text = await response.text()
            answer = await response.json() if response.content_type == "application/json" else text
            return response.status, answer, response.headers["x-request-id"]

    async def record(self, request_id: str) -> Any:
        async with self.client.get(f"/prfaas/requests/{request_id}") as response:
            return await response.json()

    async def served_by(self, body: Any) -> str:
        status, answer, request_id = await self.post(body)
        assert status == 200, answer
        return str((await self.record(request_id))["engine"])

    def seen(self) -> list[int]:
        return [len(engine.seen) for engine in self.engines]


BYTES = ByteTokenizer()


@pytest.fixture
def make_fleet() -> Callable[..., Any]:
    """`async with make_fleet(count, agents=True, **settings) as fleet`."""

    @asynccontextmanager
    async def make(
        count: int = 2,
        *,
        agents: bool = True,
        info: dict[str, Any] | None = None,
        tokenizer: ByteTokenizer | None = BYTES,
        **settings: Any,
    ) -> AsyncIterator[Fleet]:
        async with AsyncExitStack() as stack:
            engines = [
                await stack.enter_async_context(scripted_engine(MODEL)) for _ in range(count)
            ]
            names = [f"d-{at}" for at in range(count)]
            told = [
                await stack.enter_async_context(
                    scripted_agent(d_engine(name=name, **(info or IDLE)), (link(),))
                )
                for name in (names if agents else [])
            ]
            p = await stack.enter_async_context(scripted_agent(p_engine()))
            chosen = gateway_settings(
                p_watch=p.address,
                engines=tuple(
                    {
                        "name": name,
                        "url": engine.url,
                        "agent": told[at].address if agents else None,
                    }
                    for at, (name, engine) in enumerate(zip(names, engines, strict=True))
                ),
                **settings,
            )
            gateway = Gateway(chosen, make_policy(chosen.gateway.policy), tokenizer)
            await stack.enter_async_context(gateway.running())
            client = await stack.enter_async_context(
                aiohttp.ClientSession(f"http://127.0.0.1:{gateway.port}")
            )
            feeds = gateway.view.feeds.values()
            await until(lambda: all(feed.engine.ready for feed in feeds), "all feeds")
            await until(lambda: all(e.probe.reachable for e in gateway.engines), "the engines")
            yield Fleet(gateway, engines, told, p, client)
            await until(
                lambda: (
                    (
                        gateway.admission.in_flight,
                        len(gateway.view.sent),
                        *(engine.in_flight for engine in gateway.engines),
                    )
                    == (0,) * (2 + count)
                ),
                "everything to be given back",
            )

    return make


async def test_the_engine_with_less_to_do_gets_it(make_fleet: Any) -> None:
    async with make_fleet(policy={"name": "always_local"}) as fleet:
        fleet.agents[0].change(queue_tokens=5000)
        await until(
            lambda: fleet.gateway.view.local("d-0", {}).load.queue_tokens == 5000, "the feed"
        )
        assert {await fleet.served_by(completion()) for _ in range(4)} == {"d-1"}


async def test_a_cached_prefix_draws_its_requests(make_fleet: Any) -> None:
    prompt = long_prompt(1600, "cached ")
    async with make_fleet(policy={"name": "always_local"}) as fleet:
        chain = block_chain(list(prompt.encode()), BLOCK_TOKENS)
        for at in (1, 0):
            fleet.agents[at].stored(*chain)
            await until(lambda n=f"d-{at}": fleet.gateway.view.index.blocks(n) == 100, "the index")
            engines = {await fleet.served_by(completion(prompt)) for _ in range(3)}
            assert engines <= {"d-0", "d-1"}
            if at == 1:
                assert engines == {"d-1"}


@pytest.mark.parametrize("agents", [True, False])
async def test_a_burst_that_shares_a_prefix_meets_at_one_engine(
    make_fleet: Any, agents: bool
) -> None:
    """Before any of it is computed, and also where engines tell nothing of their caches."""
    shared = long_prompt(1920, "the same system prompt ")
    async with make_fleet(3, agents=agents, policy={"name": "always_local"}) as fleet:
        for engine in fleet.engines:
            engine.script = Script(first_delay_s=0.05)
        burst = [fleet.post(completion(f"{shared}{at}" + "y" * 64)) for at in range(4)]
        answers = await asyncio.gather(*burst)
        assert {status for status, _, _ in answers} == {200}
        assert sorted(fleet.seen()) == [0, 0, 4]


async def test_different_prompts_spread(make_fleet: Any) -> None:
    async with make_fleet(3, policy={"name": "always_local"}) as fleet:
        for engine in fleet.engines:
            engine.script = Script(first_delay_s=0.05)
        burst = [fleet.post(completion(long_prompt(1000, f"{at} "))) for at in range(12)]
        await asyncio.gather(*burst)
        assert min(fleet.seen()) >= 3


@pytest.mark.parametrize("stream", [True, False])
async def test_an_engine_that_refuses_is_passed_over(make_fleet: Any, stream: bool) -> None:
    async with make_fleet(policy={"name": "always_local"}) as fleet:
        fleet.engines[0].script = Script(error=Overloaded("full", retry_after_s=1.0))
        for at in range(6):
            body = completion(long_prompt(500, f"{at} "), stream=stream)
            status, _, request_id = await fleet.post(body)
            assert status == 200
            assert (await fleet.record(request_id))["engine"] == "d-1"
        assert fleet.gateway.engines.breakers.engines["d-0"].opened == 0, "a refusal is honest"


async def test_an_engine_that_breaks_off_before_its_first_event_costs_nothing(
    make_fleet: Any,
) -> None:
    async with make_fleet(policy={"name": "always_local"}) as fleet:
        fleet.engines[0].script = Script(stop_after=0, then="cut")
        breaker = fleet.gateway.engines.breakers.engines["d-0"]
        tried = []
        for at in range(60):
            if breaker.state is BreakerState.OPEN:
                break
            status, answer, request_id = await fleet.post(
                completion(long_prompt(500, f"{at} "), stream=True)
            )
            assert status == 200
            assert answer.endswith("data: [DONE]\n\n")
            tried.append((await fleet.record(request_id))["tried"])
        assert tried.count(["d-0", "d-1"]) == FAILURES == fleet.seen()[0]
        assert await fleet.served_by(completion(stream=True)) == "d-1", "it is left alone"


async def test_what_has_begun_is_never_begun_again(make_fleet: Any) -> None:
    async with make_fleet(policy={"name": "always_local"}) as fleet:
        for engine in fleet.engines:
            engine.script = Script(stop_after=2, then="cut")
        status, answer, _ = await fleet.post(completion(stream=True))
        assert status == 200
        assert '"type":"engine_unavailable"' in answer
        assert sum(fleet.seen()) == 1


async def test_when_all_fail_the_last_one_says_why(make_fleet: Any) -> None:
    async with make_fleet(3, policy={"name": "always_local"}) as fleet:
        for engine in fleet.engines:
            engine.script = Script(error=Overloaded("full up", retry_after_s=7.0))
        status, answer, request_id = await fleet.post(completion())
        assert (status, answer["error"]["message"]) == (503, "full up")
        assert len((await fleet.record(request_id))["tried"]) == 2, "limits.engine_attempts"


async def test_an_honest_refusal_is_not_hidden_by_an_engine_that_is_away(make_fleet: Any) -> None:
    async with make_fleet(2, agents=False) as fleet:
        fleet.engines[0].script = Script(error=Overloaded("full for now", retry_after_s=7.0))
        fleet.engines[1].script = Script(stop_after=0, then="cut")
        for _ in range(6):  # whichever comes first
            body = completion(long_prompt(20), stream=True)
            async with fleet.client.post("/v1/completions", json=body) as response:
                assert response.status == 503
                assert response.headers["retry-after"] == "7"
                assert "full for now" in await response.text()


async def test_a_bad_request_is_not_tried_elsewhere(make_fleet: Any) -> None:
    async with make_fleet(policy={"name": "always_local"}) as fleet:
        for engine in fleet.engines:
            engine.script = Script(error=PrfaasError("a bug"))
        status, _, _ = await fleet.post(completion())
        assert status == 500
        assert sum(fleet.seen()) == 1


async def test_a_broken_engine_is_tried_again_and_comes_back_slowly(make_fleet: Any) -> None:
    async with make_fleet(policy={"name": "always_local"}) as fleet:
        fleet.engines[0].script = Script(stop_after=0, then="cut")
        breaker = fleet.gateway.engines.breakers.engines["d-0"]
        at = 0
        while breaker.state is BreakerState.CLOSED:
            at += 1
            await fleet.served_by(completion(long_prompt(500, f"{at} "), stream=True))
        fleet.engines[0].script = Script()
        await until(lambda: breaker.state is BreakerState.TRIAL, "its time to be over")
        while breaker.state is not BreakerState.CLOSED:
            at += 1
            assert at < 200
            await fleet.served_by(completion(long_prompt(500, f"{at} "), stream=True))
        engine = fleet.gateway.engines["d-0"]
        with engine.serving, engine.serving, engine.serving, engine.serving:
            assert not engine.has_room
            assert not fleet.gateway.engines.usable(engine)


async def test_a_draining_engine_gets_nothing_new(make_fleet: Any) -> None:
    async with make_fleet(policy={"name": "always_local"}) as fleet:
        fleet.agents[1].change(draining=True)
        await until(lambda: fleet.gateway.view.local("d-1", {}).load.draining, "the feed")
        for at in range(6):
            assert await fleet.served_by(completion(long_prompt(500, f"{at} "))) == "d-0"


async def test_an_engine_that_is_gone_is_seen_and_others_serve(make_fleet: Any) -> None:
    async with make_fleet(policy={"name": "always_local"}) as fleet:
        fleet.engines[0].healthy = False
        recent = fleet.gateway.engines.recent
        recent.sent("d-0", [b"block"])
        await until(lambda: not fleet.gateway.engines["d-0"].probe.reachable, "the probe to fail")
        assert recent.blocks("d-0") == 0, "whatever comes back has nothing cached"
        engines = {await fleet.served_by(completion(long_prompt(500, f"{at} "))) for at in range(4)}
        assert engines == {"d-1"}
        async with fleet.client.get("/ready") as response:
            assert response.status == 200


async def test_an_offloaded_request_goes_on_elsewhere_with_a_plan_of_its_own(
    make_fleet: Any,
) -> None:
    async with make_fleet(policy={"name": "always_remote"}) as fleet:
        fleet.engines[0].script = Script(stop_after=0, then="cut")
        transfers: list[list[str]] = []
        for at in range(8):
            status, _, request_id = await fleet.post(
                completion(long_prompt(900, f"{at} "), stream=True)
            )
            assert status == 200
            record = await fleet.record(request_id)
            if record["tried"] == ["d-0", "d-1"]:
                ids = [
                    seen.body["kv_transfer_params"]["transfer_id"]
                    for engine in fleet.engines
                    for seen in engine.seen[-1:]
                ]
                transfers.append(ids)
                assert record["transfer_id"] == ids[1]
        assert transfers
        assert all(first != second for first, second in transfers)


async def test_failed_prefills_close_a_peer_to_new_requests(make_fleet: Any) -> None:
    async with make_fleet(1, policy={"name": "always_remote"}) as fleet:
        outcomes = fleet.gateway.generation.outcomes
        for _ in range(FAILURES):
            _, _, request_id = await fleet.post(completion())
            transfer_id = (await fleet.record(request_id))["transfer_id"]
            fleet.agents[0].outcome(
                Outcome(
                    transfer_id, "local", "prefill_timeout_first_frame", PEER, INSTANCE,
                    tried=(PLACE,),
                )
            )  # fmt: skip
            await until(lambda t=transfer_id: not outcomes.awaits(t), "it")
        _, _, request_id = await fleet.post(completion())
        record = await fleet.record(request_id)
        assert (record["decision"]["reason"], record["transfer_id"]) == ("no_peer", None)
        async with fleet.client.get("/prfaas/cluster") as response:
            cluster = await response.json()
        assert [(b["what"], b["name"], b["state"]) for b in cluster["breakers"]] == [
            ("instance", PLACE, "open")
        ]
        assert [each["local"]["name"] for each in cluster["engines"]] == ["d-0"]
        async with fleet.client.get("/metrics") as response:
            text = await response.text()
        assert 'prfaas_gateway_breaker_open{name="p/p-0",what="instance"} 1.0' in text


async def test_each_engine_has_its_own_link_to_a_peer(make_fleet: Any) -> None:
    async with make_fleet(2) as fleet:
        fleet.agents[1].change_link(goodput_bytes_per_s=1e6)
        view = fleet.gateway.view
        await until(
            lambda: view.snapshot("d-1", {}).remotes[0].link.goodput_bytes_per_s == 1e6, "the feed"
        )
        assert view.snapshot("d-0", {}).remotes[0].link.goodput_bytes_per_s == 50e6
        record = replace(view.snapshot("d-0", {}).local, name="x")
        assert record.offload_ready


async def test_an_engine_whose_tokens_are_much_slower_gets_no_more_requests(
    make_fleet: Any,
) -> None:
    async with make_fleet(3) as fleet:
        engines = fleet.gateway.engines
        for _ in range(SAMPLES):
            for name, gap_s in (("d-0", 0.02), ("d-1", 0.02), ("d-2", 0.2)):
                engines.paced(engines[name], gap_s)
        assert engines.outliers.out("d-2")
        for at in range(12):
            await fleet.post(completion(f"{at} " * 200))
        assert not fleet.engines[2].seen
        assert all(engine.seen for engine in fleet.engines[:2])


async def test_texts_that_begin_alike_meet_at_one_engine_without_a_tokenizer(
    make_fleet: Any,
) -> None:
    async with make_fleet(3, agents=False, tokenizer=None) as fleet:
        for at in range(4):
            for who in ("ann", "bob", "eve"):
                text = f"{who} says: " + f"{who} " * 800 + "and more " * at
                await fleet.post({"model": MODEL, "prompt": text, "max_tokens": 2})
        places: dict[str, set[int]] = {}
        for at, engine in enumerate(fleet.engines):
            for seen in engine.seen:
                places.setdefault(seen.body["prompt"][:3], set()).add(at)
        assert [len(places[who]) for who in ("ann", "bob", "eve")] == [1, 1, 1]
