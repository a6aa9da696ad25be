"""Stop strings over text that arrives in pieces: never emits any part of a stop string."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Searches a stream of text for stop strings; one per answer, nothing to close.

    The stop string that is complete first wins, the longer one where two end together. What comes
    out does not depend on how the text was split: text that may yet become a stop string is held
    back until that is decided.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._patterns = tuple(_Pattern(stop) for stop in stops)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The text that is now safe to send. Sets `stopped` when a stop string is complete."""
        if not self._patterns or not text:
            return text
        pending = self._held + text
        for at, char in enumerate(text, start=len(self._held) + 1):
            longest = max((p.length for p in self._patterns if p.advance(char)), default=0)
            if longest:
                self.stopped = True
                self._held = ""
                return pending[: at - longest]
        hold = max(p.matched for p in self._patterns)
        cut = len(pending) - hold
        self._held = pending[cut:]
        return pending[:cut]

    def finish(self) -> str:
        """The text still held when the answer ends without a stop string."""
        held, self._held = self._held, ""
        return held


class _Pattern:
    """Knuth-Morris-Pratt search for one string, a character at a time."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.length = len(text)
        self.matched = 0
        """Characters of the pattern that the text so far ends with."""
        self._fallback = _fallbacks(text)

    def advance(self, char: str) -> bool:
        """Take one character; true when the pattern is now complete."""
        while self.matched and self._text[self.matched] != char:
            self.matched = self._fallback[self.matched - 1]
        if self._text[self.matched] == char:
            self.matched += 1
        return self.matched == self.length


def _fallbacks(text: str) -> list[int]:
    """For each prefix of `text`: the length of its longest proper prefix that is its suffix too."""
    table = [0] * len(text)
    k = 0
    for i in range(1, len(text)):
        while k and text[k] != text[i]:
            k = table[k - 1]
        if text[k] == text[i]:
            k += 1
        table[i] = k
    return table
