"""A sequence knows what it holds, what it lacks and what its blocks are called."""

from __future__ import annotations

from local_engine.kv.pool import KvPool
from local_engine.sequence import Phase, Sequence
from local_engine.testing import CHAIN_LAYOUT
from prfaas.hashing import block_chain


class Session(Sequence):
    decodes = False


def pool() -> KvPool:
    return KvPool(CHAIN_LAYOUT, 16, 4)


def test_a_sequence_that_decodes_keeps_its_last_token_back() -> None:
    tokens = list(range(9))
    assert Sequence("a", 0, tokens, "", pool(), shares=True).target == 8
    assert Session("s", 0, tokens, "", pool(), shares=True).target == 9


def test_only_whole_blocks_before_the_target_can_be_matched() -> None:
    for length, blocks in ((1, 0), (4, 0), (5, 1), (8, 1), (9, 2)):
        seq = Sequence("a", 0, list(range(length)), "x", pool(), shares=True)
        assert seq.matchable == block_chain(range(length), 4, "x")[:blocks]
        session = Session("s", 0, list(range(length)), "x", pool(), shares=True)
        assert session.matchable == block_chain(range(length), 4, "x")
    assert Sequence("a", 0, list(range(9)), "x", pool(), shares=False).matchable == []


def test_blocks_needed_counts_the_newest_token_and_what_it_holds() -> None:
    seq = Sequence("a", 0, list(range(8)), "", pool(), shares=True)
    assert seq.blocks_needed == 2
    seq.table.extend([3, 4])
    assert seq.blocks_needed == 0
    seq.tokens.append(8)
    assert seq.blocks_needed == 1


def test_names_of_blocks_continue_the_chain_of_the_prompt() -> None:
    seq = Sequence("a", 0, list(range(6)), "salt", pool(), shares=True)
    seq.tokens.extend(range(6, 14))
    names = block_chain(range(14), 4, "salt")
    assert [seq.block_name(i) for i in (2, 0, 1)] == [names[2], names[0], names[1]]


def test_dropped_blocks_take_all_progress_with_them() -> None:
    seq = Sequence("a", 0, list(range(8)), "", pool(), shares=True)
    seq.table.extend([3, 4])
    seq.computed, seq.stored_blocks = 7, 1
    assert seq.drop_blocks() == [3, 4]
    assert (seq.computed, seq.stored_blocks, seq.table.blocks) == (0, 0, [])
    assert seq.left_to_compute == 7


def test_its_text_says_where_it_is() -> None:
    seq = Sequence("a", 0, list(range(8)), "", pool(), shares=True)
    seq.phase, seq.paused = Phase.DECODING, True
    seq.computed = 7
    assert repr(seq) == "<Sequence a DECODING paused 7/7 blocks=0>"
