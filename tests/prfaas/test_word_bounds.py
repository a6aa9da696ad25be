"""Which tokenizers may be given a text in pieces, and that it changes nothing then."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from tokenizers import normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram
from tokenizers.trainers import BpeTrainer

from prfaas.tokens import Tokenizer
from prfaas.word_bounds import keeps_words_apart, next_cut

CORPUS = [f"the word{n} and {n} of them isn't\n\tmany, {n}.5 or so? Été 你好" for n in range(300)]
LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def trained(pre_tokenizer: object, normalizer: object = None) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(BPE())
    if pre_tokenizer is not None:
        made.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        made.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        CORPUS, BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    )
    return made


def split(pattern: str) -> object:
    regex = tokenizers.Regex(pattern)
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(regex, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


GOOD = {
    "gpt2": lambda: trained(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "llama3": lambda: trained(split(LLAMA)),
    "qwen": lambda: trained(split(LLAMA), normalizers.NFC()),
}
BAD = {
    "a space before all": lambda: trained(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "sentencepiece": lambda: trained(pre_tokenizers.Metaspace()),
    "merges over spaces": lambda: trained(
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ),
    "lines as one": lambda: trained(split(r"[^\n]+\n?|\n+")),
    "lower case": lambda: trained(
        pre_tokenizers.ByteLevel(add_prefix_space=False), normalizers.Lowercase()
    ),
    "nothing taken apart": lambda: trained(None),
    "unigram": lambda: tokenizers.Tokenizer(Unigram([("a", 0.0)], 0)),
}


@pytest.mark.parametrize("name", GOOD)
def test_pieces_have_the_tokens_of_the_whole(name: str) -> None:
    backend = GOOD[name]()
    assert keeps_words_apart(backend)
    holds(lambda text: list(backend.encode(text).ids), random.Random(name))


@pytest.mark.parametrize("name", BAD)
def test_others_get_their_texts_whole(name: str) -> None:
    assert not keeps_words_apart(BAD[name]())


def test_a_token_of_two_words_is_not_cut() -> None:
    backend = GOOD["gpt2"]()
    backend.add_special_tokens(["<|two words|>"])
    assert not keeps_words_apart(backend)


def test_it_is_cut_before_a_space_between_words_and_where_a_line_begins() -> None:
    text = "ab  cd e\n f\n\ng, h3 i\nj"
    cuts, at = [], next_cut(text, 0)
    while at is not None:
        cuts.append(at)
        at = next_cut(text, at + 1)
    assert [(text[:at][-1], text[at:][0]) for at in cuts] == [("d", " "), ("3", " "), ("\n", "j")]


@pytest.mark.real_model
def test_the_demo_model_keeps_words_apart(demo_model_path: Path) -> None:
    tokenizer = Tokenizer.load(demo_model_path)
    assert tokenizer.keeps_words_apart
    holds(tokenizer.encode, random.Random("demo"))


WORDS = (
    "the", "word's", "of", "12", "x9", "isn't", "Été", "你好", ",", ".", "\t", "\n", "\n\n", "'s",
    "re'", "<|im_end|>", "\u00a0", "\u0301", "(", "_", "🙂", "²",
)  # fmt: skip


def holds(encode: Callable[[str], list[int]], rng: random.Random) -> None:
    """Random texts, cut wherever they may be."""
    cut = 0
    for _ in range(2000):
        size = rng.choice((3, 8, 30))
        text = "".join(rng.choice(WORDS) + rng.choice(("", " ", "\n", "  ")) for _ in range(size))
        pieces, start = [], 0
        while (at := next_cut(text, start + 1)) is not None:
            pieces.append(text[start:at])
            start = at
        pieces.append(text[start:])
        cut += len(pieces) - 1
        assert [i for piece in pieces for i in encode(piece)] == encode(text), text
    assert cut > 1000
