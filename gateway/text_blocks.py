"""Blocks of the text of prompts that nobody tokenised; what begins as before is not hashed again.

Texts are remembered in stretches of several blocks, each after one beginning. A prompt that goes on
as an earlier one did is compared with it, which costs a fifth of hashing it.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from hashlib import blake2b
from itertools import chain as joined
from typing import Any, Protocol

TEXT_BLOCK_BYTES, TEXT_BLOCK_TOKENS = 1024, 256
"""Of a prompt that nobody has tokenised, and about so many tokens."""
STRETCH_BYTES = 8 * TEXT_BLOCK_BYTES
MAX_STRETCHES = 2048
"""Of all texts, so 16 MB and a little."""
MAX_SALTS = 256
REMEMBERED_BYTES = 1 << 20
"""Longer bodies are hashed each time: they would take the place of many others."""

_PROMPT = re.compile(rb'"(?:messages|prompt)"')


class Hasher(Protocol):
    """How blocks get their names, each of which stands for all before it too."""

    def begin(self, salt: str) -> Any:
        """The state before the first block."""
        ...

    def blocks(self, state: Any, text: bytes) -> tuple[list[int], Any]:
        """Names of the whole blocks of `text`, which goes on after `state`; the state after them.
        `state` stays as it is.
        """
        ...


class OwnHasher:
    """For this process alone: Python's own hash is keyed anew in each one, and takes a tenth of the
    work of a cryptographic one. It proves nothing.
    """

    def begin(self, salt: str) -> int:
        return hash(salt)

    def blocks(self, state: int, text: bytes) -> tuple[list[int], int]:
        found: list[int] = []
        for at in _starts(text):
            state = hash((state, text[at : at + TEXT_BLOCK_BYTES]))
            found.append(state)
        return found, state


class SharedHasher:
    """The same in every gateway."""

    def begin(self, salt: str) -> blake2b:
        return blake2b(salt.encode(), digest_size=8)

    def blocks(self, state: blake2b, text: bytes) -> tuple[list[int], blake2b]:
        state = state.copy()
        found: list[int] = []
        for at in _starts(text):
            state.update(text[at : at + TEXT_BLOCK_BYTES])
            found.append(int.from_bytes(state.digest(), "little"))
        return found, state


class _Stretch:
    """One stretch after one beginning; of a beginning itself `text` and `blocks` are empty."""

    __slots__ = ("before", "blocks", "next", "state", "text")

    def __init__(self, text: bytes, blocks: list[int], state: Any) -> None:
        self.text = text
        self.blocks = blocks
        self.state = state
        self.before: _Stretch | None = None
        self.next: _Stretch | None = None
        """What last followed."""


class TextBlocks:
    """Owns the stretches of recent texts, the least recently used go first; nothing to close."""

    def __init__(self, hasher: Hasher, max_stretches: int = MAX_STRETCHES) -> None:
        self._hasher = hasher
        self._max = max_stretches
        self._known: OrderedDict[int, _Stretch] = OrderedDict()
        """By their last block."""
        self._beginnings: OrderedDict[str, _Stretch] = OrderedDict()
        """By salt."""

    def __len__(self) -> int:
        return len(self._known)

    def chain(self, body: bytes, salt: str) -> list[int]:
        """Whole blocks of the text of a request, from where its prompt begins."""
        found = _PROMPT.search(body)
        at = 0 if found is None else found.start()
        stretch = self._beginning(salt)
        if len(body) > REMEMBERED_BYTES:
            return self._hasher.blocks(stretch.state, body[at:])[0]
        stretches: list[_Stretch] = []
        while at + STRETCH_BYTES <= len(body):
            following = stretch.next
            if following is None or not body.startswith(following.text, at):
                following = self._after(stretch, body[at : at + STRETCH_BYTES])
            stretches.append(following)
            stretch = following
            at += STRETCH_BYTES
        self._used(stretches)
        chain = list(joined.from_iterable([each.blocks for each in stretches]))
        return chain + self._hasher.blocks(stretch.state, body[at:])[0]

    def _beginning(self, salt: str) -> _Stretch:
        known = self._beginnings.get(salt)
        if known is None:
            known = self._beginnings[salt] = _Stretch(b"", [], self._hasher.begin(salt))
            if len(self._beginnings) > MAX_SALTS:
                self._beginnings.popitem(last=False)
        return known

    def _after(self, before: _Stretch, text: bytes) -> _Stretch:
        """Known or new, it is what last followed from now on."""
        blocks, state = self._hasher.blocks(before.state, text)
        stretch = self._known.get(blocks[-1])
        if stretch is None:
            stretch = self._known[blocks[-1]] = _Stretch(text, blocks, state)
        stretch.before, before.next = before, stretch
        return stretch

    def _used(self, stretches: list[_Stretch]) -> None:
        """They are forgotten last, the first ones after the others."""
        for stretch in reversed(stretches):
            self._known.move_to_end(stretch.blocks[-1])
        while len(self._known) > self._max:
            gone = self._known.popitem(last=False)[1]
            if gone.before is not None and gone.before.next is gone:
                gone.before.next = None
            if gone.next is not None:
                gone.next.before = None


def _starts(text: bytes) -> range:
    """Of its whole blocks."""
    return range(0, len(text) - TEXT_BLOCK_BYTES + 1, TEXT_BLOCK_BYTES)
