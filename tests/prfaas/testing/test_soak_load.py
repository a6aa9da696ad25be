"""The soak tells a wrong answer from a near tie, and a broken stream from a client that left."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from prfaas.testing.soak_load import Case, Tally

CASE = Case(prompt=(1, 2, 3), tokens=(65, 66, 67), text="ABC")


def letters(ids: Sequence[int]) -> str:
    return "".join(map(chr, ids))


def tally(gap: float = 1.0) -> Tally:
    return Tally(lambda tokens: gap, letters)


@pytest.mark.parametrize("got", [(65, 66, 68), (65, 66), (65, 66, 67, 68), ()])
def test_any_other_tokens_are_wrong(got: tuple[int, ...]) -> None:
    found = tally()
    found.compare_tokens("request", CASE, got)
    assert len(found.wrong) == 1


def test_a_near_tie_is_not_wrong_but_counted() -> None:
    found = tally(gap=0.01)
    found.compare_tokens("request", CASE, (65, 66, 68))
    found.compare_text("request", CASE, "ABD", whole=True)
    assert (found.wrong, len(found.comparison.near_ties)) == ([], 2)


@pytest.mark.parametrize(
    ("got", "whole", "wrong"),
    [
        ("ABC", True, False),
        ("ABD", True, True),
        ("AB", True, True),
        ("AB", False, False),
        ("", False, False),
        ("AX", False, True),
        ("ABCD", False, True),
        ("A\ufffd", False, False),
    ],
)
def test_a_stream_has_the_right_text_as_far_as_it_was_read(
    got: str, whole: bool, wrong: bool
) -> None:
    found = tally()
    found.compare_text("request", CASE, got, whole=whole)
    assert bool(found.wrong) is wrong


def test_the_gap_is_asked_for_where_the_stream_first_differs() -> None:
    asked: list[list[int]] = []

    def gap(tokens: Sequence[int]) -> float:
        asked.append(list(tokens))
        return 1.0

    found = Tally(gap, letters)
    found.compare_text("request", CASE, "AXC", whole=True)
    assert asked == [[1, 2, 3, 65]]
