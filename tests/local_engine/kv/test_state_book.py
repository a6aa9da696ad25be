"""State slots are free, live or kept, and block names last as long as a kept state needs them."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from local_engine.kv.blocks import BlockManager
from local_engine.kv.events import CacheEventLog
from local_engine.kv.state_book import StateBook
from local_engine.kv.states import NO_SLOT, StatePool
from prfaas.errors import ConfigError
from prfaas.hashing import BlockHash
from prfaas.layout import GroupKind, LayerGroup

GROUP = LayerGroup(GroupKind.RECURRENT, (0, 2), 2, 3, "float32", state_dim=4)
SIZE = 4


def pool(slots: int) -> StatePool:
    return StatePool(GROUP, slots, torch.device("cpu"))


class Rig:
    """A book and a block manager that know each other; each chain is named by a letter."""

    def __init__(self, slots: int = 4, blocks: int = 12) -> None:
        self.events = CacheEventLog("e")
        self.pool = pool(slots)
        self.book = StateBook(self.pool, self.events)
        self.blocks = BlockManager(blocks, SIZE, self.book)
        self.book.attach(self.blocks)

    def chain(self, text: str) -> list[BlockHash]:
        """A name for each letter, which depends on the letters before."""
        return [
            hashlib.blake2b(text[: i + 1].encode(), digest_size=16).digest()
            for i in range(len(text))
        ]

    def cache(self, text: str, *, states: tuple[int, ...] = ()) -> list[int]:
        """Blocks with the names of `text` that nobody uses, states kept after so many of them."""
        chain, found = self.chain(text), self.blocks.allocate(len(text))
        assert found is not None
        slot = self.book.take()
        for count in states or (len(text),):
            for layer in self.pool.layers:
                layer[slot] = count
            assert self.book.keep(slot, chain[:count])
            for block, name in zip(found[:count], chain, strict=False):
                self.blocks.store(block, name)
        self.book.give_back(slot)
        self.blocks.release(found)
        self.check()
        return found

    def match(self, text: str, needed: tuple[int, ...] = ()) -> int:
        chain = self.chain(text)
        return self.book.match(chain, len(self.blocks.match(chain)), needed)

    def check(self, **live: int) -> None:
        self.blocks.check({})
        self.book.check(live)


def test_states_cross_the_pool_unchanged_and_slots_are_apart() -> None:
    states = pool(3)
    rng = np.random.default_rng(0)
    data = [rng.integers(0, 256, GROUP.state_bytes, dtype=np.uint8) for _ in range(3)]
    for slot, each in enumerate(data, 1):
        states.load(1, slot, each)
    states.copy(2, 3)
    states.clear(1)
    out = np.empty(GROUP.state_bytes, dtype=np.uint8)
    for slot, want in ((1, bytes(GROUP.state_bytes)), (2, data[1].tobytes())):
        states.export(1, slot, out)
        assert out.tobytes() == want
    states.export(1, 3, out)
    assert out.tobytes() == data[1].tobytes()
    assert not states.layers[0].any()
    assert not states.layers[1][NO_SLOT].any()
    with pytest.raises(ConfigError, match="needs 2"):
        pool(1)


def test_a_prefix_matches_as_far_as_a_state_is_kept() -> None:
    rig = Rig()
    rig.cache("abcdef", states=(2, 4, 6))
    assert rig.match("abcdef") == 6
    assert rig.match("abcde") == 4
    assert rig.match("abcdeX") == 4
    assert rig.match("abX") == 2
    assert rig.match("a") == 0
    assert rig.match("X") == 0


def test_states_that_are_needed_one_by_one_limit_the_match() -> None:
    rig = Rig()
    rig.cache("abcdef", states=(2, 6))
    assert rig.match("abcdef", needed=(8, 24)) == 6
    assert rig.match("abcdef", needed=(8, 16, 24)) == 2
    assert rig.match("abcdef", needed=(4, 24)) == 0
    assert rig.match("abcdef", needed=(10,)) == 2, "after no block ends can a state be kept"
    assert rig.match("abcdef", needed=(28,)) == 6, "what lies beyond is still to be computed"
    assert rig.match("abcdef", needed=(24,)) == 6


def test_the_longest_unused_state_goes_first_and_takes_its_names_with_it() -> None:
    rig = Rig(slots=3)
    rig.cache("ab")
    rig.cache("cd")
    list(rig.events.take())
    rig.book.slot_of(rig.chain("ab")[-1])
    rig.cache("ef")
    assert (rig.match("ab"), rig.match("cd"), rig.match("ef")) == (2, 0, 2)
    (event,) = rig.events.take()
    assert set(event.removed) == {name.hex() for name in rig.chain("cd")}
    assert set(event.stored) == {name.hex() for name in rig.chain("ef")}
    assert rig.blocks.available == 12
    assert rig.blocks.cached == 4


def test_names_that_another_state_needs_stay() -> None:
    rig = Rig(slots=3)
    rig.cache("abcd", states=(2, 4))
    rig.cache("xy")
    assert rig.match("ab") == 0, "its state had to go"
    assert rig.match("abcd") == 4, "its blocks had to stay"
    assert len(rig.blocks.names()) == 6


def test_a_block_that_is_evicted_takes_the_states_after_it() -> None:
    rig = Rig(blocks=6)
    rig.cache("abcd", states=(2, 4))
    taken = rig.blocks.allocate(3)
    assert taken is not None
    # The tail went first, and with it nothing that the shorter prefix needs.
    assert rig.match("abcd") == 2
    assert rig.book.kept == 1
    rig.blocks.release(taken)
    rig.check()


def test_a_state_kept_anew_keeps_what_the_one_it_displaces_needed() -> None:
    rig = Rig(slots=2)
    chain = rig.chain("abcd")
    blocks = rig.blocks.allocate(4)
    assert blocks is not None
    slot = rig.book.take()
    for count in (2, 4):
        assert rig.book.keep(slot, chain[:count])
        for block, name in zip(blocks[:count], chain, strict=False):
            rig.blocks.store(block, name)
        rig.book.check({"seq": slot})
        told = list(rig.events.take())
    assert rig.book.kept == 1
    assert rig.match("abcd") == 4
    (event,) = told
    assert (event.stored, event.removed) == ([name.hex() for name in chain[2:]], [])


def test_without_a_slot_to_spare_nothing_is_kept() -> None:
    rig = Rig(slots=2)
    slots = [rig.book.take(), rig.book.take()]
    assert rig.book.available == 0
    assert not rig.book.keep(slots[0], rig.chain("ab"))
    rig.book.check({"a": slots[0], "b": slots[1]})
    assert rig.blocks.names() == []


def test_a_slot_starts_empty_or_with_the_state_of_its_prefix() -> None:
    rig = Rig()
    rig.cache("abcd", states=(2, 4))
    slot = rig.book.take()
    rig.book.start(slot, rig.chain("ab")[-1])
    assert all((layer[slot] == 2).all() for layer in rig.pool.layers)
    rig.book.start(slot, None)
    assert not any(layer[slot].any() for layer in rig.pool.layers)
    rig.check(seq=slot)


def test_clearing_the_cache_frees_every_kept_state() -> None:
    rig = Rig()
    rig.cache("abcd", states=(2, 4))
    rig.blocks.clear_cache()
    rig.check()
    assert (rig.book.kept, rig.book.available) == (0, 4)
    assert rig.match("abcd") == 0


@pytest.mark.parametrize("wrong", ["lost", "twice", "name"])
def test_books_that_do_not_balance_are_found(wrong: str) -> None:
    rig = Rig()
    rig.cache("ab")
    slot = rig.book.take()
    if wrong == "name":
        (block,) = rig.blocks.allocate(1) or []
        rig.blocks.store(block, rig.chain("z")[0])
    live = {"a": slot, "b": slot} if wrong == "twice" else {} if wrong == "lost" else {"a": slot}
    with pytest.raises(AssertionError, match="state"):
        rig.book.check(live)
