"""The same tiny model as a GGUF file, written with the `gguf` package."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

_TOP = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_BLOCK = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_tiny_gguf(
    model_dir: Path,
    path: Path,
    *,
    pre: str = "smollm",
    padding_tokens: int = 0,
    metadata: dict[str, Any] | None = None,
    rope_factors: npt.NDArray[np.float32] | None = None,
) -> Path:
    """Convert the directory that `make_tiny_model` wrote (one shard) to an F32 GGUF; returns path.

    `pre` names the pre-tokeniser; `padding_tokens` unused tokens are appended to the vocabulary;
    `metadata` (integers, floats, strings) is added to or overrides what is written.
    """
    config = json.loads((model_dir / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "llama")
    keys: dict[str, Any] = {
        "llama.block_count": config["num_hidden_layers"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.key_length": config["head_dim"],
        "llama.attention.value_length": config["head_dim"],
        "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "llama.rope.freq_base": config["rope_theta"],
        "llama.rope.dimension_count": config["head_dim"],
        "llama.vocab_size": config["vocab_size"] + padding_tokens,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.bos_token_id": config["bos_token_id"],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
        "tokenizer.ggml.add_bos_token": False,
    } | (metadata or {})
    for key, value in keys.items():
        _add(writer, key, value)
    _add_vocab(writer, model_dir, padding_tokens)
    for name, tensor in load_file(model_dir / "model.safetensors").items():
        stem, kind = name.rsplit(".", 1)
        values = _with_padding_rows(tensor, stem, padding_tokens)
        writer.add_tensor(f"{_gguf_stem(stem)}.{kind}", _interleave(values, stem, config))
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)


def _add_vocab(writer: Any, model_dir: Path, padding_tokens: int) -> None:
    tokenizer = json.loads((model_dir / "tokenizer.json").read_text())
    vocab: dict[str, int] = tokenizer["model"]["vocab"]
    special = {token["content"] for token in tokenizer["added_tokens"]}
    tokens = sorted(vocab, key=lambda token: vocab[token])
    padding = [f"[PAD{len(tokens) + index}]" for index in range(padding_tokens)]
    kinds = [3 if token in special else 1 for token in tokens] + [5] * padding_tokens
    writer.add_token_list(tokens + padding)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    template = json.loads((model_dir / "tokenizer_config.json").read_text())["chat_template"]
    writer.add_chat_template(template)


def _gguf_stem(stem: str) -> str:
    if stem in _TOP:
        return _TOP[stem]
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem)
    assert match is not None
    return f"blk.{match[1]}.{_BLOCK[match[2]]}"


def _with_padding_rows(
    tensor: npt.NDArray[np.float32], stem: str, padding_tokens: int
) -> npt.NDArray[np.float32]:
    if stem not in ("model.embed_tokens", "lm_head") or not padding_tokens:
        return tensor
    return np.pad(tensor, ((0, padding_tokens), (0, 0)))


def _interleave(
    tensor: npt.NDArray[np.float32], stem: str, config: dict[str, Any]
) -> npt.NDArray[np.float32]:
    """GGUF's rope layout pairs neighbouring rows of a head, ours those half a head apart."""
    if not stem.endswith(("q_proj", "k_proj")):
        return tensor
    key = "num_attention_heads" if stem.endswith("q_proj") else "num_key_value_heads"
    heads = config[key]
    split = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(tensor.shape))
