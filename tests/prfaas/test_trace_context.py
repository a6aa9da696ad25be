"""What a traceparent says, and how it goes on."""

from __future__ import annotations

import pytest

from prfaas.trace_context import parse_traceparent

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_a_child_is_of_the_same_trace_with_an_id_of_its_own() -> None:
    parent = parse_traceparent(f"00-{TRACE}-{SPAN}-01")
    assert parent is not None
    child = parent.child()
    assert (child.trace_id, child.flags) == (TRACE, 1)
    assert child.span_id != SPAN
    assert parse_traceparent(child.traceparent) == child


@pytest.mark.parametrize(
    "text",
    [
        "",
        "rubbish",
        f"00-{TRACE}-{SPAN}-00",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
    ],
)
def test_what_is_no_trace_and_what_nobody_records_is_none(text: str) -> None:
    assert parse_traceparent(text) is None
