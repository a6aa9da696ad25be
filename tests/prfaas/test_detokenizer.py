"""Streamed text equals the text of all ids, and no piece ends inside a character."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers

from prfaas.detokenizer import BYTE_OF_CHAR, IncrementalDetokenizer, token_bytes
from prfaas.tokens import Tokenizer


def pieces_of(detokenizer: IncrementalDetokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path) -> Tokenizer:
    return Tokenizer.load(tiny_model_dir)


@pytest.fixture(scope="module")
def byte_fallback() -> tokenizers.Tokenizer:
    """A SentencePiece-like vocabulary: spaces as U+2581, unknown characters as byte tokens."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {token: 256 + index for index, token in enumerate(("▁", "h", "i", "hi", "▁hi"))}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=[("h", "i"), ("▁", "hi")], byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return backend


def test_the_byte_alphabet_is_that_of_the_tokenizers_package() -> None:
    assert set(BYTE_OF_CHAR) == set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    assert sorted(BYTE_OF_CHAR.values()) == list(range(256))


def test_a_token_outside_the_byte_alphabet_is_plain_text() -> None:
    assert token_bytes("Ġa") == b" a"
    assert token_bytes("a b") == b"a b"
    assert token_bytes("日") == "日".encode()


@pytest.mark.parametrize(
    "text", ["héllo wörld", "日本語", "👩‍👩‍👧‍👦", "a\u0301b", "\ufffd!", "a b"]
)
def test_multi_byte_characters_come_out_whole(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    pieces = pieces_of(tokenizer.detokenizer(), ids)
    assert "".join(pieces) == text
    assert pieces[-1] == ""
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


def test_an_emoji_is_held_back_until_its_last_token(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("😀")
    assert len(ids) > 1
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.push(token_id) for token_id in ids]
    assert pieces == [""] * (len(ids) - 1) + ["😀"]
    assert detokenizer.flush() == ""


def test_an_unfinished_character_is_shown_at_the_end_only(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("x😀")[:-1]
    assert pieces_of(tokenizer.detokenizer(), ids) == ["x", *[""] * (len(ids) - 1), "\ufffd"]


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 767), max_size=40), skip_special=st.booleans())
def test_pieces_concatenate_to_the_text_of_any_ids(
    tokenizer: Tokenizer, ids: list[int], skip_special: bool
) -> None:
    pieces = pieces_of(tokenizer.detokenizer(skip_special), ids)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special=skip_special)


def test_ids_outside_the_vocabulary_have_no_text(tokenizer: Tokenizer) -> None:
    assert pieces_of(tokenizer.detokenizer(), [tokenizer.vocab_size + 5]) == ["", ""]


@pytest.mark.parametrize("text", ["hi hi", "hi 日本語 hi", "é😀hi", "hihi  hi"])
def test_byte_fallback_vocabularies_stream_whole_characters_and_spaces(
    byte_fallback: tokenizers.Tokenizer, text: str
) -> None:
    ids = byte_fallback.encode(text).ids
    pieces = pieces_of(IncrementalDetokenizer(byte_fallback, frozenset()), ids)
    assert "".join(pieces) == byte_fallback.decode(ids) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_endless_invalid_bytes_are_not_held_back_for_ever(
    byte_fallback: tokenizers.Tokenizer,
) -> None:
    rng = random.Random(0)
    ids = [rng.randint(0x80, 0xBF) for _ in range(200)]
    detokenizer = IncrementalDetokenizer(byte_fallback, frozenset())
    shown = "".join(detokenizer.push(token_id) for token_id in ids)
    assert len(shown) > 150
    assert len(detokenizer._stream._window) < 20  # type: ignore[attr-defined]
