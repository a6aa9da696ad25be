"""A tiny random model on disk, in the format of a Hugging Face directory: Llama, or a hybrid."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_TRAINING_CHARS = 300_000
_Weights = dict[str, npt.NDArray[np.float32]]


def make_tiny_model(
    directory: Path,
    *,
    seed: int = 0,
    layers: int = 4,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    intermediate: int = 128,
    vocab_size: int = 768,
    max_context: int = 8192,
    tied: bool = False,
    rope_scaling: dict[str, Any] | None = None,
    shards: int = 1,
    recurrent: Sequence[int] = (),
    linear_heads: int = 2,
    linear_dim: int = 16,
) -> Path:
    """Write config.json, weights, tokenizer.json and chat template; returns `directory`.

    The same arguments give the same weights on every machine. Logits have a deviation of about 8,
    so that greedy decoding has clear winners; special tokens never win, so answers run to
    `max_tokens`. Layers in `recurrent` are gated linear attention, which makes it a hybrid: its
    states remember tens to hundreds of tokens. Needs neither torch nor transformers.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(vocab_size)
    size = tokenizer.get_vocab_size()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": size,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": max_context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": rope_scaling,
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": tokenizer.token_to_id("<|im_start|>"),
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
        "dtype": "float32",
    }
    if recurrent:
        config |= {
            "architectures": ["PrfaasHybridForCausalLM"],
            "model_type": "prfaas_hybrid",
            "layer_types": [
                "linear_attention" if layer in recurrent else "full_attention"
                for layer in range(layers)
            ],
            "linear_num_heads": linear_heads,
            "linear_key_head_dim": linear_dim,
            "linear_value_head_dim": linear_dim,
        }
    weights = _random_weights(config, np.random.default_rng(seed))
    _write_json(directory / "config.json", config)
    _write_weights(directory, weights, shards)
    tokenizer.save(str(directory / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "add_bos_token": False,
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": max_context,
    }
    _write_json(directory / "tokenizer_config.json", tokenizer_config)
    return directory


def train_tokenizer(vocab_size: int) -> Tokenizer:
    """Byte-level BPE of at most `vocab_size` tokens, trained on Python's own help text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(text, normalized=False) for text in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_standard_library_text().splitlines(keepends=True), trainer)
    return tokenizer


def _standard_library_text() -> str:
    spec = importlib.util.find_spec("pydoc_data.topics")
    if spec is None or spec.origin is None:
        raise RuntimeError("this Python has no pydoc_data.topics to train a tokenizer on")
    return Path(spec.origin).read_text(encoding="utf-8")[:_TRAINING_CHARS]


def _random_weights(config: dict[str, Any], rng: np.random.Generator) -> _Weights:
    """Scales keep activations near 1 and attention sharp enough that old tokens matter."""
    hidden, inner, vocab = (
        config["hidden_size"],
        config["intermediate_size"],
        config["vocab_size"],
    )
    q_rows = config["num_attention_heads"] * config["head_dim"]
    kv_rows = config["num_key_value_heads"] * config["head_dim"]

    def matrix(rows: int, columns: int, gain: float = 1.0) -> npt.NDArray[np.float32]:
        values: npt.NDArray[np.float32] = rng.standard_normal((rows, columns), dtype=np.float32)
        values *= np.float32(gain / columns**0.5)
        return values

    def norm() -> npt.NDArray[np.float32]:
        return np.asarray(rng.uniform(0.8, 1.2, hidden), dtype=np.float32)

    def linear_attention(prefix: str) -> _Weights:
        heads, rows = config["linear_num_heads"], config["linear_key_head_dim"]
        values = heads * config["linear_value_head_dim"]
        return {
            f"{prefix}.q_proj.weight": matrix(heads * rows, hidden, gain=1.5),
            f"{prefix}.k_proj.weight": matrix(heads * rows, hidden, gain=1.5),
            f"{prefix}.v_proj.weight": matrix(values, hidden, gain=2.0),
            f"{prefix}.o_proj.weight": matrix(hidden, values, gain=1.5),
            f"{prefix}.decay_proj.weight": matrix(heads, hidden, gain=0.5),
            # Half-lives from a few tokens to a few hundred.
            f"{prefix}.decay_proj.bias": np.linspace(2.0, 6.0, heads, dtype=np.float32),
        }

    weights: _Weights = {
        "model.embed_tokens.weight": matrix(vocab, hidden, gain=hidden**0.5),
        "model.norm.weight": norm(),
    }
    kinds = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
    for index, kind in enumerate(kinds):
        prefix = f"model.layers.{index}"
        weights[f"{prefix}.input_layernorm.weight"] = norm()
        if kind == "linear_attention":
            weights |= linear_attention(f"{prefix}.self_attn")
        else:
            weights |= {
                f"{prefix}.self_attn.q_proj.weight": matrix(q_rows, hidden, gain=1.5),
                f"{prefix}.self_attn.k_proj.weight": matrix(kv_rows, hidden, gain=1.5),
                f"{prefix}.self_attn.v_proj.weight": matrix(kv_rows, hidden, gain=2.0),
                f"{prefix}.self_attn.o_proj.weight": matrix(hidden, q_rows, gain=1.5),
            }
        weights |= {
            f"{prefix}.post_attention_layernorm.weight": norm(),
            f"{prefix}.mlp.gate_proj.weight": matrix(inner, hidden),
            f"{prefix}.mlp.up_proj.weight": matrix(inner, hidden),
            f"{prefix}.mlp.down_proj.weight": matrix(hidden, inner, gain=2.0),
        }
    specials = len(SPECIAL_TOKENS)
    if config["tie_word_embeddings"]:
        weights["model.embed_tokens.weight"][:specials] *= np.float32(0.1)
    else:
        head = matrix(vocab, hidden, gain=8.0)
        head[:specials] = 0.0
        weights["lm_head.weight"] = head
    return weights


def _write_weights(directory: Path, weights: _Weights, shards: int) -> None:
    metadata = {"format": "pt"}
    if shards == 1:
        save_file(weights, directory / "model.safetensors", metadata)
        return
    names = list(weights)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file_name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: weights[name] for name in names[shard::shards]}
        save_file(part, directory / file_name, metadata)
        weight_map |= dict.fromkeys(part, file_name)
    total = sum(array.nbytes for array in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(directory / "model.safetensors.index.json", index)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
