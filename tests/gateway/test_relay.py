"""The commit point: before it true status codes, after it honest ends."""

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pytest

from gateway.relay import (
    Relayed,
    WholeAnswer,
    end_broken,
    end_refused,
    relay_stream,
    relay_whole,
)
from prfaas.errors import Cancelled, EngineUnavailable, Overloaded, openai_body
from prfaas.limits import Limits

LIMITS = Limits(max_event_bytes=1000, max_answer_bytes=1000)
EVENT = b'data: {"choices":[{"text":"a"}]}\n\n'
DONE = b"data: [DONE]\n\n"
HEADERS = {"content-type": "text/event-stream"}


@dataclass
class Scripted:
    """An engine's answer, piece by piece; an exception among the pieces is raised there."""

    pieces: list[bytes | Exception]
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=lambda: dict(HEADERS))

    @property
    def ended(self) -> bool:
        return not self.pieces

    async def next_piece(self) -> bytes:
        await asyncio.sleep(0)
        piece = self.pieces.pop(0) if self.pieces else b""
        if isinstance(piece, Exception):
            raise piece
        return piece

    async def follow(self, taker: Callable[[bytes], bool]) -> None:
        await asyncio.sleep(0)
        while self.pieces and isinstance(self.pieces[0], bytes):
            if taker(self.pieces.pop(0)):
                return

    async def read(self, limit_bytes: int) -> bytes:
        parts = []
        while piece := await self.next_piece():
            parts.append(piece)
        return b"".join(parts)


class Sink:
    """A client that notes what it gets."""

    slow = True

    def __init__(self, gone_after: int = 1000) -> None:
        self.started = False
        self.headers: Mapping[str, str] = {}
        self.got = b""
        self.writes = self.drains = 0
        self.complete: bool | None = None
        self.done = self.last = False
        self._gone_after = gone_after

    async def start(self, headers: Mapping[str, str]) -> None:
        self.started, self.headers = True, headers

    def put(self, data: bytes, last: bool = False) -> bool:
        assert self.started
        assert not self.last
        self.last = last
        if self.writes >= self._gone_after:
            raise Cancelled("the client went away")
        self.writes += 1
        self.got += data
        return self.slow

    def say_done(self) -> None:
        assert DONE in self.got
        assert not self.slow or self.drains == self.writes
        self.done = True

    async def drain(self) -> None:
        self.drains += 1

    async def end(self, complete: bool) -> None:
        assert complete or not self.last
        self.complete = complete


