"""Trace context: a valid one goes on, anything else begins anew."""

import pytest

from gateway.ids import Ids
from gateway.trace import trace_of

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
IDS = Ids()


def test_a_valid_context_goes_on_with_our_span() -> None:
    trace = trace_of(f"00-{TRACE}-{SPAN}-00", IDS)
    assert (trace.trace_id, trace.parent_id) == (TRACE, SPAN)
    assert trace.span_id != SPAN
    assert trace.traceparent == f"00-{TRACE}-{trace.span_id}-00"


def test_a_later_version_is_read_as_far_as_it_is_known() -> None:
    assert trace_of(f"01-{TRACE}-{SPAN}-01-more", IDS).trace_id == TRACE


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "nonsense",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
    ],
)
def test_anything_else_begins_a_trace(header: str | None) -> None:
    trace = trace_of(header, IDS)
    assert trace.trace_id != TRACE
    assert len(trace.trace_id) == 32
    assert trace.parent_id == ""
    assert trace_of(header, IDS).trace_id != trace.trace_id
