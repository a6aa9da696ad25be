"""Streams of named events, as /v1/responses sends them: relayed as they come, with honest ends."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import msgspec

from gateway.relay import ClientSink, Relayed, write
from gateway.sse import SseSplitter
from gateway.upstream import UpstreamResponse
from prfaas.errors import Cancelled, EngineUnavailable, PrfaasError, openai_body
from prfaas.limits import Limits

_END = re.compile(
    rb'(?:^|\n)data: ?(?:\[DONE\]|.*"type": ?"(?:response\.(?:completed|failed|incomplete)|error)")'
)
"""Quotes inside JSON strings are escaped, so this cannot be text that a model wrote."""


async def relay_events(
    response: UpstreamResponse,
    sink: ClientSink,
    limits: Limits,
    headers: Mapping[str, str],
    on_done: Callable[[], None],
) -> Relayed:
    """Relay whole events to the end. One that breaks off before its last event is ended with an
    error event, and closed. `on_done()` is called when the last event has gone out.

    Raises PrfaasError for a failure before the first event, and Cancelled.
    """
    splitter = SseSplitter(limits.max_event_bytes)
    said = ended = False
    try:
        while piece := await response.next_piece():
            whole = splitter.feed(piece)
            if not whole:
                continue
            ended = ended or _END.search(whole) is not None
            if not sink.started:
                await sink.start(headers)
            said = True
            await write(sink, whole)
            if ended:
                on_done()
        if not ended:
            raise EngineUnavailable("the engine ended the stream early")
    except Cancelled:
        raise
    except PrfaasError as exc:
        if not said:
            raise
        return await end_broken_events(sink, exc)
    await sink.end(complete=True)
    return Relayed("engine_error_event" if splitter.failed else "")


async def end_broken_events(sink: ClientSink, error: PrfaasError) -> Relayed:
    """Say in the stream that it is not complete, as an event and in the shape of an error."""
    body = openai_body(error)
    fields = {"type": "error", "code": error.kind, "message": error.message, "param": error.param}
    await write(sink, b"event: error\ndata: " + msgspec.json.encode(fields | body) + b"\n\n")
    await sink.end(complete=False)
    return Relayed(error.kind)
