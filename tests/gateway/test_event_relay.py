"""Named events go to the client as they come, and what breaks off says so."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast

import msgspec
import pytest

from gateway.event_relay import relay_events
from gateway.relay import Relayed
from prfaas.errors import EngineUnavailable, ProtocolError
from prfaas.limits import Limits
from prfaas.testing.fuzz import fuzz, mutate_bytes

LIMITS = Limits(max_event_bytes=1000)
DELTA = b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta"}\n\n'
ENDS = [
    b'event: response.completed\ndata: {"type":"response.completed"}\n\n',
    b'data: {"response":{}, "type": "response.incomplete"}\n\n',
    b'event: response.failed\r\ndata: {"type":"response.failed"}\r\n\r\n',
    b'data: {"type":"error","message":"no"}\n\n',
    b"data: [DONE]\n\n",
]


@dataclass
class _Engine:
    pieces: list[Any]

    async def next_piece(self) -> bytes:
        piece = self.pieces.pop(0) if self.pieces else b""
        if isinstance(piece, Exception):
            raise piece
        return cast(bytes, piece)


@dataclass
class _Client:
    got: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    started: bool = False
    complete: bool | None = None
    done: bool = False

    def say_done(self) -> None:
        self.done = True

    async def start(self, headers: Mapping[str, str]) -> None:
        self.started, self.headers = True, headers

    def put(self, data: bytes, last: bool = False) -> bool:
        assert self.started
        self.got += data
        return False

    async def drain(self) -> None: ...

    async def end(self, complete: bool) -> None:
        self.complete = complete


async def relayed(pieces: list[Any]) -> tuple[Relayed, _Client]:
    client = _Client()
    answer = await relay_events(
        cast(Any, _Engine(pieces)), client, LIMITS, {"a": "b"}, client.say_done
    )
    return answer, client


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("size", [1, 7, 10_000])
async def test_every_end_is_known_however_it_was_cut(end: bytes, size: int) -> None:
    stream = DELTA + DELTA + end
    pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
    answer, client = await relayed(pieces)
    assert (client.got, client.complete, client.headers) == (stream, True, {"a": "b"})
    assert (answer.broken, client.done) == ("", True)


@pytest.mark.parametrize(
    "failure", [[], [EngineUnavailable("cut")], [b"data: half"], [b"x" * 2000]]
)
async def test_what_breaks_off_ends_with_an_error_event(failure: list[Any]) -> None:
    answer, client = await relayed([DELTA, *failure])
    assert answer.broken in (EngineUnavailable.kind, ProtocolError.kind)
    assert client.got.startswith(DELTA + b"event: error\ndata: {")
    assert (client.complete, client.done) == (False, False)


@pytest.mark.parametrize("failure", [[], [EngineUnavailable("cut")], [b"data: half"]])
async def test_before_the_first_event_a_failure_is_an_error(failure: list[Any]) -> None:
    client = _Client()
    with pytest.raises(EngineUnavailable):
        await relay_events(cast(Any, _Engine(failure)), client, LIMITS, {}, client.say_done)
    assert not client.started


async def test_what_a_model_wrote_ends_nothing() -> None:
    written = b'data: {"delta":"\\"type\\":\\"response.completed\\" data: [DONE]"}\n\n'
    answer, _ = await relayed([written])
    assert answer.broken == EngineUnavailable.kind


def test_whatever_an_engine_sends_ends_well_or_says_that_it_did_not() -> None:
    stream = DELTA + DELTA + ENDS[0]

    def make(rng: random.Random) -> list[Any]:
        data = mutate_bytes(stream, [DELTA, *ENDS], rng) if rng.random() < 0.8 else stream
        cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randrange(4)))
        pieces = [data[a:b] for a, b in pairwise([0, *cuts, len(data)])]
        broken = [EngineUnavailable("cut")] if rng.random() < 0.3 else []
        return [piece for piece in pieces if piece] + broken

    def run(pieces: list[Any]) -> None:
        answer, client = asyncio.run(relayed(list(pieces)))
        sent = b"".join(piece for piece in pieces if isinstance(piece, bytes))
        if client.complete:
            assert client.got == sent[: len(client.got)]
        else:
            assert answer.broken
            kept, mark, error = client.got.rpartition(b"event: error\ndata: ")
            assert mark
            assert sent.startswith(kept)
            assert msgspec.json.decode(error)["type"] == "error"

    fuzz("event_relay", run, make, (EngineUnavailable, ProtocolError))
