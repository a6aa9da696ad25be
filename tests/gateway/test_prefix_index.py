"""The exact index credits only what an engine is known to hold now."""

import logging

import pytest

from gateway.prefix_index import ExactPrefixIndex
from prfaas.hashing import block_chain
from prfaas.telemetry import KvDelta, WatchUpdate

CHAIN = block_chain(list(range(64)), 16)


def event(*deltas: KvDelta, full: bool = False) -> WatchUpdate:
    return WatchUpdate(1, full, kv=deltas)


def stored(*blocks: bytes, epoch: str = "e1", cleared: bool = False) -> KvDelta:
    return KvDelta("d", epoch, cleared=cleared, stored=blocks)


@pytest.fixture
def index() -> ExactPrefixIndex:
    made = ExactPrefixIndex()
    made.update("d", event(stored(*CHAIN[:3], cleared=True), full=True))
    return made


def test_leading_blocks_count_up_to_the_first_hole(index: ExactPrefixIndex) -> None:
    assert index.match("d", CHAIN) == 3
    index.update("d", event(KvDelta("d", "e1", removed=(CHAIN[1],))))
    assert index.match("d", CHAIN) == 1
    index.update("d", event(stored(CHAIN[1], CHAIN[3])))
    assert index.match("d", CHAIN) == 4


def test_another_prompt_has_no_match(index: ExactPrefixIndex) -> None:
    assert index.match("d", block_chain(list(range(1, 65)), 16)) == 0
    assert index.match("d", []) == 0
    assert index.match("nobody", CHAIN) == 0


def test_a_new_epoch_forgets_everything(index: ExactPrefixIndex) -> None:
    """Case 8: the engine restarted in place."""
    index.update("d", event(stored(CHAIN[1], epoch="e2")))
    assert index.match("d", CHAIN) == 0
    assert index.blocks("d") == 1
    assert index.known("d", "e2")
    assert not index.known("d", "e1")


def test_a_cleared_cache_is_forgotten(index: ExactPrefixIndex) -> None:
    index.update("d", event(stored(CHAIN[0], cleared=True)))
    assert index.match("d", CHAIN) == 1


def test_a_full_event_replaces_what_was_known(index: ExactPrefixIndex) -> None:
    index.update("d", event(stored(CHAIN[0], cleared=True), full=True))
    assert index.match("d", CHAIN) == 1


def test_a_full_event_without_cache_events_means_unknown(index: ExactPrefixIndex) -> None:
    index.update("d", event(full=True))
    assert not index.known("d", "e1")
    assert index.match("d", CHAIN) == 0


def test_a_cold_cache_is_known(index: ExactPrefixIndex) -> None:
    index.update("d", event(stored(cleared=True), full=True))
    assert index.known("d", "e1")


def test_a_lost_feed_is_forgotten(index: ExactPrefixIndex) -> None:
    index.drop("d")
    assert index.match("d", CHAIN) == 0
    assert not index.known("d", "e1")


def test_engines_are_kept_apart(index: ExactPrefixIndex) -> None:
    index.update("p", event(stored(CHAIN[0], cleared=True), full=True))
    assert index.match("p", CHAIN) == 1
    assert index.match("d", CHAIN) == 3


def test_removed_and_stored_in_one_delta_is_held(index: ExactPrefixIndex) -> None:
    index.update("d", event(KvDelta("d", "e1", stored=(CHAIN[0],), removed=(CHAIN[0],))))
    assert index.match("d", CHAIN) == 3


def test_too_many_blocks_make_an_engine_unknown(caplog: pytest.LogCaptureFixture) -> None:
    index = ExactPrefixIndex(max_blocks=2)
    with caplog.at_level(logging.WARNING):
        index.update("d", event(stored(*CHAIN[:3], cleared=True), full=True))
    assert not index.known("d", "e1")
    assert index.match("d", CHAIN) == 0
    assert "more than 2 blocks" in caplog.text
    index.update("d", event(stored(*CHAIN[:2])))
    assert index.blocks("d") == 0
