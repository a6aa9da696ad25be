"""Random cuts of a session's KV into pieces, as senders with several ranks might make them."""

from __future__ import annotations

import itertools
import random

from prfaas.layout import KvLayout
from prfaas.ledger import Piece


def split_pieces(
    layout: KvLayout, start: int, end: int, chunk_tokens: int, rng: random.Random
) -> list[Piece]:
    """Every tensor of [start, end), some of them cut by tokens, some by heads; in wire order.

    States are cut by heads only.
    """
    pieces: list[Piece] = []
    for extent in layout.extents(start, end, chunk_tokens):
        span, heads = extent.span, layout.groups[extent.group].kv_heads
        whole = layout.groups[extent.group].keeps_state
        token_cuts = [span.start, span.end] if whole else _cuts(span.start, span.end, rng)
        head_cuts = _cuts(0, heads, rng)
        pieces += [
            Piece(span.index, extent.layer, extent.group, t0, t1, h0, h1)
            for t0, t1 in itertools.pairwise(token_cuts)
            for h0, h1 in itertools.pairwise(head_cuts)
        ]
    return pieces


def _cuts(low: int, high: int, rng: random.Random) -> list[int]:
    inner = range(low + 1, high)
    return [low, *sorted(rng.sample(inner, min(len(inner), rng.choice((0, 0, 1, 2))))), high]
