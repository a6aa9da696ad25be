"""What was sent to an engine of late is expected there, for a while and within bounds."""

from __future__ import annotations

from gateway.recent_prefixes import RecentPrefixes
from prfaas.testing.clock import ManualClock

A, B = "d-0", "d-1"


def chain(*names: str) -> list[bytes]:
    return [name.encode() for name in names]


def test_leading_blocks_match_at_the_engine_they_were_sent_to() -> None:
    recent = RecentPrefixes(ManualClock())
    recent.sent(A, chain("a", "b", "c"))
    assert recent.match(A, chain("a", "b", "x")) == 2
    assert recent.match(A, chain("x", "b", "c")) == 0
    assert recent.match(A, chain("a", "b", "c", "d")) == 3
    assert recent.match(B, chain("a")) == 0
    assert recent.match(A, []) == 0
    recent.forget(A)
    assert recent.match(A, chain("a")) == 0


def test_they_are_forgotten_in_time() -> None:
    clock = ManualClock()
    recent = RecentPrefixes(clock, ttl_s=10)
    recent.sent(A, chain("a", "b"))
    clock.advance(9)
    recent.sent(A, chain("a"))
    clock.advance(2)
    assert recent.match(A, chain("a", "b")) == 1


def test_memory_is_bounded_and_shared_beginnings_stay_longest() -> None:
    recent = RecentPrefixes(ManualClock(), max_blocks=10)
    for at in range(50):
        recent.sent(A, chain("system", "tools", f"{at}/1", f"{at}/2"))
    assert recent.blocks(A) == 10
    assert recent.match(A, chain("system", "tools")) == 2
    assert recent.match(A, chain("system", "tools", "0/1")) == 2


def test_what_was_just_sent_is_not_made_younger_but_stays() -> None:
    clock = ManualClock()
    recent = RecentPrefixes(clock, ttl_s=100)
    for _ in range(20):
        recent.sent(A, chain("a", "b"))
        clock.advance(9.0)
    assert recent.match(A, chain("a", "b")) == 2
    clock.advance(100.0)
    assert recent.match(A, chain("a")) == 0


def test_a_turn_of_a_conversation_makes_all_before_it_younger_in_time() -> None:
    clock = ManualClock()
    recent = RecentPrefixes(clock, ttl_s=100)
    blocks = [f"{at}".encode() for at in range(200)]
    for turn in range(1, 101):
        made = recent.sent(A, blocks[: 2 * turn])
        assert made[:2] == [blocks[2 * turn - 1], blocks[2 * turn - 2]]
        clock.advance(7.0)
    assert recent.match(A, blocks) == 200
