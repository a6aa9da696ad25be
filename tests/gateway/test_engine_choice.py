"""A request goes where its first token would come first; what cannot take it comes last."""

from __future__ import annotations

from typing import Any

from gateway.engine_choice import EngineOption, rank_engines
from prfaas.snapshot import UNKNOWN_CURVE, EngineLoad, LocalEngine, PrefillCurve

CURVE = PrefillCurve(0.01, 0.001, 0.0, 256)


def option(
    name: str,
    *,
    matched: int = 0,
    recent: int = 0,
    transfers: int = 0,
    usable: bool = True,
    curve: PrefillCurve = CURVE,
    **load: Any,
) -> EngineOption:
    local = LocalEngine(name, EngineLoad(**load), curve, matched)
    return EngineOption(local, recent, transfers, usable)


def order(*options: EngineOption, tokens: int = 1000, key: str = "k") -> list[str]:
    return [each.local.name for each in rank_engines(options, tokens, key)]


def test_the_shorter_queue_wins() -> None:
    assert order(option("a", queue_tokens=500), option("b", queue_tokens=100)) == ["b", "a"]
    assert order(option("a"), option("b", sent_tokens=100))[0] == "a"


def test_a_cached_prefix_is_worth_a_queue_of_up_to_twice_its_time() -> None:
    cached = option("a", matched=800, queue_tokens=500)
    assert order(cached, option("b"))[0] == "a"
    cached = option("a", matched=800, queue_tokens=1900)
    assert order(cached, option("b"))[0] == "b"


def test_what_was_sent_there_just_now_counts_as_cached() -> None:
    assert order(option("a"), option("b", recent=800))[0] == "b"
    assert order(option("a", matched=2000), option("b", recent=2000), tokens=1000) in (
        ["a", "b"], ["b", "a"],
    )  # fmt: skip


def test_a_slightly_faster_engine_does_not_get_everything() -> None:
    faster = PrefillCurve(0.01, 0.0009, 0.0, 256)
    full = option("a", curve=faster, running=20, waiting=30, decode_step_s=0.02)
    assert order(full, option("b", running=5, decode_step_s=0.02))[0] == "b"
    assert order(option("a", curve=faster), option("b", decode_step_s=0.02))[0] == "a"


def test_long_prompts_do_not_meet_at_the_engine_that_measured_a_little_better() -> None:
    better = PrefillCurve(0.01, 0.00097, 0.0, 256)
    one = option("a", curve=better, running=6, decode_step_s=0.02)
    assert order(one, option("b", running=5, decode_step_s=0.02), tokens=50_000)[0] == "b"
    half = PrefillCurve(0.01, 0.0005, 0.0, 256)
    much_faster = option("a", curve=half, running=6, decode_step_s=0.02)
    assert order(much_faster, option("b", decode_step_s=0.02), tokens=50_000)[0] == "a"


def test_a_prefix_at_an_engine_that_is_alike_still_counts() -> None:
    slower = PrefillCurve(0.01, 0.00103, 0.0, 256)
    cached = option("a", curve=slower, matched=8000, running=6, decode_step_s=0.02)
    assert order(cached, option("b", decode_step_s=0.02), tokens=10_000)[0] == "a"


def test_who_waits_for_kv_will_decode_with_the_rest() -> None:
    coming = option("a", transfers=8, decode_step_s=0.02)
    assert order(coming, option("b", running=4, decode_step_s=0.02)) == ["b", "a"]


def test_the_unusable_come_last_whatever_they_have() -> None:
    gone = option("a", matched=1000, usable=False)
    assert order(gone, option("b", queue_tokens=10**6)) == ["b", "a"]
    assert order(gone, option("b", usable=False, queue_tokens=1)) == ["a", "b"]


def test_engines_of_unknown_speed_are_compared_by_requests_and_prefix() -> None:
    slow = {"curve": UNKNOWN_CURVE}
    assert order(option("a", running=3, **slow), option("b", running=1, **slow))[0] == "b"
    assert (
        order(option("a", running=1, recent=900, **slow), option("b", running=1, **slow))[0] == "a"
    )
    mixed = [option("a", running=5, **slow), option("b", queue_tokens=10)]
    assert order(*mixed)[0] == "b"


def test_equal_engines_share_equally() -> None:
    firsts = [order(option("a"), option("b"), option("c"), key=f"k{i}")[0] for i in range(300)]
    assert all(70 < firsts.count(name) < 130 for name in "abc")


def test_sixteen_engines_take_little_time() -> None:
    import time

    options = [option(f"d-{i}", queue_tokens=i) for i in range(16)]
    best = min(
        _timed(lambda: rank_engines(options, 1000, "k"), time.perf_counter) for _ in range(50)
    )
    assert best < 500e-6, "it takes a tenth of that"


def _timed(act: Any, clock: Any) -> float:
    start = clock()
    act()
    return float(clock() - start)
