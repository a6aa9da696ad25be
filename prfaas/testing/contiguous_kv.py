"""The simplest correct attention storage: each sequence's KV in one contiguous tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's rows [q_start, q_start + q_len) of the batch about to run."""

    seq_id: int
    q_start: int
    q_len: int


class ContiguousKv:
    """Reference `AttentionKv`; owns the KV of all sequences, nothing to close.

    Call `begin` before every forward. What is stored decides each sequence's context length.
    """

    def __init__(self) -> None:
        self._stored: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._spans: tuple[Span, ...] = ()
        self._states: dict[tuple[int, int], Tensor] = {}

    def begin(self, spans: Sequence[Span]) -> None:
        """Name the sequences of the next batch, in row order."""
        self._spans = tuple(spans)

    def stored(self, layer: int, seq_id: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one sequence, each [tokens, kv_heads, head_dim]."""
        return self._stored[layer, seq_id]

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        for span in self._spans:
            rows = slice(span.q_start, span.q_start + span.q_len)
            key = (layer, span.seq_id)
            new = (k[rows], v[rows])
            old = self._stored.get(key)
            if old is not None:
                new = (torch.cat((old[0], new[0])), torch.cat((old[1], new[1])))
            self._stored[key] = new

    def attend(self, layer: int, q: Tensor) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for span in self._spans:
            rows = slice(span.q_start, span.q_start + span.q_len)
            k, v = self._stored[layer, span.seq_id]
            context = k.shape[0] - span.q_len
            mask = torch.ones(span.q_len, k.shape[0], dtype=torch.bool, device=q.device)
            out[rows] = F.scaled_dot_product_attention(
                q[rows].transpose(0, 1),
                k.to(q.dtype).transpose(0, 1),
                v.to(q.dtype).transpose(0, 1),
                attn_mask=mask.tril(diagonal=context),
                enable_gqa=True,
            ).transpose(0, 1)
        return out

    def read_states(self, layer: int, shape: tuple[int, int, int]) -> Tensor:
        return torch.stack(
            [self._states.get((layer, s.seq_id), torch.zeros(shape)) for s in self._spans]
        )

    def write_states(self, layer: int, states: Tensor) -> None:
        for span, state in zip(self._spans, states, strict=True):
            self._states[layer, span.seq_id] = state
