"""The blocks of a text are the same whether it is compared with earlier ones or hashed."""

from __future__ import annotations

import json
import random

import pytest

from gateway.text_blocks import (
    MAX_SALTS,
    REMEMBERED_BYTES,
    STRETCH_BYTES,
    TEXT_BLOCK_BYTES,
    Hasher,
    OwnHasher,
    SharedHasher,
    TextBlocks,
)

HASHERS = pytest.mark.parametrize("hasher", [OwnHasher(), SharedHasher()], ids=["own", "shared"])


def body(text: str, **fields: object) -> bytes:
    return json.dumps(
        {"model": "m", **fields, "messages": [{"role": "user", "content": text}]}
    ).encode()


def fresh(hasher: Hasher, body: bytes, salt: str = "") -> list[int]:
    return TextBlocks(hasher).chain(body, salt)


@HASHERS
def test_texts_share_as_many_blocks_as_they_begin_alike(hasher: Hasher) -> None:
    texts = TextBlocks(hasher)
    long = "many words " * 1000
    chain = texts.chain(body(long), "")
    assert len(chain) == (len(long) + 50) // TEXT_BLOCK_BYTES
    other = texts.chain(body(long[:5000] + "!" + long[5001:]), "")
    shared = sum(a == b for a, b in zip(chain, other, strict=True))
    assert shared == 5000 // TEXT_BLOCK_BYTES
    assert texts.chain(body(long + "more", max_tokens=7), "")[: len(chain)] == chain
    assert not set(texts.chain(body(long), "another salt")) & set(chain)
    assert texts.chain(body("short"), "") == []
    assert texts.chain(b"x" * 3000, "") == fresh(hasher, b"x" * 3000) != []


@HASHERS
def test_it_is_as_if_nothing_was_remembered(hasher: Hasher) -> None:
    rng = random.Random(7)
    texts = TextBlocks(hasher, max_stretches=12)
    stories = [rng.randbytes(9 * STRETCH_BYTES) for _ in range(3)]
    for _ in range(200):
        begin, end = rng.choice(stories), rng.choice(stories)
        cut = rng.randrange(len(begin))
        asked = b'{"prompt": "' + begin[:cut] + end[: rng.randrange(3 * STRETCH_BYTES)]
        salt = rng.choice(("", "salt"))
        assert texts.chain(asked, salt) == fresh(hasher, asked, salt)
        assert len(texts) <= 12
    for stretch in texts._known.values():
        assert stretch.next is None or stretch.next in texts._known.values()


def test_what_goes_on_as_before_is_not_hashed_again() -> None:
    class Counting(OwnHasher):
        hashed = 0

        def blocks(self, state: int, text: bytes) -> tuple[list[int], int]:
            self.hashed += len(text)
            return super().blocks(state, text)

    hasher = Counting()
    texts = TextBlocks(hasher)
    long = body("many words " * 8000)
    chain = texts.chain(long, "")
    hasher.hashed = 0
    assert texts.chain(long, "") == chain
    assert texts.chain(long + b"more", "") == chain
    assert hasher.hashed < 2 * STRETCH_BYTES + 4


def test_memory_is_bounded() -> None:
    texts = TextBlocks(OwnHasher(), max_stretches=10)
    texts.chain(b"x" * (REMEMBERED_BYTES + 1), "")
    assert len(texts) == 0
    for at in range(MAX_SALTS + 10):
        texts.chain(b"x" * STRETCH_BYTES, f"salt {at}")
    assert len(texts) == 10
    assert len(texts._beginnings) == MAX_SALTS
