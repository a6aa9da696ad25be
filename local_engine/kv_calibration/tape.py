"""One sequence's KV in plain tensors: prefill that records it, and continuation behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from local_engine.models.base import ForwardBatch
from local_engine.models.llama import LlamaModel
from prfaas.errors import ConfigError

CHUNK_TOKENS = 256

QueryHook = Callable[[int, int, Tensor], None]
"""Called with (layer, first position, queries after rope [tokens, heads, head_dim])."""


@dataclass(frozen=True, slots=True)
class Tape:
    """KV of one text; `kv`: bfloat16, or float32 where that was asked for,
    [layers, k|v, tokens, kv_heads, head_dim], K after rope.
    """

    tokens: tuple[int, ...]
    kv: Tensor


class TapeKv:
    """`AttentionKv` of one sequence over a buffer it owns; KV is kept in bfloat16, as engines do.

    `end` tokens are stored before a step. Nothing to close.
    """

    def __init__(self, buffer: Tensor, on_query: QueryHook | None = None) -> None:
        self.buffer = buffer
        self.end = 0
        self._tokens = 0
        self._on_query = on_query

    def begin(self, tokens: int) -> None:
        """A step of so many tokens comes next."""
        self._tokens = tokens

    def commit(self) -> None:
        """The step is done."""
        self.end += self._tokens

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        stop = self.end + self._tokens
        self.buffer[layer, 0, self.end : stop] = k.to(self.buffer.dtype)
        self.buffer[layer, 1, self.end : stop] = v.to(self.buffer.dtype)

    def attend(self, layer: int, q: Tensor) -> Tensor:
        if self._on_query is not None:
            self._on_query(layer, self.end, q)
        stop = self.end + self._tokens
        kv_heads = self.buffer.shape[3]
        k, v = self.buffer[layer, :, :stop].to(q.dtype).transpose(1, 2)
        repeat = q.shape[1] // kv_heads
        k, v = (x.repeat_interleave(repeat, 0) for x in (k, v))
        mask = torch.ones(self._tokens, stop, dtype=torch.bool).tril(self.end)
        return F.scaled_dot_product_attention(q.transpose(0, 1), k, v, attn_mask=mask).transpose(
            0, 1
        )

    def read_states(self, layer: int, shape: tuple[int, int, int]) -> Tensor:
        raise ConfigError("models with recurrent layers cannot be calibrated in this version")

    def write_states(self, layer: int, states: Tensor) -> None:
        raise ConfigError("models with recurrent layers cannot be calibrated in this version")


def new_buffer(model: LlamaModel, tokens: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Room for KV of so many tokens."""
    config = model.config
    return torch.zeros(config.layers, 2, tokens, config.kv_heads, config.head_dim, dtype=dtype)


def step(model: LlamaModel, kv: TapeKv, tokens: Sequence[int]) -> Tensor:
    """Run `tokens` after what `kv` holds; hidden states [tokens, hidden]."""
    kv.begin(len(tokens))
    positions = torch.arange(kv.end, kv.end + len(tokens))
    hidden = model.forward(ForwardBatch(torch.tensor(tokens), positions, ()), kv)
    kv.commit()
    return hidden


def record(
    model: LlamaModel,
    tokens: Sequence[int],
    on_query: QueryHook | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tape:
    """Prefill `tokens` chunk by chunk."""
    kv = TapeKv(new_buffer(model, len(tokens), dtype), on_query)
    for at in range(0, len(tokens), CHUNK_TOKENS):
        step(model, kv, tokens[at : at + CHUNK_TOKENS])
    return Tape(tuple(tokens), kv.buffer)


def continued(model: LlamaModel, prefix: Tensor, tokens: Sequence[int]) -> Tensor:
    """Log probabilities [tokens, vocab] after each of `tokens`, read behind KV `prefix`."""
    kv = TapeKv(new_buffer(model, prefix.shape[2] + len(tokens), prefix.dtype))
    kv.buffer[:, :, : prefix.shape[2]] = prefix
    kv.end = prefix.shape[2]
    return model.logits(step(model, kv, tokens)).log_softmax(-1)


def free_running(model: LlamaModel, prefix: Tensor, first: int, tokens: int) -> list[int]:
    """So many greedy tokens behind KV `prefix`, after the token `first`."""
    kv = TapeKv(new_buffer(model, prefix.shape[2] + tokens, prefix.dtype))
    kv.buffer[:, :, : prefix.shape[2]] = prefix
    kv.end = prefix.shape[2]
    found = [first]
    for _ in range(tokens):
        found.append(int(model.logits(step(model, kv, found[-1:]))[0].argmax()))
    return found[1:]
