"""From the engine's answer to the client: the commit point, true status codes, and honest ends.

Nothing goes to the client before the engine's first `data:` event that says something, so a failure
until then is a plain error with its own status. After it, or after the comment that a client hears
who waits for long (`KeepaliveSink`), a failure is an error event in OpenAI's shape, without [DONE],
and the connection closes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from gateway.events import Channel, Gaps
from gateway.sse import SseSplitter, data_payloads
from gateway.upstream import UpstreamResponse
from prfaas.errors import BY_KIND, Cancelled, EngineUnavailable, PrfaasError, openai_body
from prfaas.limits import Limits

EVENT_STREAM = "text/event-stream"
PASSED_HEADERS = ("content-type", "retry-after")
"""Of the engine's headers; all others are about its own connection."""


@dataclass(slots=True)
class WholeAnswer:
    """An answer that is not streamed, or an error before the commit."""

    status: int
    headers: dict[str, str]
    body: bytes = field(repr=False)
    said: bool = False
    """It is on its way to the client."""


class ClientSink(Protocol):
    """The client's side of a streamed answer. A client that goes away cancels the request's task.

    `drain` waits for a slow client, up to a limit, and raises Cancelled beyond it.
    """

    @property
    def started(self) -> bool: ...

    async def start(self, headers: Mapping[str, str]) -> None:
        """Commit: status 200 and the headers go out."""
        ...

    def put(self, data: bytes, last: bool = False) -> bool:
        """Write; True where `drain` has to be awaited before anything else. `last`: all that may
        follow is that `end` of a complete stream, which may go out with it.
        """
        ...

    async def drain(self) -> None: ...

    def channel(self, gaps: Gaps) -> Channel | None:
        """A way past `put`, until that has returned True or been told the end; None where there is
        none now.
        """
        ...

    async def end(self, complete: bool) -> None:
        """End the stream; an incomplete one also closes the connection."""
        ...


async def write(sink: ClientSink, data: bytes) -> None:
    """Write, and wait for a client that is slow."""
    if sink.put(data):
        await sink.drain()


@dataclass(frozen=True, slots=True)
class Relayed:
    """How a stream ended; `broken` says why it is not complete."""

    broken: str = ""


async def relay_whole(response: UpstreamResponse, limits: Limits) -> WholeAnswer:
    """The engine's answer with its own status. Raises EngineUnavailable when it breaks off."""
    body = await response.read(limits.max_answer_bytes)
    headers = {k: v for k in PASSED_HEADERS if (v := response.headers.get(k)) is not None}
    if response.status >= 400 and not _has_error_shape(body):
        error = _error_of_status(response.status, body)
        headers["content-type"] = "application/json"
        body = msgspec.json.encode(openai_body(error))
    return WholeAnswer(response.status, headers, body)


async def relay_stream(
    response: UpstreamResponse,
    sink: ClientSink,
    limits: Limits,
    headers: Mapping[str, str],
    on_events: Callable[[int], None],
    on_done: Callable[[], None],
    gaps: Gaps | None = None,
) -> WholeAnswer | Relayed:
    """Relay server-sent events; an error that comes first is answered as a whole with its status.

    `on_events(count)` is called for events as they arrive, first of all before the commit, and
    `on_done()` when [DONE] has gone out: a client may leave then and miss nothing. With `gaps`
    events may go past Python where the client has a way for that, and are told there. Raises
    EngineUnavailable for a failure before the commit.
    """
    splitter = SseSplitter(limits.max_event_bytes)
    held = await _until_first_event(response, splitter, limits)
    refused = _first_error(held)
    if refused is not None:
        return refused
    on_events(splitter.events)
    await sink.start(headers)

    def put(whole: bytes) -> bool:
        return sink.put(whole, splitter.done and response.ended and not splitter.failed)

    if put(held):
        await sink.drain()
    if splitter.done:
        on_done()

    slow = False  # the client, who has to be waited for
    single = False  # events, as they come: then a channel is worth opening
    channel: Channel | None = None

    def pass_on(piece: bytes) -> bool:
        nonlocal slow, single
        seen = splitter.events
        whole = splitter.feed(piece)
        if channel is not None:
            channel.whole = splitter.between
        if not whole:
            return False
        if splitter.events > seen:
            on_events(splitter.events - seen)
        single = splitter.events == seen + 1
        slow = put(whole)
        if splitter.done and not slow:
            on_done()
        return slow

    def pass_on_until_single(piece: bytes) -> bool:
        return pass_on(piece) or single

    try:
        while True:
            channel = sink.channel(gaps) if single and gaps is not None else None
            if channel is None:
                may_open = gaps is not None and not single
                await response.follow(pass_on_until_single if may_open else pass_on)
                if may_open and single and not slow:
                    continue
            else:
                channel.whole = splitter.between
                try:
                    await response.follow(pass_on, channel)
                finally:
                    slow = slow or not channel.open
                    channel.close()
                    channel = None
            if not slow:
                if not (piece := await response.next_piece()):
                    break
                pass_on(piece)
            if slow:
                await sink.drain()
                slow = False
                if splitter.done:
                    on_done()
    except Cancelled:
        raise
    except PrfaasError as exc:
        return await end_broken(sink, exc)
    if splitter.failed:
        await sink.end(complete=False)
        return Relayed("engine_error_event")
    if not splitter.done:
        return await end_broken(sink, EngineUnavailable("the engine ended the stream early"))
    await sink.end(complete=True)
    return Relayed()


