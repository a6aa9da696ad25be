"""What a vLLM engine says its model is, so that other engines of the same model say the same.

For llama the digests are those of the embedded engine (a test holds them together), whatever file
the weights came from; other architectures get a digest of their configuration, which two vLLMs
share. That the weights agree is for the numeric probe to prove.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prfaas_connect.port.layout import LayoutError

_NOT_OF_KV = frozenset(
    {
        "_attn_implementation_autoset",
        "_commit_hash",
        "_name_or_path",
        "architectures",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "initializer_range",
        "max_position_embeddings",
        "pad_token_id",
        "tie_word_embeddings",
        "torch_dtype",
        "transformers_version",
        "use_cache",
        "vocab_size",
    }
)
"""Entries of config.json that change no KV value."""


@dataclass(frozen=True, slots=True)
class Identity:
    """See `Hello`."""

    model_identity: str
    config_digest: str
    tokenizer_digest: str


def identity_of(config: Mapping[str, Any], tokenizer_json: Path | None) -> Identity:
    """Of a decoded config.json and its tokenizer.json (none: the tokenizer is not compared)."""
    tokenizer = tokenizer_digest(tokenizer_json) if tokenizer_json is not None else ""
    if config.get("model_type") != "llama":
        rest = {key: value for key, value in config.items() if key not in _NOT_OF_KV}
        digest = _digest(json.dumps(rest, sort_keys=True, default=str))
        return Identity(_digest(json.dumps([digest, tokenizer])), digest, tokenizer)
    llama = _Llama.of(config)
    digest = _digest(json.dumps(llama.fields(), sort_keys=True))
    headers = sorted(llama.tensors().items())
    return Identity(_digest(json.dumps([digest, tokenizer, headers])), digest, tokenizer)


@dataclass(frozen=True, slots=True)
class _Llama:
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_eps: float
    attention_bias: bool
    mlp_bias: bool
    inverse: Tensor

    @staticmethod
    def of(config: Mapping[str, Any]) -> _Llama:
        heads = int(config["num_attention_heads"])
        head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
        return _Llama(
            hidden=int(config["hidden_size"]),
            inner=int(config["intermediate_size"]),
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=head_dim,
            rms_eps=float(config.get("rms_norm_eps", 1e-6)),
            attention_bias=bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
            inverse=_inverse_frequencies(config, head_dim),
        )

    def fields(self) -> dict[str, Any]:
        """Everything that decides KV values besides weights and tokens."""
        return {
            "architecture": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "layers": self.layers,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "rms_eps": f"{self.rms_eps:.3e}",
            "inv_freq": [f"{value:.3e}" for value in self.inverse.tolist()],
            "attention_bias": self.attention_bias,
            "mlp_bias": self.mlp_bias,
            "windows": None,
        }

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every weight but those of the vocabulary."""
        q_rows, kv_rows = self.heads * self.head_dim, self.kv_heads * self.head_dim
        hidden, inner = self.hidden, self.inner
        attention = {"q": (q_rows, hidden), "k": (kv_rows, hidden), "v": (kv_rows, hidden)}
        attention["o"] = (hidden, q_rows)
        mlp = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
        blocks = (("self_attn", attention, self.attention_bias), ("mlp", mlp, self.mlp_bias))
        shapes: dict[str, tuple[int, ...]] = {"model.norm.weight": (hidden,)}
        for index in range(self.layers):
            prefix = f"model.layers.{index}"
            shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
            shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
            for block, matrices, bias in blocks:
                for name, shape in matrices.items():
                    shapes[f"{prefix}.{block}.{name}_proj.weight"] = shape
                    if bias:
                        shapes[f"{prefix}.{block}.{name}_proj.bias"] = shape[:1]
        return shapes


def _inverse_frequencies(config: Mapping[str, Any], head_dim: int) -> Tensor:
    """Radians per token, fp32 [head_dim / 2], under the rope block's scaling."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    inverse = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if kind == "default":
        return inverse
    if kind == "linear":
        return inverse / torch.tensor((float(rope["factor"]),))
    if kind == "llama3":
        return _llama3(inverse, rope, int(config.get("max_position_embeddings", 2048)))
    raise LayoutError(f"rope type {kind!r} has no digest yet: state identity in the configuration")


def _llama3(inverse: Tensor, rope: Mapping[str, Any], context: int) -> Tensor:
    low = float(rope.get("low_freq_factor", 1.0))
    high = float(rope.get("high_freq_factor", 4.0))
    factor = float(rope["factor"])
    context = int(rope.get("original_max_position_embeddings") or context)
    lengths = 2 * math.pi / inverse
    weight = (context / lengths - low) / (high - low)
    between = (1 - weight) * inverse / factor + weight * inverse
    scaled = torch.where(lengths > context / low, inverse / factor, between)
    return torch.where(lengths < context / high, inverse, scaled)


def tokenizer_digest(path: Path) -> str:
    """Digest of vocabulary, merges and special tokens of a tokenizer.json."""
    raw = json.loads(path.read_text(encoding="utf-8"))
    vocab: dict[str, int] = dict(raw["model"].get("vocab") or {})
    special: set[int] = set()
    for token in raw.get("added_tokens") or ():
        vocab[token["content"]] = token["id"]
        if token.get("special"):
            special.add(token["id"])
    hasher = hashlib.blake2b(digest_size=16)

    def add(part: bytes) -> None:
        hasher.update(len(part).to_bytes(4, "little") + part)

    for text, number in sorted(vocab.items(), key=lambda item: item[1]):
        add(number.to_bytes(4, "little"))
        add(_token_bytes(text))
    for left, right in _merges(raw["model"].get("merges") or ()):
        add(_token_bytes(left))
        add(_token_bytes(right))
    for number in sorted(special):
        add(number.to_bytes(4, "little"))
    return hasher.hexdigest()


def _merges(merges: Iterable[Any]) -> Iterable[tuple[str, str]]:
    for merge in merges:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        yield left, right


def _byte_characters() -> dict[str, int]:
    """The printable character that byte-level vocabularies write for each byte."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }


_BYTES = _byte_characters()


def _token_bytes(token: str) -> bytes:
    try:
        return bytes(_BYTES[char] for char in token)
    except KeyError:
        return token.encode()


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
