"""A text in pieces has the tokens and hashes of the whole, however it was come by."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.prompt_memory import MAX_SALTS, PIECE_CHARS, TAIL_CHARS, WHOLE_EVERY, PromptMemory
from prfaas.hashing import block_chain

WORDS = ("word", "\n", "a", " ", "Été ", "end.", "\nLine", " 12", "\u4f60\u597d", "<tag>", "\t")


def encode(text: str) -> list[int]:
    return list(text.encode())


def prompt_of(memory: PromptMemory, text: str, size: int = 16, salt: str = "") -> list[bytes]:
    walk = memory.walk(text)
    count, chains = walk.work(encode, [size, 0], salt)
    memory.keep(walk)
    assert count == len(encode(text))
    assert list(chains) == [size]
    return chains[size]


def whole(text: str, size: int = 16, salt: str = "") -> list[bytes]:
    return block_chain(encode(text)[:-1], size, salt)


def story(seed: int, words: int) -> str:
    rng = random.Random(seed)
    return "".join(rng.choice(WORDS) + rng.choice((" and", " so", "\nthen")) for _ in range(words))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 2), st.integers(0, 4000), st.integers(0, 2), st.integers(0, 300),
            st.sampled_from((1, 16, 7)), st.sampled_from(("", "salt")),
        ),
        min_size=1, max_size=8,
    )
)  # fmt: skip
def test_it_is_as_if_nothing_was_remembered(
    asked: list[tuple[int, int, int, int, int, str]],
) -> None:
    memory = PromptMemory(max_pieces=12)
    stories = [story(seed, 1500) for seed in range(3)]
    for at, shared, other, more, size, salt in asked:
        text = stories[at][:shared] + stories[other][:more]
        assert prompt_of(memory, text, size, salt) == whole(text, size, salt)
        assert len(memory) <= 12


def test_only_what_is_new_is_left_to_do() -> None:
    memory = PromptMemory()
    text = story(1, 3000)
    prompt_of(memory, text)
    most = len(text) // PIECE_CHARS + 2 * PIECE_CHARS // TAIL_CHARS[0]
    assert len(text) // (PIECE_CHARS + 10) <= len(memory) <= most
    longer = memory.walk(text + " and more")
    assert longer.unknown_chars < TAIL_CHARS[-1] + 100
    assert memory.walk("so it begins " + text).pieces == []


def test_it_counts_what_it_knew() -> None:
    memory = PromptMemory()
    text = story(2, 3000)
    prompt_of(memory, text)
    assert (memory.known_chars, memory.new_chars) == (0, len(text))
    walk = memory.walk(text)
    assert memory.known_chars == sum(piece.chars for piece in walk.pieces) > len(text) // 2
    assert memory.known_chars + memory.new_chars == 2 * len(text)


def test_the_least_recently_used_goes_first() -> None:
    texts = [story(seed, 1200) for seed in range(3)]
    most = 10
    memory = PromptMemory(max_pieces=most)
    for text in (*texts[:2], texts[1], texts[0], texts[2]):
        prompt_of(memory, text)
    assert len(memory) == most
    assert len(memory.walk(texts[2]).pieces) >= 3
    assert memory.walk(texts[1]).pieces == []


def test_what_goes_on_otherwise_is_told_from_what_last_followed() -> None:
    memory = PromptMemory()
    texts = [story(1, 1200) + story(seed, 600) for seed in (1, 2)]
    known = []
    for at in range(6):
        text = texts[at % 2]
        assert prompt_of(memory, text) == whole(text)
        known.append(memory.walk(text))
    assert known[0].pieces == known[2].pieces == known[4].pieces != known[1].pieces
    shared = sum(a is b for a, b in zip(known[4].pieces, known[5].pieces, strict=False))
    assert shared >= 3
    assert known[4].unknown_chars == len(known[4].last)


def test_nothing_that_is_forgotten_is_held_by_what_stood_before_it() -> None:
    memory = PromptMemory(max_pieces=8)
    for seed in range(12):
        prompt_of(memory, story(0, 500) + story(seed, 900))
    kept = set(memory._pieces.values())
    assert len(kept) == len(memory) <= 8
    for piece in (*kept, memory._root):
        assert {each for each in piece.next if each is not None} <= kept
    assert {piece.before for piece in kept} <= kept | {memory._root}


def test_long_chains_are_put_together_from_what_was_known_of_them() -> None:
    memory = PromptMemory()
    text = story(5, 12_000)
    for end in (len(text) // 3, len(text) // 2, len(text), len(text) - 5000, len(text)):
        for size, salt in ((16, ""), (7, ""), (16, "salt")):
            for _ in range(2):
                assert prompt_of(memory, text[:end], size, salt) == whole(text[:end], size, salt)
    assert len(memory.walk(text).pieces) > 2 * WHOLE_EVERY


def test_two_at_once_learn_the_same() -> None:
    memory = PromptMemory()
    text = story(3, 2000)
    walks = [memory.walk(text), memory.walk(text)]
    for walk in walks:
        assert walk.work(encode, [16], "")[1][16] == whole(text)
    for walk in walks:
        memory.keep(walk)
    pieces = len(memory)
    assert prompt_of(memory, text) == whole(text)
    assert len(memory) == pieces
    assert memory.walk(text).unknown_chars < 2 * PIECE_CHARS


def test_hashes_of_many_salts_take_no_more_memory() -> None:
    memory = PromptMemory()
    text = story(4, 800)
    for at in range(3 * MAX_SALTS):
        assert prompt_of(memory, text, salt=f"salt {at}") == whole(text, salt=f"salt {at}")
    assert all(len(piece.chains) <= MAX_SALTS for piece in memory.walk(text).pieces)


@pytest.mark.parametrize("text", ["", "a", "\u4f60" * 9000, "x" * 9000, "1 2 " * 3000])
def test_a_text_that_cannot_be_cut_is_one_piece(text: str) -> None:
    memory = PromptMemory()
    for _ in range(2):
        assert prompt_of(memory, text) == whole(text)
    assert len(memory) == 0
