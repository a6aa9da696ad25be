"""What the gateway reads: client bodies, the engine's stream, the agents' telemetry."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from gateway.cluster_view import ClusterView, describe
from gateway.relay import Relayed, WholeAnswer, relay_stream, relay_whole
from gateway.schema import Api, parse, rewrite
from gateway.tokenise import Tokeniser
from policies.registry import POLICIES, make_policy
from prfaas.errors import EngineUnavailable, InvalidRequest, ProtocolError
from prfaas.limits import Limits
from prfaas.rpc.convert_watch import watch_from_pb, watch_to_pb
from prfaas.rpc.v1 import prefill_pb2 as pb
from prfaas.settings import PolicySettings
from prfaas.snapshot import Outcome, RequestFacts, Target
from prfaas.telemetry import KvDelta, WatchUpdate
from prfaas.testing.fuzz import fuzz, mutate_bytes, mutate_json
from prfaas.testing.gateway_setup import (
    ENGINE,
    MODEL,
    PLACE,
    ByteTokenizer,
    d_engine,
    gateway_settings,
    link,
    p_engine,
)

BODIES: dict[Api, dict[str, Any]] = {
    Api.CHAT: {
        "model": MODEL,
        "messages": [
            {"role": "system", "content": "be kind"},
            {"role": "user", "content": [{"type": "text", "text": "hé"}]},
        ],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "max_completion_tokens": 5,
        "n": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
        "cache_salt": "tenant",
        "kv_transfer_params": {"version": 1},
    },
    Api.COMPLETIONS: {
        "model": MODEL,
        "prompt": [[1, 2, 3, 4]],
        "max_tokens": 5,
        "echo": False,
        "best_of": 1,
        "prompt_logprobs": None,
        "add_special_tokens": True,
        "temperature": 0.5,
    },
}


@pytest.mark.parametrize("api", list(Api))
def test_client_bodies(api: Api) -> None:
    """Refused with a 400, or relayed as JSON with our own transfer fields and nobody else's."""
    good = json.dumps(BODIES[api]).encode()
    tokeniser = Tokeniser(ByteTokenizer(), 10_000)

    def make(rng: random.Random) -> bytes:
        kind = rng.random()
        if kind < 0.7:
            # A client's library refuses lone surrogates and NaN; a hostile client sends them.
            return json.dumps(mutate_json(BODIES[api], rng)).encode()
        if kind < 0.75:
            return b'{"messages":' + b"[" * rng.choice((10, 900, 100_000))
        return mutate_bytes(good, [good], rng)

    def run(body: bytes) -> None:
        parsed = parse(api, body)
        prompt = tokeniser._prompt(parsed, frozenset({4, 16}), "salt")
        assert prompt.tokens >= 0
        # Values we do not act on are relayed as they came, even where they are no UTF-8.
        out = rewrite(parsed, {"version": 2}, "ours")
        fields = msgspec.json.decode(out, type=dict[str, msgspec.Raw])
        assert bytes(fields["kv_transfer_params"]) == b'{"version":2}'
        assert bytes(fields["cache_salt"]) == b'"ours"'

    try:
        fuzz(f"body/{api}", run, make, (InvalidRequest,))
    finally:
        tokeniser.close()


# --- the engine's answer ---

LIMITS = Limits(max_event_bytes=5000, max_answer_bytes=20_000)
EVENTS = [
    b'data: {"choices":[{"text":"a"}]}\n\n',
    b": a comment\n\n",
    b'event: x\r\ndata: {"choices":[]}\r\n\r\n',
    b'data: {"error":{"message":"m","type":"overloaded","code":503}}\n\n',
    b'data: {"usage":{"prompt_tokens":3}}\n\n',
    b"data: [DONE]\n\n",
]


@dataclass
class _Answer:
    """An engine's answer in pieces."""

    pieces: list[bytes]
    status: int = 200
    headers: Mapping[str, str] = field(
        default_factory=lambda: {"content-type": "text/event-stream", "retry-after": "1"}
    )

    def __post_init__(self) -> None:
        self._left = [piece for piece in self.pieces if piece]

    @property
    def ended(self) -> bool:
        return not self._left

    async def next_piece(self) -> bytes:
        return self._left.pop(0) if self._left else b""

    async def follow(self, taker: Callable[[bytes], bool]) -> None:
        while self._left and not taker(self._left.pop(0)):
            pass

    async def read(self, limit_bytes: int) -> bytes:
        return b"".join(self.pieces)


class _Client:
    """Takes everything; `complete` as it was told at the end."""

    def __init__(self) -> None:
        self.started = False
        self.got = b""
        self.complete: bool | None = None

    async def start(self, headers: Mapping[str, str]) -> None:
        self.started = True

    def put(self, data: bytes, last: bool = False) -> bool:
        assert self.started
        assert self.complete is None
        self.got += data
        return False

    async def drain(self) -> None:
        raise AssertionError("nobody asked for it")

    async def end(self, complete: bool) -> None:
        self.complete = complete


