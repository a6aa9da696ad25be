"""W3C trace context: what `traceparent` says, and how it goes on."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
SAMPLED = 0x01


@dataclass(frozen=True, slots=True)
class SpanContext:
    """One span of a trace, as its children are told of it; ids in hex."""

    trace_id: str
    span_id: str
    flags: int = SAMPLED

    @property
    def sampled(self) -> bool:
        return bool(self.flags & SAMPLED)

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}"

    def child(self) -> SpanContext:
        """Another span of the same trace."""
        return SpanContext(self.trace_id, secrets.token_hex(8), self.flags)


def parse_traceparent(text: str) -> SpanContext | None:
    """None for what is none, and for one that nobody records."""
    match = _TRACEPARENT.fullmatch(text)
    if match is None:
        return None
    trace_id, span_id, flags = match.groups()
    if not trace_id.strip("0") or not span_id.strip("0"):
        return None
    context = SpanContext(trace_id, span_id, int(flags, 16))
    return context if context.sampled else None
