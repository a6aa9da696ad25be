from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from local_engine.http.text import AnswerText, Piece
from local_engine.requests import FinishReason, TokenEvent
from prfaas.detokenizer import CHAR_OF_BYTE, IncrementalDetokenizer

END = 256


@pytest.fixture(scope="module")
def backend() -> tokenizers.Tokenizer:
    """A token is a byte; one more token ends an answer."""
    vocab = {CHAR_OF_BYTE[b]: b for b in range(256)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return backend


def answer(backend: tokenizers.Tokenizer, stops: list[str]) -> AnswerText:
    return AnswerText(IncrementalDetokenizer(backend, frozenset({END})), stops)


def play(text: AnswerText, events: list[TokenEvent]) -> Iterator[Piece]:
    for event in events:
        piece = text.push(event)
        yield piece
        if piece.reason is not None:
            return


def events_of(ids: list[int], cuts: list[int], reason: FinishReason) -> list[TokenEvent]:
    marks = sorted({0, len(ids), *(c % (len(ids) + 1) for c in cuts)})
    parts = [tuple(ids[a:b]) for a, b in pairwise(marks)] or [()]
    return [TokenEvent(p) for p in parts[:-1]] + [TokenEvent(parts[-1], finish_reason=reason)]


@settings(max_examples=300, deadline=None)
@given(
    st.text(alphabet="abé漢🙂", max_size=25),
    st.lists(st.text(alphabet="abé漢🙂", min_size=1, max_size=3), max_size=3),
    st.lists(st.integers(0, 200), max_size=12),
)
def test_split_into_events_never_changes_text_count_or_reason(
    backend: tokenizers.Tokenizer, text: str, stops: list[str], cuts: list[int]
) -> None:
    ids = list(text.encode())
    whole = list(play(answer(backend, stops), events_of(ids, [], FinishReason.LENGTH)))
    split = list(play(answer(backend, stops), events_of(ids, cuts, FinishReason.LENGTH)))
    assert "".join(p.text for p in split) == "".join(p.text for p in whole)
    assert split[-1].reason == whole[-1].reason
    assert split[-1].completion_tokens == whole[-1].completion_tokens
    assert sum(len(p.token_ids) for p in split) == split[-1].completion_tokens
    shown = "".join(p.text for p in split)
    assert text.startswith(shown)
    assert all(stop not in shown for stop in stops)


def test_half_a_character_is_never_shown(backend: tokenizers.Tokenizer) -> None:
    ids = list("é🙂".encode())
    pieces = [answer_piece.text for answer_piece in play(answer(backend, []), [
        *(TokenEvent((i,)) for i in ids[:-1]),
        TokenEvent((), finish_reason=FinishReason.LENGTH),
    ])]  # fmt: skip
    assert pieces == ["", "é", "", "", "", ""]


def test_tokens_up_to_the_one_that_completes_a_stop_string_count(
    backend: tokenizers.Tokenizer,
) -> None:
    piece = answer(backend, ["STOP"]).push(TokenEvent(tuple(b"ab STOP and more")))
    assert (piece.text, piece.reason, piece.completion_tokens) == ("ab ", FinishReason.STOP, 7)


def test_the_end_token_counts_and_is_not_shown(backend: tokenizers.Tokenizer) -> None:
    text = answer(backend, [])
    piece = text.push(TokenEvent((*b"hi", END), finish_reason=FinishReason.STOP))
    assert (piece.text, piece.completion_tokens) == ("hi", 3)


def test_a_stop_token_with_text_is_not_shown_either(backend: tokenizers.Tokenizer) -> None:
    piece = answer(backend, []).push(TokenEvent(tuple(b"hi!"), finish_reason=FinishReason.STOP))
    assert (piece.text, piece.completion_tokens) == ("hi", 3)


def test_text_held_for_a_stop_comes_out_at_the_end(backend: tokenizers.Tokenizer) -> None:
    pieces = list(play(answer(backend, ["END"]), [
        TokenEvent(tuple(b"the EN")), TokenEvent((END,), finish_reason=FinishReason.STOP),
    ]))  # fmt: skip
    assert [p.text for p in pieces] == ["the ", "EN"]
    assert pieces[-1].reason is FinishReason.STOP
    assert pieces[-1].completion_tokens == 7


def test_cached_tokens_are_passed_on(backend: tokenizers.Tokenizer) -> None:
    assert answer(backend, []).push(TokenEvent((65,), cached_tokens=32)).cached_tokens == 32
