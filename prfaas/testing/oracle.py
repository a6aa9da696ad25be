"""The oracle of the exactness tests: when may an answer differ from a local-only run?

One request at a time with fp32 KV, or with bf16 KV on one chunk grid: never. Under concurrency the
batch shape changes the last bits of a sum, so a near tie may fall the other way: up to the first
difference of each answer the tokens must agree, the two best logits there must be closer than
`NEAR_TIE`, and such differences are at most `MAX_SHARE` of the positions compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

NEAR_TIE = 0.1
MAX_SHARE = 0.01

TopTwoGap = Callable[[Sequence[int]], float]
"""Gap of the two best logits after these tokens, in a local-only run."""


@dataclass(slots=True)
class Comparison:
    """Answers compared so far; `verdict` raises when they are more different than they may be."""

    gap: TopTwoGap
    positions: int = 0
    near_ties: list[str] = field(default_factory=list)

    def add(
        self, name: str, prompt: Sequence[int], expected: Sequence[int], got: Sequence[int]
    ) -> None:
        """Compare one answer. Raises AssertionError where it is wrong."""
        if len(expected) != len(got):
            raise AssertionError(f"{name}: {len(got)} tokens, expected {len(expected)}")
        for at, (want, have) in enumerate(zip(expected, got, strict=True)):
            self.positions += 1
            if want == have:
                continue
            gap = self.gap([*prompt, *expected[:at]])
            where = f"{name}: token {at} is {have}, expected {want}, top-2 gap {gap:.4f}"
            if gap >= NEAR_TIE:
                raise AssertionError(where)
            self.near_ties.append(where)
            return

    def verdict(self) -> None:
        """Raises AssertionError when near ties are too many."""
        if len(self.near_ties) > MAX_SHARE * self.positions:
            raise AssertionError(
                f"{len(self.near_ties)} near ties in {self.positions} positions: {self.near_ties}"
            )