@pytest.fixture(autouse=True, params=[True, False], ids=["slow", "fast"])
def client(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow client is waited for after each piece; to a fast one pieces go as they come."""
    monkeypatch.setattr(Sink, "slow", request.param)


async def stream(*pieces: bytes | Exception, sink: Sink | None = None):
    sink = sink or Sink()
    counts: list[int] = []
    answer = await relay_stream(
        Scripted(list(pieces)), sink, LIMITS, HEADERS, counts.append, sink.say_done
    )
    return answer, sink, counts


def error_in(events: bytes) -> dict[str, object]:
    last = events.rstrip().rsplit(b"\n\n", 1)[-1]
    assert last.startswith(b"data: ")
    return json.loads(last[6:])["error"]


async def test_a_complete_stream_passes_untouched() -> None:
    answer, sink, counts = await stream(EVENT, EVENT + EVENT, DONE)
    assert answer == Relayed()
    assert sink.got == EVENT * 3 + DONE
    assert (sink.complete, sink.done) == (True, True)
    assert sink.headers == HEADERS
    assert counts == [1, 2]


async def test_nothing_is_sent_before_the_first_event() -> None:
    sink = Sink()
    pieces = [b": ping\n\n", b": ping\n\n", EVENT[:10]]
    task = asyncio.create_task(
        relay_stream(
            Scripted([*pieces, EngineUnavailable("x")]), sink, LIMITS, HEADERS, print, print
        )
    )
    with pytest.raises(EngineUnavailable):
        await task
    assert not sink.started


async def test_comments_before_the_first_event_are_kept() -> None:
    _, sink, _ = await stream(b": ping\n\n", EVENT, DONE)
    assert sink.got == b": ping\n\n" + EVENT + DONE


async def test_an_engine_that_ends_without_an_event_is_an_error() -> None:
    with pytest.raises(EngineUnavailable, match="before its first event"):
        await stream(b": ping\n\n")
    with pytest.raises(EngineUnavailable, match="before its first event"):
        await stream()


async def test_comments_without_end_are_an_error() -> None:
    with pytest.raises(EngineUnavailable, match="before its first event"):
        await stream(*[b": ping\n\n"] * 200)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (openai_body(Overloaded("full")), 503),
        ({"error": {"message": "x", "type": "BadRequestError", "code": 400}}, 400),
        ({"error": {"message": "x"}}, 502),
        ({"error": {"message": "x", "code": 200}}, 502),
    ],
)
async def test_an_error_that_comes_first_gets_its_own_status(
    error: dict[str, object], status: int
) -> None:
    payload = json.dumps(error).encode()
    answer, sink, counts = await stream(b"data: " + payload + b"\n\n")
    assert isinstance(answer, WholeAnswer)
    assert (answer.status, answer.body) == (status, payload)
    assert not sink.started
    assert counts == []


OPENING = b'data: {"id":"c","choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
FAILED = b'data: {"error":{"message":"x","type":"InternalServerError","code":500}}\n\n'


@pytest.mark.parametrize("pieces", [(OPENING, FAILED, DONE), (OPENING + FAILED + DONE,)])
async def test_an_error_behind_an_event_that_only_opens_gets_its_status_too(
    pieces: tuple[bytes, ...],
) -> None:
    answer, sink, counts = await stream(*pieces)
    assert isinstance(answer, WholeAnswer)
    assert (answer.status, b"data: " + answer.body + b"\n\n") == (500, FAILED)
    assert not sink.started
    assert counts == []


@pytest.mark.parametrize(
    "second",
    [
        b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n',
        b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n',
        b'data: {"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}\n\n',
    ],
)
async def test_the_opening_event_goes_out_with_the_first_that_says_something(
    second: bytes,
) -> None:
    answer, sink, counts = await stream(OPENING, second, FAILED)
    assert answer == Relayed("engine_error_event")
    assert sink.got == OPENING + second + FAILED
    assert sink.writes == 2
    assert counts[0] == 2


async def test_a_stream_that_only_opens_is_relayed_and_closed() -> None:
    answer, sink, _ = await stream(OPENING)
    assert answer == Relayed("engine_unavailable")
    assert sink.got.startswith(OPENING + b"data: {")


async def test_a_break_after_the_commit_is_said_in_the_stream() -> None:
    """Case 38, also where the break is in the middle of an event."""
    answer, sink, _ = await stream(EVENT, EVENT[:10], EngineUnavailable("engine d-0 broke off"))
    assert answer == Relayed("engine_unavailable")
    assert sink.got.startswith(EVENT + b"data: {")
    assert error_in(sink.got)["message"] == "engine d-0 broke off"
    assert b"[DONE]" not in sink.got
    assert sink.complete is False


async def test_an_end_without_done_is_not_taken_for_complete() -> None:
    answer, sink, _ = await stream(EVENT)
    assert answer == Relayed("engine_unavailable")
    assert error_in(sink.got)["message"] == "the engine ended the stream early"


async def test_an_error_event_of_the_engine_is_not_followed_by_ours() -> None:
    event = b'data: {"error":{"message":"out of memory"}}\n\n'
    answer, sink, _ = await stream(EVENT, event)
    assert answer == Relayed("engine_error_event")
    assert sink.got == EVENT + event
    assert sink.complete is False


async def test_an_event_over_the_limit_breaks_the_stream() -> None:
    answer, sink, _ = await stream(EVENT, b"data: " + b"x" * 2000)
    assert answer == Relayed("protocol_error")
    assert error_in(sink.got)["type"] == "protocol_error"


async def test_a_client_that_is_gone_is_no_fault_of_the_engine() -> None:
    with pytest.raises(Cancelled):
        await stream(EVENT, EVENT, DONE, sink=Sink(gone_after=1))


async def test_a_whole_answer_keeps_status_type_and_retry_after() -> None:
    body = json.dumps(openai_body(Overloaded("full"))).encode()
    headers = {"content-type": "application/json", "retry-after": "7", "server": "x"}
    answer = await relay_whole(Scripted([body], 503, headers), LIMITS)
    assert (answer.status, answer.body) == (503, body)
    assert answer.headers == {"content-type": "application/json", "retry-after": "7"}


@pytest.mark.parametrize("body", [b"<html>bad gateway</html>", b"", b'"x"', b'{"detail":"no"}'])
async def test_an_error_of_another_shape_is_put_into_ours(body: bytes) -> None:
    answer = await relay_whole(Scripted([body], 502, {"content-type": "text/html"}), LIMITS)
    assert answer.status == 502
    assert answer.headers["content-type"] == "application/json"
    message = json.loads(answer.body)["error"]["message"]
    assert message == f"the engine answered 502: {body.decode() or 'no body'}"


async def test_the_end_of_a_broken_stream_is_one_error_event() -> None:
    sink = Sink()
    await sink.start({})
    assert await end_broken(sink, EngineUnavailable("x")) == Relayed("engine_unavailable")
    assert sink.got.count(b"data: ") == 1
    assert sink.complete is False


async def test_a_whole_answer_that_comes_too_late_is_one_event() -> None:
    pretty = json.dumps(openai_body(Overloaded("full")), indent=2).encode()
    sink = Sink()
    await sink.start({})
    assert await end_refused(sink, WholeAnswer(503, {}, pretty)) == Relayed("engine_error_event")
    assert sink.got.count(b"\n") == 2
    assert error_in(sink.got)["message"] == "full"
    assert sink.complete is False


async def test_an_engine_that_does_not_stream_after_a_comment_is_an_error_event() -> None:
    sink = Sink()
    await sink.start({})
    answer = WholeAnswer(200, {}, b'{"choices":[]}')
    assert await end_refused(sink, answer) == Relayed("engine_unavailable")
    assert error_in(sink.got)["message"] == "the engine did not stream its answer"
