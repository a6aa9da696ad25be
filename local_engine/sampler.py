"""Drawing tokens from logits: greedy, temperature, top-k, top-p; the same for a seed in any batch."""

from __future__ import annotations

from dataclasses import dataclass

from local_engine.requests import SamplingParams


@dataclass(frozen=True, slots=True)
class TokenDraw:
    """One token to draw: its parameters, the request's seed, and its index in the answer."""

    params: SamplingParams
    seed: int
    index: int
