"""The models that the codecs are measured on: the demo model, and the same with QKV bias."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from local_engine.demo_model import fetch_demo_model
from local_engine.loader import LoadedModel, gguf_config, identity_of
from local_engine.models.config import ModelConfig
from local_engine.models.llama import LlamaModel
from local_engine.weights import GgufSource
from prfaas.gguf_file import GgufFile
from prfaas.tokens import Tokenizer
from prfaas.up.paths import default_cache_dir

OUTLIER = 20.0
"""Bias of a few channels of K with slow rotation; models with QKV bias have such channels."""
OUTLIERS_PER_HEAD = 4


class BiasedSource:
    """The demo model's weights with seeded biases: an architecture with QKV bias, nearly as
    coherent.
    """

    def __init__(self, source: GgufSource, config: ModelConfig, seed: int = 0) -> None:
        self._source = source
        self._config = config
        self._seed = seed

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self._source.shape(name)

    def read(self, name: str) -> Tensor:
        if not name.endswith("_proj.bias"):
            return self._source.read(name)
        config = self._config
        kind = name.rsplit(".", 2)[1][0]
        rng = torch.Generator().manual_seed(self._seed + int(name.split(".")[2]) * 8 + ord(kind))
        if kind == "o":
            return torch.zeros(config.hidden_size)
        heads = config.heads if kind == "q" else config.kv_heads
        bias = torch.randn(heads, config.head_dim, generator=rng) * (0.3 if kind == "k" else 0.1)
        if kind == "k":
            half = config.head_dim // 2
            for head in bias:
                picked = torch.randperm(half // 4, generator=rng)[:OUTLIERS_PER_HEAD]
                sides = torch.randint(2, picked.shape, generator=rng) * half
                head[half - 1 - picked + sides] += OUTLIER
        return bias.flatten()


def demo_path(say: Callable[[str], None]) -> Path:
    """The demo model's file, fetched if need be."""
    return fetch_demo_model(default_cache_dir(), say)


def biased(path: Path) -> LoadedModel:
    """The demo model with QKV bias."""
    file = GgufFile(path)
    plain = gguf_config(file)
    config = replace(plain, attention_bias=True)
    source = BiasedSource(GgufSource(file, plain), config)
    model = LlamaModel(config, source, torch.float32, torch.device("cpu"))
    tokenizer = Tokenizer.from_gguf(file)
    return LoadedModel(model, config, tokenizer, identity_of(config, tokenizer.digest))
