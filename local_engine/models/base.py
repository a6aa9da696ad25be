"""What a model asks of the engine that runs it: one step's batch, and attention over stored KV."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

# Called once per layer and step with (layer, k, v): the keys (after rope) and values of this step's
# tokens, each [tokens, kv_heads, head_dim] in compute dtype. The tensors may be views; a hook may
# keep them but must not write to them. Of a recurrent layer: once its states are stored.
LayerHook = Callable[[int, Tensor, Tensor], None]


@dataclass(frozen=True, slots=True)
class SeqSlice:
    """One sequence's share of a step.

    `q_start`, `q_len`: its rows in the batch. `ctx_len`: its tokens whose KV was stored before this
    step, so the step computes tokens [ctx_len, ctx_len + q_len). `slots`: int64
    [ctx_len + q_len], the pool slot of every token up to and including this step's.
    """

    q_start: int
    q_len: int
    ctx_len: int
    slots: Tensor


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The tokens of one step: rows of all sequences, one after the other, without padding.

    `token_ids`, `positions`: int64 [tokens] on the model's device. `seqs` cover the rows in order.
    """

    token_ids: Tensor
    positions: Tensor
    seqs: tuple[SeqSlice, ...]


class AttentionKv(Protocol):
    """KV storage bound to one `ForwardBatch`; the model knows nothing of pages or slots.

    `layer` counts the layers that keep KV, or those that keep states, from 0.
    """

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store this step's keys (after rope) and values, each [tokens, kv_heads, head_dim]."""

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """Causal attention of q [tokens, heads, head_dim] over everything its sequence has stored.

        Scores are scaled by head_dim ** -0.5; query head h reads kv head h // (heads / kv_heads).
        Called after `write` of the same layer. Returns [tokens, heads, head_dim] in q's dtype.
        """

    def read_states(self, layer: int, shape: tuple[int, int, int]) -> Tensor:
        """States of the batch's sequences before this step, float32 [sequences, *shape].

        A copy; zeros where a sequence begins. `shape`: heads, state_dim, head_dim.
        """

    def write_states(self, layer: int, states: Tensor) -> None:
        """Store the states after this step's tokens, in the form `read_states` gives."""
