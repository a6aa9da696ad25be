"""Whether a tokenizer's tokens ever reach from one word into the next."""

from __future__ import annotations

import json
import re
from typing import Any

import tokenizers

# Letters of several kinds, contractions, digits and signs before and after where texts are cut.
_SAMPLES = (
    "one two", "a b c d", "It's we'll they're I'd so", "x1 2y Z word", "end. Begin anew, or not",
    "line\nnext", "line\n\nnext", "tabs\t and  two  spaces here", "camelCase HTTPServer ends now",
    "\u00e9t\u00e9 is summer", "\u4f60\u597d\n\u4e16\u754c", "(a) b [c] d", "a_b c-d e/f g",
    "1\n2\nthree\nfour", "word1 word2 3 four 55555 g",
    "<tag> text </tag>\nmore text", "don't\nDo", "word ' s word", "s 's t 't re 're",
)  # fmt: skip
_CUT = re.compile(r"(?<=[A-Za-z0-9])(?= [A-Za-z])|(?<=\S\n)(?=[^\W\d_])")
LOOK_AHEAD = 2
"""So many characters after a place say, with those before it, whether it is one to cut at."""
_WORDS = re.compile(r"[A-Za-z0-9] [A-Za-z]|\n")
_PLAIN_MODEL = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")


def next_cut(text: str, start: int) -> int | None:
    """Where `text` may be cut from `start` on: before the space between two words of Latin letters,
    and before a letter that begins a line, if the line before is not blank (how blanks are taken
    apart depends on what follows them). Of what follows, LOOK_AHEAD characters are looked at.
    """
    found = _CUT.search(text, start)
    return None if found is None else found.start()


def keeps_words_apart(backend: tokenizers.Tokenizer) -> bool:
    """Whether what is cut by `next_cut` has the same tokens in pieces as whole.

    So it is for byte-level BPE that first takes words apart, as nearly all models of today do; it
    is not where a space is made part of the text's beginning, or merges cross spaces.
    """
    spec: dict[str, Any] = json.loads(backend.to_str())
    model = spec["model"]
    if model.get("type") != "BPE" or any(model.get(name) for name in _PLAIN_MODEL):
        return False
    if (spec["normalizer"] or {"type": "NFC"})["type"] != "NFC":
        return False
    if any(_WORDS.search(token["content"]) for token in spec["added_tokens"]):
        return False
    parts = spec["pre_tokenizer"] or {}
    steps = parts.get("pretokenizers", [parts])
    if any(step.get("type") not in ("ByteLevel", "Split", "Digits") for step in steps):
        return False
    if any(step.get("add_prefix_space") for step in steps):
        return False
    return not model.get("merges") or all(_is_taken_apart(backend, text) for text in _SAMPLES)


def _is_taken_apart(backend: tokenizers.Tokenizer, text: str) -> bool:
    begins = {start for _, (start, _) in backend.pre_tokenizer.pre_tokenize_str(text)}
    at = next_cut(text, 0)
    while at is not None:
        if at not in begins:
            return False
        at = next_cut(text, at + 1)
    return True