def engine_answer(rng: random.Random) -> _Answer:
    stream = b"".join(rng.choice(EVENTS) for _ in range(rng.randrange(6))) + EVENTS[-1]
    if rng.random() < 0.7:
        stream = mutate_bytes(stream, EVENTS, rng)
    cuts = sorted(rng.randrange(len(stream) + 1) for _ in range(rng.randrange(5)))
    ends = [*cuts, len(stream)]
    pieces = [stream[a:b] for a, b in zip([0, *cuts], ends, strict=True)]
    return _Answer(pieces, rng.choice((200, 200, 200, 400, 503)))


def test_streams_of_an_engine() -> None:
    """What reaches a client is what the engine said, and only a stream with [DONE] is complete."""
    loop = asyncio.new_event_loop()

    async def relay(answer: _Answer) -> None:
        client = _Client()
        result = await relay_stream(answer, client, LIMITS, {}, lambda count: None, lambda: None)
        if isinstance(result, WholeAnswer):
            assert not client.started
            assert 400 <= result.status <= 599
            return
        assert client.complete is (result.broken == "")
        said = b"".join(answer.pieces)
        if client.complete:
            assert b"[DONE]" in client.got
        if result == Relayed() or result.broken == "engine_error_event":
            assert said.startswith(client.got)

    try:
        fuzz(
            "sse",
            lambda answer: loop.run_until_complete(relay(answer)),
            engine_answer,
            (EngineUnavailable, ProtocolError),
        )
    finally:
        loop.close()


def test_whole_answers_of_an_engine() -> None:
    """An error always reaches the client in OpenAI's shape, whatever the engine's body is."""
    loop = asyncio.new_event_loop()
    bodies = [b'{"error":{"message":"m"}}', b"<html>502</html>", b'{"choices":[]}', b"[" * 2000]

    async def relay(answer: _Answer) -> None:
        whole = await relay_whole(answer, LIMITS)
        assert whole.status == answer.status
        if whole.status >= 400:
            assert isinstance(json.loads(whole.body)["error"], dict)

    def make(rng: random.Random) -> _Answer:
        body = rng.choice(bodies)
        if rng.random() < 0.7:
            body = mutate_bytes(body, bodies, rng)
        return _Answer([body], rng.choice((200, 400, 500, 503)))

    try:
        fuzz_all(lambda answer: loop.run_until_complete(relay(answer)), make)
    finally:
        loop.close()


def fuzz_all(target: Any, make: Any) -> None:
    """Nothing may be refused: every input has an answer."""

    def run(value: Any) -> None:
        target(value)
        if next(turn) % 2:
            raise InvalidRequest("half of them count as refused, for the fuzzer's own check")

    turn = iter(range(1 << 60))
    fuzz("whole answers", run, make, (InvalidRequest,))


# --- telemetry ---

OUTCOME = Outcome("t1", "staged", raw_bytes=100, wire_bytes=70, phases={"import": 0.1})
UPDATES = [
    watch_to_pb(update).SerializeToString()
    for update in (
        WatchUpdate(
            1, True, "d", (d_engine(),), (KvDelta(ENGINE, "d1", True, (b"0" * 16,)),), (link(),),
            (OUTCOME,), ("t1",),
        ),
        WatchUpdate(2, False, "p", (p_engine(),), (KvDelta("p-0", "p1", True, (b"1" * 16,)),)),
        WatchUpdate(3, False, links=(link(ready=False, detail="down"),)),
    )
]  # fmt: skip


def test_telemetry_of_any_agent_ends_in_a_decision() -> None:
    settings = gateway_settings()
    policies = [make_policy(PolicySettings(name=name)) for name in POLICIES]
    facts = RequestFacts("r", prompt_tokens=2000, max_tokens=4)

    def make(rng: random.Random) -> list[bytes]:
        chosen = [rng.choice(UPDATES) for _ in range(rng.randrange(1, 4))]
        return [mutate_bytes(u, UPDATES, rng) if rng.random() < 0.8 else u for u in chosen]

    def run(events: list[bytes]) -> None:
        view = ClusterView(settings.gateway, settings.limits)
        view.update(ENGINE, watch_from_pb(pb.WatchEvent.FromString(UPDATES[0])))
        view.update(PLACE, watch_from_pb(pb.WatchEvent.FromString(UPDATES[1])))
        for at, data in enumerate(events):
            try:
                message = pb.WatchEvent.FromString(data)
            except Exception as exc:  # gRPC's own refusal: our code never sees the message
                raise ProtocolError(str(exc)) from exc
            place = (ENGINE, PLACE)[at % 2]
            outcomes = view.update(place, watch_from_pb(message))
            snapshot = view.snapshot(ENGINE, {16: [b"0" * 16]}, 1000)
            msgspec.json.encode(describe(view, 1000))
            for policy in policies:
                state = policy.initial_state()
                for outcome in outcomes:
                    state = policy.observe(state, outcome)
                decision = policy.decide(facts, snapshot, state)
                assert decision.target in Target
                msgspec.json.encode(decision)

    fuzz("telemetry", run, make, (ProtocolError,))
