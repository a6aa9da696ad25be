"""Blocks are free, owned or cached, never two of these, whatever is done in whatever order."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from local_engine.kv.blocks import BlockManager
from prfaas.hashing import block_chain

TOTAL, SIZE = 12, 2


class Listener:
    """Mirrors the cache from its events alone."""

    def __init__(self) -> None:
        self.names: set[bytes] = set()
        self.removals = 0

    def stored(self, name: bytes) -> None:
        assert name not in self.names, "stored twice"
        self.names.add(name)

    def removed(self, name: bytes) -> None:
        self.names.remove(name)
        self.removals += 1

    def cleared(self) -> None:
        self.names.clear()


def chain(*tokens: int) -> list[bytes]:
    return block_chain(tokens, SIZE)


def manager(total: int = TOTAL) -> tuple[BlockManager, Listener]:
    listener = Listener()
    return BlockManager(total, SIZE, listener), listener


class BlockMachine(RuleBasedStateMachine):
    """Sequences over a tiny alphabet match, take, store and release blocks at random."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.listener = manager()
        self.held: dict[str, list[int]] = {}
        self.chains: dict[str, list[bytes]] = {}
        self.count = 0

    @rule(tokens=st.lists(st.integers(0, 1), min_size=0, max_size=12))
    def arrive(self, tokens: list[int]) -> None:
        names = chain(*tokens)
        found = self.blocks.match(names)
        assert all(name in self.listener.names for name in names[: len(found)])
        if len(found) < len(names):
            assert names[len(found)] not in self.listener.names
        self.blocks.acquire(found)
        before = self.blocks.available
        rest = self.blocks.allocate(len(names) - len(found))
        if rest is None:
            assert before < len(names) - len(found)
            self.blocks.release(found)
            return
        assert len(set(rest)) == len(rest) == len(names) - len(found)
        taken = {block for blocks in self.held.values() for block in blocks}
        assert not taken.intersection(rest), "gave a block that has an owner"
        self.count += 1
        self.held[f"s{self.count}"] = found + rest
        self.chains[f"s{self.count}"] = names

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.held)))
        held = self.held[owner]
        before = self.blocks.available
        taken = self.blocks.allocate(1, after=held[-1] if held else None)
        assert (taken is None) == (before == 0)
        held.extend(taken or [])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def store(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.held)))
        for block, name in zip(self.held[owner], self.chains[owner], strict=False):
            self.blocks.store(block, name)
        assert set(self.chains[owner]) <= self.listener.names

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.held)))
        self.blocks.release(self.held.pop(owner))
        del self.chains[owner]

    @rule()
    def clear(self) -> None:
        self.blocks.clear_cache()
        # What was stored before is not to be stored again by those who hold it.
        self.chains = {owner: [] for owner in self.chains}

    @invariant()
    def books_balance(self) -> None:
        self.blocks.check(self.held)
        owned = {block for blocks in self.held.values() for block in blocks}
        assert self.blocks.available == TOTAL - len(owned)

    @invariant()
    def events_tell_the_whole_cache(self) -> None:
        assert set(self.blocks.names()) == self.listener.names


TestBlockMachine = BlockMachine.TestCase


def test_a_released_prefix_is_found_again_and_its_tail_is_evicted_first() -> None:
    blocks, listener = manager(4)
    names = chain(1, 1, 2, 2, 3, 3)
    held = blocks.allocate(3)
    assert held is not None
    for block, name in zip(held, names, strict=True):
        blocks.store(block, name)
    blocks.release(held)
    assert blocks.match(names) == held
    assert blocks.allocate(2) is not None
    assert blocks.match(names) == held[:2]
    assert listener.names == set(names[:2])


def test_the_prefix_used_last_is_evicted_last() -> None:
    blocks, _ = manager(2)
    for tokens in ((1, 1), (2, 2)):
        held = blocks.allocate(1)
        assert held is not None
        blocks.store(held[0], chain(*tokens)[0])
        blocks.release(held)
    again = blocks.match(chain(1, 1))
    blocks.acquire(again)
    blocks.release(again)
    blocks.allocate(1)
    assert blocks.match(chain(1, 1))
    assert not blocks.match(chain(2, 2))


def test_blocks_in_use_are_never_evicted() -> None:
    blocks, listener = manager(3)
    held = blocks.allocate(2)
    assert held is not None
    blocks.store(held[0], chain(1, 1)[0])
    assert blocks.allocate(2) is None
    assert blocks.allocate(1) is not None
    assert blocks.allocate(1) is None
    assert listener.removals == 0


def test_the_older_of_two_twins_keeps_the_name() -> None:
    blocks, listener = manager()
    first, second = blocks.allocate(1), blocks.allocate(1)
    assert first is not None
    assert second is not None
    name = chain(1, 1)[0]
    blocks.store(first[0], name)
    blocks.store(second[0], name)
    assert blocks.match([name]) == first
    assert listener.names == {name}
    blocks.release(second)
    blocks.check({"first": first})


def test_room_is_contiguous_where_there_is_a_run_of_it() -> None:
    blocks, _ = manager(10)
    parts = [blocks.allocate(2) for _ in range(5)]
    assert all(part is not None for part in parts)
    for index in (0, 2, 3):
        blocks.release(parts[index] or [])
    assert blocks.allocate(4) == [4, 5, 6, 7]
    assert blocks.allocate(2) == [0, 1]


def test_fragmented_room_is_used_to_the_last_block() -> None:
    blocks, _ = manager(9)
    held = blocks.allocate(9)
    assert held is not None
    for block in held[::2]:
        blocks.release([block])
    taken = blocks.allocate(5)
    assert sorted(taken or []) == held[::2]


def test_a_sequence_grows_into_the_block_after_its_last() -> None:
    blocks, _ = manager(8)
    blocks.allocate(2)
    mine = blocks.allocate(2)
    assert mine == [2, 3]
    assert blocks.allocate(1, after=3) == [4]
    assert blocks.allocate(1, after=3) == [5]
    assert blocks.allocate(1, after=7) == [6]


def test_releasing_twice_is_an_error() -> None:
    blocks, _ = manager()
    held = blocks.allocate(1)
    assert held is not None
    blocks.release(held)
    with pytest.raises(AssertionError, match="released more often"):
        blocks.release(held)


def test_the_check_names_a_leaked_a_shared_and_a_doubly_held_block() -> None:
    blocks, _ = manager()
    held = blocks.allocate(2)
    assert held == [0, 1]
    with pytest.raises(AssertionError, match="block 0 has 1 references but 0 owners"):
        blocks.check({})
    with pytest.raises(AssertionError, match=r"block 1 has 1 references but 2 owners \['a', 'b'\]"):
        blocks.check({"a": [0, 1], "b": [1]})
    with pytest.raises(AssertionError, match="a holds a block twice"):
        blocks.check({"a": [0, 0]})
    blocks.check({"a": [0, 1]})