async def end_broken(sink: ClientSink, error: PrfaasError) -> Relayed:
    """Say in the stream that it is not complete, and close."""
    await write(sink, b"data: " + msgspec.json.encode(openai_body(error)) + b"\n\n")
    await sink.end(complete=False)
    return Relayed(error.kind)


async def end_refused(sink: ClientSink, answer: WholeAnswer) -> Relayed:
    """Say in the stream what came as a whole answer, too late for a status of its own."""
    if not _has_error_shape(answer.body):
        return await end_broken(sink, EngineUnavailable("the engine did not stream its answer"))
    # Once more through JSON: line breaks between its fields would end the event.
    body = msgspec.json.encode(msgspec.json.decode(answer.body))
    await write(sink, b"data: " + body + b"\n\n")
    await sink.end(complete=False)
    return Relayed("engine_error_event")


async def _until_first_event(
    response: UpstreamResponse, splitter: SseSplitter, limits: Limits
) -> bytes:
    held = b""
    while piece := await response.next_piece():
        held += splitter.feed(piece)
        if splitter.done or splitter.failed:
            return held
        if splitter.events and not all(map(_only_opens, data_payloads(held))):
            return held
        if len(held) > limits.max_event_bytes:
            break
    if splitter.events:
        return held
    raise EngineUnavailable("the engine ended the stream before its first event")


def _first_error(held: bytes) -> WholeAnswer | None:
    """An engine that fails before its first token may have said 200 already: undo that."""
    for payload in data_payloads(held):
        if b'"error"' in payload and _has_error_shape(payload):
            status = _status_of(msgspec.json.decode(payload)["error"])
            return WholeAnswer(status, {"content-type": "application/json"}, payload)
        if not _only_opens(payload):
            return None
    return None


def _only_opens(payload: bytes) -> bool:
    """A chat's first event, which says whose turn it is; engines send it before they know how the
    request ends.
    """
    if b'"role"' not in payload:
        return False
    try:
        choices = msgspec.json.decode(payload, type=_Opening).choices
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return all(c.finish_reason is None and not any(c.delta.values()) for c in choices)


class _OpeningChoice(msgspec.Struct):
    delta: dict[str, Any]
    finish_reason: Any = None

    def __post_init__(self) -> None:
        self.delta.pop("role", None)


class _Opening(msgspec.Struct):
    choices: list[_OpeningChoice]


def _status_of(error: Mapping[str, Any]) -> int:
    for key in ("code", "type"):
        value = error.get(key)
        if isinstance(value, int) and 400 <= value <= 599:
            return value
        if isinstance(value, str) and value in BY_KIND:
            return BY_KIND[value].http_status
    return 502


def _has_error_shape(body: bytes) -> bool:
    try:
        data = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return isinstance(data, dict) and isinstance(data.get("error"), dict)


def _error_of_status(status: int, body: bytes) -> PrfaasError:
    """An error that is not in OpenAI's shape (a proxy's page, an older engine) in that shape."""
    text = body[:500].decode(errors="replace").strip()
    return EngineUnavailable(f"the engine answered {status}: {text or 'no body'}")
