"""Prompts of an exact number of tokens out of natural text, no two alike."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Sequence
from pathlib import Path

from prfaas.errors import ConfigError


def natural_text() -> str:
    """Half a megabyte of English that every Python has with it: the topics of its help."""
    spec = importlib.util.find_spec("pydoc_data.topics")
    if spec is None or spec.origin is None:
        raise ConfigError("this Python came without pydoc_data, whose text the benchmarks read")
    return Path(spec.origin).read_text()


class PromptSource:
    """Cuts token prompts at random places of a text; every prompt begins with an id of its own."""

    def __init__(self, text_ids: Sequence[int], seed: int) -> None:
        self._ids = list(text_ids)
        self._rng = random.Random(seed)

    def cut(self, tokens: int) -> list[int]:
        """`tokens` ids; the first block differs from that of every other cut."""
        start = self._rng.randrange(len(self._ids) - tokens)
        head = [self._rng.choice(self._ids) for _ in range(4)]
        return head + self._ids[start : start + tokens - len(head)]
