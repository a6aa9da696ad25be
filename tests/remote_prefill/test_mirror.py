"""What an engine says on its port is what the feed shows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from prfaas.limits import Limits
from prfaas.snapshot import PrefillCurve
from prfaas.testing.scripted_port import SCRIPTED_LAYOUT
from prfaas_connect.port.messages import KvEvents, PortError, Stats
from remote_prefill.mirror import EngineMirror
from remote_prefill.watch import WatchFeed


def hexed(*numbers: int) -> list[str]:
    return [number.to_bytes(16, "big").hex() for number in numbers]


def raw(*numbers: int) -> set[bytes]:
    return {number.to_bytes(16, "big") for number in numbers}


class Mirror:
    """A mirror with a connected engine of epoch `e1`."""

    def __init__(self) -> None:
        self.feed = WatchFeed("a", Limits())
        self.free = 100
        self.mirror = EngineMirror("d0", self.feed, free_staging=lambda: self.free)
        self.connect("e1")

    def connect(self, epoch: str) -> None:
        hello = SimpleNamespace(
            chunk_tokens=256,
            model="m",
            block_tokens=16,
            epoch=epoch,
            paced=True,
            roles=["decode"],
            max_running=6,
        )
        conn: Any = SimpleNamespace(hello=hello, layout=SCRIPTED_LAYOUT)
        self.mirror.connected(conn)

    def events(self, seq: int, *, epoch: str = "e1", **fields: Any) -> None:
        self.mirror.kv_events(KvEvents(epoch, seq, **fields))

    @property
    def hashes(self) -> set[bytes] | None:
        return None if self.feed.index is None else self.feed.index.hashes


STATS = Stats(10, 1, 2, 30, 40, 50, 0.02, 0.1, 0.2, 0.3, waiting_kv=1)


def test_stats_and_hello_make_the_engines_state() -> None:
    m = Mirror()
    assert m.feed.engine is not None
    assert not m.feed.engine.ready  # no load is known yet
    m.mirror.stats(STATS)
    engine = m.feed.engine
    assert (engine.name, engine.ready, engine.draining, engine.paced) == ("d0", True, False, True)
    assert (engine.queue_tokens, engine.waiting, engine.running) == (10, 1, 2)
    assert (engine.context_tokens, engine.free_blocks, engine.total_blocks) == (30, 40, 50)
    assert (engine.max_running, engine.waiting_kv) == (6, 1)
    assert engine.curve == PrefillCurve(0.1, 0.2, 0.3, 256)
    assert (engine.token_bytes, engine.free_staging_bytes) == (SCRIPTED_LAYOUT.token_bytes, 100)
    m.free = 7
    m.mirror.stats(STATS)
    assert m.feed.engine.free_staging_bytes == 7
    m.mirror.drain()
    assert m.feed.engine.draining


def test_a_gone_engine_is_not_ready_and_its_cache_unknown() -> None:
    m = Mirror()
    m.mirror.stats(STATS)
    m.events(1, cleared=True, stored=hexed(1))
    m.mirror.disconnected()
    assert m.feed.engine is not None
    assert not m.feed.engine.ready
    assert m.feed.engine.queue_tokens == 0
    assert m.hashes is None


def test_cache_events_add_and_remove() -> None:
    m = Mirror()
    assert m.hashes is None
    m.events(1, cleared=True)
    assert m.hashes == set()
    m.events(2, stored=hexed(1, 2, 3))
    m.events(3, stored=hexed(4), removed=hexed(2))
    assert m.hashes == raw(1, 3, 4)
    m.events(4, cleared=True, stored=hexed(9))
    assert m.hashes == raw(9)


@pytest.mark.parametrize("seq", [1, 2, 4, 7])
def test_a_gap_or_a_step_back_voids_what_was_known(seq: int) -> None:
    m = Mirror()
    m.events(1, cleared=True, stored=hexed(1))
    m.events(2, stored=hexed(2))
    m.events(seq, stored=hexed(3))
    assert m.hashes == raw(3)


def test_events_of_another_epoch_are_dropped_and_a_new_engine_starts_anew() -> None:
    m = Mirror()
    m.events(1, cleared=True, stored=hexed(1))
    m.events(2, epoch="e0", stored=hexed(5))
    assert m.hashes == raw(1)
    m.connect("e2")
    assert m.hashes is None
    m.events(1, epoch="e2", stored=hexed(6))
    assert m.hashes == raw(6)


@pytest.mark.parametrize("text", ["zz", "ab", "00" * 17])
def test_what_is_no_hash_breaks_the_protocol(text: str) -> None:
    m = Mirror()
    with pytest.raises(PortError):
        m.events(1, stored=[text])
