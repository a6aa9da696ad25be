from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from local_engine.http.stop import StopMatcher


def cut_whole(text: str, stops: list[str]) -> tuple[str, bool]:
    """Reference: cut at the stop string that ends first, the longest of those that end there."""
    found = [
        (at + len(stop), at)
        for stop in stops
        for at in range(len(text))
        if text.startswith(stop, at)
    ]
    if not found:
        return text, False
    return text[: min(found)[1]], True


def run(matcher: StopMatcher, pieces: list[str]) -> list[str]:
    out = []
    for piece in pieces:
        out.append(matcher.push(piece))
        if matcher.stopped:
            return out
    out.append(matcher.finish())
    return out


def split(text: str, cuts: list[int]) -> list[str]:
    marks = sorted({0, len(text), *(c % (len(text) + 1) for c in cuts)})
    return [text[a:b] for a, b in pairwise(marks)]


few_letters = st.text(alphabet="abé", max_size=40)
stop_lists = st.lists(st.text(alphabet="abé", min_size=1, max_size=5), max_size=4)


@settings(max_examples=400, deadline=None)
@given(few_letters, stop_lists, st.lists(st.integers(0, 100), max_size=10))
def test_any_split_gives_the_text_cut_at_the_first_stop(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    expected, stopped = cut_whole(text, stops)
    matcher = StopMatcher(stops)
    assert "".join(run(matcher, split(text, cuts))) == expected
    assert matcher.stopped is stopped


def test_what_may_become_a_stop_is_held_and_only_that() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("xE") == "x"
    assert matcher.push("N") == ""
    assert matcher.push("!y") == "EN!y"
    assert not matcher.stopped


def test_held_text_comes_out_when_the_answer_ends() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("the E") == "the "
    assert matcher.finish() == "E"
    assert matcher.finish() == ""


def test_a_stop_over_three_pieces_shows_nothing_of_itself() -> None:
    matcher = StopMatcher(["</s>"])
    assert run(matcher, ["hi <", "/s", "> more"]) == ["hi ", "", ""]
    assert matcher.stopped


def test_of_two_stops_that_end_together_the_longer_is_cut() -> None:
    assert run(StopMatcher(["b", "ab"]), ["xab"]) == ["x"]


def test_without_stops_text_passes_through() -> None:
    assert run(StopMatcher([]), ["a", "b"]) == ["a", "b", ""]
