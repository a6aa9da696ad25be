"""Weights on disk under their Hugging Face names: safetensors directories and GGUF files."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from local_engine.models.config import ModelConfig
from prfaas.errors import ConfigError
from prfaas.gguf_file import GgufFile

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"

# GGUF block tensor -> Hugging Face module, for the llama architecture.
_GGUF_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_GGUF_BLOCK_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
# Rope frequencies of a GGUF file; they are part of the configuration, not weights.
ROPE_FACTORS = "rope_freqs.weight"


class SafetensorsSource:
    """The tensors of a Hugging Face directory, one file or sharded; files are memory-mapped."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[str, Any] = {}
        for file_name, names in _shards(directory).items():
            path = directory / file_name
            try:
                handle: Any = safe_open(path, framework="pt")
            except FileNotFoundError as error:
                raise ConfigError(f"{directory} lacks the weight file {file_name}") from error
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{path} is not a whole safetensors file: {error}") from error
            present = set(handle.keys())
            for name in present if names is None else names:
                if name not in present:
                    raise ConfigError(f"{path} lacks tensor {name}, which the index says it has")
                self._files[name] = handle

    def names(self) -> frozenset[str]:
        return frozenset(self._files)

    def shape(self, name: str) -> tuple[int, ...] | None:
        if name not in self._files:
            return None
        return tuple(self._files[name].get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        try:
            tensor: Tensor = self._files[name].get_tensor(name)
        except SafetensorError as error:
            raise ConfigError(f"{self._directory}: cannot read {name}: {error}") from error
        return tensor


class GgufSource:
    """The tensors of a llama GGUF file, dequantised, rows in Hugging Face order."""

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self._file = file
        self._config = config
        self._gguf_names = {
            hugging_face_name(name): name for name in file.tensor_names if name != ROPE_FACTORS
        }

    def names(self) -> frozenset[str]:
        return frozenset(self._gguf_names)

    def shape(self, name: str) -> tuple[int, ...] | None:
        gguf_name = self._gguf_names.get(name)
        return None if gguf_name is None else self._file.shape(gguf_name)

    def read(self, name: str) -> Tensor:
        tensor = torch.from_numpy(self._file.tensor(self._gguf_names[name]))
        if ".q_proj." in name:
            return _from_interleaved(tensor, self._config.heads)
        if ".k_proj." in name:
            return _from_interleaved(tensor, self._config.kv_heads)
        return tensor


WeightSource = SafetensorsSource | GgufSource


def hugging_face_name(gguf_name: str) -> str:
    """The Hugging Face name of a GGUF tensor; an unknown name is returned as it is."""
    if gguf_name in _GGUF_TOP:
        return _GGUF_TOP[gguf_name]
    match = _GGUF_BLOCK_NAME.fullmatch(gguf_name)
    if match is None or match[2] not in _GGUF_BLOCK:
        return gguf_name
    return f"model.layers.{match[1]}.{_GGUF_BLOCK[match[2]]}.{match[3]}"


def check_tensors(source: WeightSource, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ConfigError naming the first missing, misshapen or unexpected tensor."""
    for name, shape in expected.items():
        found = source.shape(name)
        if found is None:
            raise ConfigError(f"weights lack tensor {name}", field=name)
        if found != shape:
            raise ConfigError(
                f"tensor {name} has shape {list(found)}, the config says {list(shape)}", field=name
            )
    # A tied head may be stored all the same, and old files carry their rope table.
    unexpected = sorted(
        name
        for name in source.names() - expected.keys()
        if name != "lm_head.weight" and not name.endswith(".rotary_emb.inv_freq")
    )
    if unexpected:
        raise ConfigError(
            f"weights have tensors that a model of this config does not use: {unexpected[0]}"
            + (f" and {len(unexpected) - 1} more" if len(unexpected) > 1 else ""),
            field=unexpected[0],
        )


def _from_interleaved(rows: Tensor, heads: int) -> Tensor:
    """Undo GGUF's rope layout: it pairs rows (2 i, 2 i + 1) of a head, we (i, i + dim / 2)."""
    half = rows.shape[0] // heads // 2
    return rows.view(heads, half, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _shards(directory: Path) -> dict[str, list[str] | None]:
    """File name -> tensors the index puts there, or None for whatever the file holds."""
    if (directory / _SINGLE_FILE).is_file():
        return {_SINGLE_FILE: None}
    index = directory / _INDEX_FILE
    if not index.is_file():
        raise ConfigError(f"{directory} has neither {_SINGLE_FILE} nor {_INDEX_FILE}")
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards: dict[str, list[str] | None] = {}
        for name, file_name in weight_map.items():
            if Path(file_name).name != file_name:
                raise ConfigError(f"{index}: shard {file_name!r} is not a plain file name")
            names = shards.setdefault(file_name, [])
            assert names is not None
            names.append(name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{index} is not a weight index: {error!r}") from error
    return shards
