"""Llama layers and gated linear attention in turn: the smallest model that keeps a state.

A recurrent layer has, in place of attention, for each head the recurrence

    S[t] = a[t] S[t-1] + k[t] v[t]^T        o[t] = q[t] S[t]

with unit k, one decay a[t] = sigmoid(w x[t] + b) for the head, and the state S [key_dim, value_dim]
in float32 (Mamba-2's recurrence, arXiv 2405.21060, with the decay of gated linear attention,
arXiv 2312.06635). Its output is normalised for each head. Everything else is as in Llama.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from local_engine.models.base import AttentionKv, ForwardBatch, LayerHook
from local_engine.models.config import ModelConfig, RecurrentLayers
from local_engine.models.llama import LayerWeights, LlamaModel, WeightLoader

# Tokens computed at once; the work for each grows with it.
_BLOCK = 128


@dataclass(frozen=True, slots=True)
class _Decay:
    """Logits of a recurrent layer's decay: weight [heads, hidden], bias [heads]."""

    weight: Tensor
    bias: Tensor


class HybridModel(LlamaModel):
    """Owns the weights of one model on one device; stateless between calls, nothing to close."""

    def _load_more(self, load: WeightLoader) -> None:
        self._decays = {
            index: _Decay(
                load(f"model.layers.{index}.self_attn.decay_proj.weight"),
                load(f"model.layers.{index}.self_attn.decay_proj.bias"),
            )
            for index in _recurrent(self.config).layers
        }
        groups = (self.config.attention_layers, _recurrent(self.config).layers)
        # Of each layer: how many of its kind are before it.
        self._places = {index: place for group in groups for place, index in enumerate(group)}

    @torch.inference_mode()
    def forward(
        self,
        batch: ForwardBatch,
        kv: AttentionKv,
        on_layer: LayerHook | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """As `LlamaModel.forward`; `batch.seqs` must cover the rows."""
        cos, sin = self._rotation(batch.positions)
        hidden = F.embedding(batch.token_ids, self._embed)
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            decay, place = self._decays.get(index), self._places[index]
            mixed = None
            if decay is None:
                q, k, v = self._project(layer, hidden, cos, sin)
                kv.write(place, k, v)
            else:
                q, k, v = _linear_qkv(self.config, layer, hidden)
                log_decay = self._log_decay(layer, decay, hidden)
                mixed = self._recur(place, (q, k, v), log_decay, batch, kv)
            if on_layer is not None:
                on_layer(index, k, v)
            if index == last and rows is not None and len(rows) == 0:
                return hidden[:0]
            if mixed is None:
                mixed = kv.attend(place, q)
            mixed = mixed.flatten(1)
            if index == last and rows is not None:
                mixed, hidden = mixed[rows], hidden[rows]
            hidden += F.linear(mixed, layer.o, layer.o_bias)
            hidden += self._mlp(layer, hidden)
        return hidden

    def _log_decay(self, layer: LayerWeights, decay: _Decay, hidden: Tensor) -> Tensor:
        """Logarithms of the decays, float32 [tokens, heads]."""
        normed = F.rms_norm(hidden, layer.input_norm.shape, layer.input_norm, self.config.rms_eps)
        return F.logsigmoid(F.linear(normed, decay.weight, decay.bias).float())

    def _recur(
        self,
        place: int,
        qkv: tuple[Tensor, Tensor, Tensor],
        log_decay: Tensor,
        batch: ForwardBatch,
        kv: AttentionKv,
    ) -> Tensor:
        """Advance the states of all sequences; normalised outputs [tokens, heads, value_dim]."""
        sizes = _recurrent(self.config)
        states = kv.read_states(place, (sizes.heads, sizes.key_dim, sizes.value_dim))
        out = torch.empty_like(qkv[2])
        if all(seq.q_len == 1 for seq in batch.seqs):
            out, states = _one_each(qkv, log_decay, states)
        else:
            for number, seq in enumerate(batch.seqs):
                end = seq.q_start + seq.q_len
                for start in range(seq.q_start, end, _BLOCK):
                    at = slice(start, min(start + _BLOCK, end))
                    q, k, v = (x[at] for x in qkv)
                    out[at], states[number] = _block(q, k, v, log_decay[at], states[number])
        kv.write_states(place, states)
        return F.rms_norm(out, out.shape[-1:], eps=self.config.rms_eps).to(self.dtype)


def _recurrent(config: ModelConfig) -> RecurrentLayers:
    assert config.recurrent is not None
    return config.recurrent


def _linear_qkv(
    config: ModelConfig, layer: LayerWeights, hidden: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Float32 queries and unit keys [tokens, heads, key_dim], values [tokens, heads, value_dim]."""
    sizes = _recurrent(config)
    normed = F.rms_norm(hidden, layer.input_norm.shape, layer.input_norm, config.rms_eps)
    qkv = F.linear(normed, layer.qkv, layer.qkv_bias).float()
    keys = sizes.heads * sizes.key_dim
    q, k, v = (
        x.reshape(len(x), sizes.heads, -1)
        for x in (qkv[:, :keys], qkv[:, keys : 2 * keys], qkv[:, 2 * keys :])
    )
    return q, F.normalize(k, dim=-1), v


def _one_each(
    qkv: tuple[Tensor, Tensor, Tensor], log_decay: Tensor, states: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of each sequence: outputs and states, [batch, heads, ...]."""
    q, k, v = qkv
    states = log_decay.exp()[..., None, None] * states + k.unsqueeze(-1) * v.unsqueeze(-2)
    return torch.einsum("bhk,bhkv->bhv", q, states), states


def _block(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Several tokens of one sequence at once: outputs [tokens, heads, value_dim], the state after.

    From the start of the block to token t the state has decayed by exp(total[t]); what token s
    added has by exp(total[t] - total[s]).
    """
    total = log_decay.cumsum(0)
    between = total.unsqueeze(1) - total.unsqueeze(0)
    causal = torch.ones(between.shape[:2], dtype=torch.bool, device=q.device).tril()
    weights = between.masked_fill(~causal.unsqueeze(-1), -torch.inf).exp()
    scores = torch.einsum("thk,shk->tsh", q, k) * weights
    out = torch.einsum("tsh,shv->thv", scores, v)
    out += total.exp().unsqueeze(-1) * torch.einsum("thk,hkv->thv", q, state)
    late = (total[-1] - total).exp().unsqueeze(-1)
    added = torch.einsum("thk,thv->hkv", k * late, v)
    return out, total[-1].exp()[:, None, None] * state + added
