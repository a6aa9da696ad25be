"""Whoever applies the event messages in order knows the cache."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from local_engine.kv import events
from local_engine.kv.events import CacheEventLog
from prfaas_connect.port.messages import KvEvents

NAMES = [bytes([i]) * 16 for i in range(6)]


class Mirror:
    """What an agent does with the messages."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.seq = 0

    def apply(self, message: KvEvents) -> None:
        assert message.epoch == "e"
        assert message.seq == self.seq + 1, "a gap"
        self.seq = message.seq
        assert not set(message.stored) & set(message.removed)
        if message.cleared:
            self.names.clear()
        self.names |= set(message.stored)
        self.names -= set(message.removed)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from(["stored", "removed"]), st.sampled_from(NAMES)),
            st.sampled_from(["cleared", "take", "snapshot"]),
        )
    )
)
def test_messages_lead_to_the_cache_as_it_is(changes: list[tuple[str, bytes] | str]) -> None:
    log, mirror, true = CacheEventLog("e"), Mirror(), set[bytes]()
    for change in [*changes, "take"]:
        match change:
            case ("stored", name):
                log.stored(name)
                true.add(name)
            case ("removed", name):
                log.removed(name)
                true.discard(name)
            case "cleared":
                log.cleared()
                true.clear()
            case "snapshot":
                for message in log.snapshot(true):
                    mirror.apply(message)
            case _:
                for message in log.take():
                    mirror.apply(message)
                assert not log.pending
    assert mirror.names == {name.hex() for name in true}


def test_nothing_new_is_no_message_and_a_snapshot_of_nothing_is_one() -> None:
    log = CacheEventLog("e")
    assert list(log.take()) == []
    (message,) = log.snapshot([])
    assert message.cleared
    assert message.seq == 1


def test_a_large_cache_is_told_in_several_messages_and_cleared_once(monkeypatch) -> None:
    monkeypatch.setattr(events, "MAX_HASHES", 4)
    log, mirror = CacheEventLog("e"), Mirror()
    mirror.names = {"old"}
    names = [i.to_bytes(16, "big") for i in range(10)]
    messages = list(log.snapshot(names))
    assert [m.cleared for m in messages] == [True, False, False]
    for message in messages:
        mirror.apply(message)
    assert mirror.names == {name.hex() for name in names}


def test_discarded_changes_are_not_told() -> None:
    log = CacheEventLog("e")
    log.stored(NAMES[0])
    log.cleared()
    log.discard()
    assert not log.pending
    assert list(log.take()) == []
