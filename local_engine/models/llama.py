"""Llama, Qwen2 and Qwen3 for inference: fused projections, rope, grouped-query attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from local_engine.models.base import AttentionKv, ForwardBatch, LayerHook
from local_engine.models.config import ModelConfig
from local_engine.models.rope import rotate


class TensorSource(Protocol):
    """Weights by their Hugging Face names; a file format is one implementation."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of a tensor, None if the source has no such tensor."""

    def read(self, name: str) -> Tensor:
        """The tensor on the CPU, in whatever dtype it is stored (dequantised if need be)."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer; every matrix is [out, in], q, k, v and gate, up stacked along out.

    `qk_norm`: weights for each head of q, then of k, [heads + kv_heads, head_dim].
    """

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


class LlamaModel:
    """Owns the weights of one model on one device; stateless between calls, nothing to close."""

    def __init__(
        self, config: ModelConfig, source: TensorSource, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        load = WeightLoader(source, dtype, device)
        self._embed = load("model.embed_tokens.weight")
        self._norm = load("model.norm.weight")
        self._lm_head = self._embed if config.tied_embeddings else load("lm_head.weight")
        self._layers = [_load_layer(config, index, load) for index in range(config.layers)]
        self._inv_freq = config.rope.inverse_frequencies().to(device).unsqueeze(0)
        self._load_more(load)

    def _load_more(self, load: WeightLoader) -> None:
        """Weights that the layers of another architecture have besides."""

    @torch.inference_mode()
    def forward(
        self,
        batch: ForwardBatch,
        kv: AttentionKv,
        on_layer: LayerHook | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Run one step: writes every token's KV and returns hidden states [rows, hidden].

        `rows` (int64) are the batch rows whose hidden states are wanted, None all of them: the last
        layer computes no others, and with no rows at all it stops at its KV. The final norm is left
        to `logits`. `on_layer` is called as soon as a layer's KV exists, before its attention.
        """
        cos, sin = self._rotation(batch.positions)
        hidden = F.embedding(batch.token_ids, self._embed)
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            q, k, v = self._project(layer, hidden, cos, sin)
            kv.write(index, k, v)
            if on_layer is not None:
                on_layer(index, k, v)
            if index == last and rows is not None and len(rows) == 0:
                return hidden[:0]
            attended = kv.attend(index, q).flatten(1)
            if index == last and rows is not None:
                attended, hidden = attended[rows], hidden[rows]
            hidden += F.linear(attended, layer.o, layer.o_bias)
            hidden += self._mlp(layer, hidden)
        return hidden

    @torch.inference_mode()
    def logits(self, hidden_rows: Tensor) -> Tensor:
        """Next-token logits, fp32 [rows, vocab], of hidden rows that `forward` returned."""
        normed = F.rms_norm(hidden_rows, self._norm.shape, self._norm, self.config.rms_eps)
        return F.linear(normed, self._lm_head).float()

    def output_projection(self, layer: int) -> Tensor:
        """Weight of the projection behind a layer's attention, [hidden, heads * head_dim]."""
        return self._layers[layer].o

    def _project(
        self, layer: LayerWeights, hidden: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values, each [tokens, its heads, head_dim]."""
        config = self.config
        shape = (hidden.shape[0], -1, config.head_dim)
        normed = F.rms_norm(hidden, layer.input_norm.shape, layer.input_norm, config.rms_eps)
        qkv = F.linear(normed, layer.qkv, layer.qkv_bias).view(shape)
        rotated = config.heads + config.kv_heads
        qk = qkv[:, :rotated]
        if layer.qk_norm is not None:
            qk = F.rms_norm(qk, (config.head_dim,), eps=config.rms_eps) * layer.qk_norm
        qk = rotate(qk, cos, sin)
        return qk[:, : config.heads], qk[:, config.heads :], qkv[:, rotated:]

    def _mlp(self, layer: LayerWeights, hidden: Tensor) -> Tensor:
        normed = F.rms_norm(hidden, layer.post_norm.shape, layer.post_norm, self.config.rms_eps)
        gate, up = F.linear(normed, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
        activated = F.silu(gate, inplace=True).mul_(up)
        return F.linear(activated, layer.down, layer.down_bias)

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [tokens, 1, head_dim / 2]; angles in fp32 whatever the dtype."""
        angles = positions.unsqueeze(1).float() * self._inv_freq
        return (
            angles.cos().to(self.dtype).unsqueeze(1),
            angles.sin().to(self.dtype).unsqueeze(1),
        )


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face name and shape of every weight a model of this configuration has."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    attention = {"q": (q_rows, hidden), "k": (kv_rows, hidden), "v": (kv_rows, hidden)}
    attention["o"] = (hidden, q_rows)
    mlp = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    recurrent = config.recurrent.layers if config.recurrent else ()
    for index in range(config.layers):
        prefix = f"model.layers.{index}"
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        mixer = attention
        if config.recurrent and index in recurrent:
            r = config.recurrent
            key_rows, value_rows = r.heads * r.key_dim, r.heads * r.value_dim
            mixer = {"q": (key_rows, hidden), "k": (key_rows, hidden), "v": (value_rows, hidden)}
            mixer["o"] = (hidden, value_rows)
            shapes[f"{prefix}.self_attn.decay_proj.weight"] = (r.heads, hidden)
            shapes[f"{prefix}.self_attn.decay_proj.bias"] = (r.heads,)
        elif config.qk_norm:
            for name in "qk":
                shapes[f"{prefix}.self_attn.{name}_norm.weight"] = (config.head_dim,)
        for block, matrices, biased in (
            ("self_attn", mixer, config.biased),
            ("mlp", mlp, frozenset(mlp) if config.mlp_bias else frozenset[str]()),
        ):
            for name, shape in matrices.items():
                shapes[f"{prefix}.{block}.{name}_proj.weight"] = shape
                if name in biased:
                    shapes[f"{prefix}.{block}.{name}_proj.bias"] = shape[:1]
    return shapes


class WeightLoader:
    """Reads tensors, stacks them along their first dimension, and casts them to their home."""

    def __init__(self, source: TensorSource, dtype: torch.dtype, device: torch.device) -> None:
        self._source = source
        self._dtype = dtype
        self._device = device

    def __call__(self, *names: str) -> Tensor:
        if len(names) == 1:
            return self._source.read(names[0]).to(self._device, self._dtype).contiguous()
        parts = [self._source.read(name).to(self._device, self._dtype) for name in names]
        return torch.cat(parts)


def _load_layer(config: ModelConfig, index: int, load: WeightLoader) -> LayerWeights:
    prefix = f"model.layers.{index}"

    def stack(block: str, suffix: str, *names: str) -> Tensor:
        return load(*(f"{prefix}.{block}.{name}_proj.{suffix}" for name in names))

    def qk_norm() -> Tensor:
        q, k = (load(f"{prefix}.self_attn.{name}_norm.weight") for name in "qk")
        return torch.cat((q.expand(config.heads, -1), k.expand(config.kv_heads, -1)))

    biased, mlp_bias = config.biased, config.mlp_bias
    return LayerWeights(
        input_norm=load(f"{prefix}.input_layernorm.weight"),
        qkv=stack("self_attn", "weight", "q", "k", "v"),
        qkv_bias=stack("self_attn", "bias", "q", "k", "v") if "q" in biased else None,
        qk_norm=qk_norm() if config.qk_norm else None,
        o=stack("self_attn", "weight", "o"),
        o_bias=stack("self_attn", "bias", "o") if "o" in biased else None,
        post_norm=load(f"{prefix}.post_attention_layernorm.weight"),
        gate_up=stack("mlp", "weight", "gate", "up"),
        gate_up_bias=stack("mlp", "bias", "gate", "up") if mlp_bias else None,
        down=stack("mlp", "weight", "down"),
        down_bias=stack("mlp", "bias", "down") if mlp_bias else None,
    )
