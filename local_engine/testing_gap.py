"""The oracle's second question, asked of the model itself: how close were the two best tokens?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from local_engine.loader import load_model
from local_engine.models.base import ForwardBatch, SeqSlice
from prfaas.testing.contiguous_kv import ContiguousKv, Span


def top_two_gap(
    model: Path, dtype: torch.dtype = torch.float32
) -> Callable[[Sequence[int]], float]:
    """Loads a model; the gap of its two best logits after any tokens, in `dtype` and in one go."""
    loaded = load_model(model, dtype, torch.device("cpu"))

    def gap(tokens: Sequence[int]) -> float:
        kv = ContiguousKv()
        kv.begin([Span(0, 0, len(tokens))])
        ids = torch.tensor(tokens, dtype=torch.int64)
        whole = SeqSlice(0, len(tokens), 0, torch.arange(len(tokens)))
        batch = ForwardBatch(ids, torch.arange(len(tokens)), (whole,))
        hidden = loaded.model.forward(batch, kv)
        best = torch.topk(loaded.model.logits(hidden[-1:])[0], 2).values
        return float(best[0] - best[1])

    return gap
