"""W3C trace context: pass the caller's on with a span of our own, or begin a trace."""

from __future__ import annotations

import re

import msgspec

from gateway.ids import Ids

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


class Trace(msgspec.Struct, frozen=True):
    """Our span. `parent_id` is empty where the caller sent no valid context."""

    trace_id: str
    span_id: str
    parent_id: str
    flags: str

    @property
    def sampled(self) -> bool:
        """Its spans are to be recorded."""
        return bool(int(self.flags, 16) & 1)

    @property
    def traceparent(self) -> str:
        """The header for the engine, with our span as its parent."""
        return f"00-{self.trace_id}-{self.span_id}-{self.flags}"


def trace_of(traceparent: str | None, ids: Ids) -> Trace:
    """The trace to go on with; an invalid header begins a new one, as the standard asks."""
    span_id = ids.hex(8)
    if traceparent is None:
        return _new(ids, span_id)
    match = _TRACEPARENT.fullmatch(traceparent.strip())
    if match is not None:
        version, trace_id, parent_id, flags, more = match.groups()
        valid = version != "ff" and not (version == "00" and more)
        if valid and trace_id.strip("0") and parent_id.strip("0"):
            return Trace(trace_id, span_id, parent_id, flags)
    return _new(ids, span_id)


def _new(ids: Ids, span_id: str) -> Trace:
    trace_id, flags = ids.new_trace()
    return Trace(trace_id, span_id, "", flags)
