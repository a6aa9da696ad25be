"""Model configuration, parsed from a Hugging Face config.json or from GGUF metadata."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from local_engine.models.rope import Llama3Scaling, Rope
from prfaas.errors import ConfigError
from prfaas.layout import GroupKind, KvLayout, LayerGroup

LLAMA = "llama"
QWEN2 = "qwen2"
"""Llama with biases on q, k and v."""
QWEN3 = "qwen3"
"""Llama with a norm on each head of q and k."""
HYBRID = "prfaas_hybrid"
"""Llama layers and gated linear attention in turn; no published model has it, tests do."""
SUPPORTED = (LLAMA, QWEN2, QWEN3)
SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class RecurrentLayers:
    """Layers with one state for all tokens, [key_dim, value_dim] for each of `heads`."""

    layers: tuple[int, ...]
    heads: int
    key_dim: int
    value_dim: int

    def __post_init__(self) -> None:
        for name in ("heads", "key_dim", "value_dim"):
            if getattr(self, name) < 1:
                raise ConfigError(f"model config: linear {name} must be positive", field=name)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What the forward pass needs to know; sizes in elements, `max_context` in tokens.

    `attention_bias`: q, k, v and o have biases; `qkv_bias`: o has none. `qk_norm`: each head of q
    and k is normalised before rope.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_context: int
    rms_eps: float
    rope: Rope
    tied_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    qkv_bias: bool = False
    qk_norm: bool = False
    recurrent: RecurrentLayers | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "layers", "max_context"):
            if getattr(self, name) < 1:
                raise ConfigError(f"model config: {name} must be positive", field=name)
        if self.kv_heads < 1 or self.heads < 1 or self.heads % self.kv_heads:
            raise ConfigError(
                f"model config: {self.heads} heads are not a multiple of {self.kv_heads} kv heads",
                field="kv_heads",
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise ConfigError(
                f"model config: head_dim {self.head_dim} must be even", field="head_dim"
            )

    @property
    def biased(self) -> frozenset[str]:
        """Projections of a layer's attention that have a bias, of q, k, v and o."""
        if self.attention_bias:
            return frozenset("qkvo")
        return frozenset("qkv") if self.qkv_bias else frozenset()

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Layers that keep KV of each token."""
        recurrent = self.recurrent.layers if self.recurrent else ()
        return tuple(layer for layer in range(self.layers) if layer not in recurrent)

    def kv_layout(self, kv_dtype: str) -> KvLayout:
        """What a sequence leaves behind in all layers."""
        groups = [
            LayerGroup(
                GroupKind.FULL, self.attention_layers, self.kv_heads, self.head_dim, kv_dtype
            )
        ]
        if self.recurrent:
            r = self.recurrent
            groups.append(
                LayerGroup(
                    GroupKind.RECURRENT, r.layers, r.heads, r.value_dim, "float32", r.key_dim
                )
            )
        return KvLayout(tuple(groups))

    def digest(self) -> str:
        """Digest of everything that decides KV values besides weights and tokens.

        Rounded, so that a config.json and the float32 metadata of a GGUF file of the same model
        agree; context length, vocabulary padding and weight tying do not change KV and are left
        out.
        """
        fields: dict[str, Any] = {
            "architecture": self.architecture,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "layers": self.layers,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "rms_eps": f"{self.rms_eps:.3e}",
            "inv_freq": [f"{value:.3e}" for value in self.rope.inverse_frequencies().tolist()],
            "attention_bias": self.attention_bias,
            "mlp_bias": self.mlp_bias,
            "windows": None,
        }
        # Named only where they are, so that a Llama's digest stays what it was.
        fields |= {name: True for name in ("qkv_bias", "qk_norm") if getattr(self, name)}
        if self.recurrent:
            fields["recurrent"] = asdict(self.recurrent)
        text = json.dumps(fields, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class _HfRope(msgspec.Struct):
    """The rope block of config.json, in its old and its new spelling."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: float | None = None
    factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int | None = None
    partial_rotary_factor: float = 1.0


class _HfConfig(msgspec.Struct):
    """The fields of config.json that we act on; defaults are those of transformers."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    vocab_size: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_theta: float | None = None
    rope_scaling: _HfRope | None = None
    rope_parameters: _HfRope | None = None
    sliding_window: int | None = None
    use_sliding_window: bool = False
    layer_types: list[str] | None = None
    linear_num_heads: int = 0
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    quantization_config: dict[str, Any] | None = None


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Parse a decoded config.json. Raises ConfigError naming the field or the architecture."""
    architecture = raw.get("model_type")
    if architecture not in (*SUPPORTED, HYBRID):
        raise _unsupported_architecture(architecture, SUPPORTED)
    try:
        hf = msgspec.convert(dict(raw), _HfConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"config.json: {error}", field="config.json") from error
    if hf.hidden_act != "silu":
        raise ConfigError(f"hidden_act {hf.hidden_act!r} is not supported", field="hidden_act")
    _refuse_windows(hf, architecture)
    if hf.quantization_config is not None:
        raise ConfigError(
            "quantised safetensors are not supported; use a full-precision or a GGUF file",
            field="quantization_config",
        )
    head_dim = hf.head_dim or _default_head_dim(hf, architecture)
    return ModelConfig(
        architecture=architecture,
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        layers=hf.num_hidden_layers,
        heads=hf.num_attention_heads,
        kv_heads=hf.num_key_value_heads or hf.num_attention_heads,
        head_dim=head_dim,
        max_context=hf.max_position_embeddings,
        rms_eps=hf.rms_norm_eps,
        rope=_rope_from_hf(hf, head_dim),
        tied_embeddings=hf.tie_word_embeddings,
        # Qwen2 always has its biases, and knows no such fields; Qwen3 knows the first.
        attention_bias=hf.attention_bias and architecture != QWEN2,
        mlp_bias=hf.mlp_bias and architecture not in (QWEN2, QWEN3),
        qkv_bias=architecture == QWEN2,
        qk_norm=architecture == QWEN3,
        recurrent=_recurrent_from_hf(hf) if architecture == HYBRID else None,
    )


def config_from_gguf(
    metadata: Mapping[str, Any], tensor_names: Collection[str], rope_factors: Collection[float] = ()
) -> ModelConfig:
    """Parse GGUF metadata (scalars by key; arrays may be left out).

    `rope_factors` is the content of the file's `rope_freqs.weight` tensor, if it has one.
    Raises ConfigError naming the key or the architecture.
    """
    architecture = metadata.get("general.architecture")
    if architecture != LLAMA:
        raise _unsupported_architecture(architecture, (LLAMA,))

    def get(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{architecture}.{key}", default)
        if value is None:
            raise ConfigError(f"GGUF metadata has no {architecture}.{key}", field=key)
        return value

    if get("expert_count", 0):
        raise ConfigError("mixture-of-experts llama is not supported", field="expert_count")
    if get("attention.sliding_window", 0):
        raise ConfigError("sliding_window is not supported for llama", field="sliding_window")
    heads, hidden = int(get("attention.head_count")), int(get("embedding_length"))
    head_dim = int(get("attention.key_length", hidden // heads))
    rotary_dim = int(get("rope.dimension_count", head_dim))
    if rotary_dim != head_dim:
        raise ConfigError(
            f"partial rotary embedding ({rotary_dim} of {head_dim}) is not supported",
            field="rope.dimension_count",
        )
    names = set(tensor_names)
    return ModelConfig(
        architecture=architecture,
        vocab_size=int(get("vocab_size")),
        hidden_size=hidden,
        intermediate_size=int(get("feed_forward_length")),
        layers=int(get("block_count")),
        heads=heads,
        kv_heads=int(get("attention.head_count_kv", heads)),
        head_dim=head_dim,
        max_context=int(get("context_length")),
        rms_eps=float(get("attention.layer_norm_rms_epsilon")),
        rope=Rope(
            theta=float(get("rope.freq_base", 10000.0)),
            head_dim=head_dim,
            divisors=_gguf_divisors(
                str(get("rope.scaling.type", "none")),
                float(get("rope.scaling.factor", 1.0)),
                tuple(rope_factors),
            ),
        ),
        tied_embeddings="output.weight" not in names,
        attention_bias="blk.0.attn_q.bias" in names,
        mlp_bias="blk.0.ffn_down.bias" in names,
    )


def _unsupported_architecture(architecture: object, supported: tuple[str, ...]) -> ConfigError:
    return ConfigError(
        f"model architecture {architecture!r} is not supported (supported: {', '.join(supported)})",
        field="architecture",
    )


def _refuse_windows(hf: _HfConfig, architecture: str) -> None:
    """Qwen's files name a window that is off unless `use_sliding_window` or a layer asks for it."""
    asked = hf.sliding_window is not None
    if architecture in (QWEN2, QWEN3):
        asked = hf.use_sliding_window or "sliding_attention" in (hf.layer_types or ())
    if asked:
        raise ConfigError(
            f"sliding_window is not supported for {architecture}", field="sliding_window"
        )


def _default_head_dim(hf: _HfConfig, architecture: str) -> int:
    """What transformers takes where config.json does not say."""
    if architecture == QWEN3:
        return 128
    return hf.hidden_size // hf.num_attention_heads


def _recurrent_from_hf(hf: _HfConfig) -> RecurrentLayers:
    kinds = hf.layer_types or []
    wrong = sorted(set(kinds) - {"full_attention", "linear_attention"})
    if wrong or len(kinds) != hf.num_hidden_layers or len(set(kinds)) < 2:
        raise ConfigError(
            f"layer_types must say full_attention or linear_attention for each of "
            f"{hf.num_hidden_layers} layers, and both at least once",
            field="layer_types",
        )
    return RecurrentLayers(
        tuple(index for index, kind in enumerate(kinds) if kind == "linear_attention"),
        hf.linear_num_heads,
        hf.linear_key_head_dim,
        hf.linear_value_head_dim,
    )


def _rope_from_hf(hf: _HfConfig, head_dim: int) -> Rope:
    block = hf.rope_parameters or hf.rope_scaling or _HfRope()
    kind = block.rope_type or block.type or "default"
    theta = block.rope_theta or hf.rope_theta or 10000.0
    if kind not in SUPPORTED_ROPE_TYPES:
        raise ConfigError(
            f"rope type {kind!r} is not supported (supported: {', '.join(SUPPORTED_ROPE_TYPES)})",
            field="rope_type",
        )
    if block.partial_rotary_factor != 1.0:
        raise ConfigError(
            "partial rotary embedding is not supported", field="partial_rotary_factor"
        )
    if kind == "default":
        return Rope(theta, head_dim)
    if block.factor is None:
        raise ConfigError(f"rope type {kind!r} needs a factor", field="factor")
    if kind == "linear":
        return Rope(theta, head_dim, divisors=(block.factor,))
    scaling = Llama3Scaling(
        factor=block.factor,
        low_freq_factor=block.low_freq_factor,
        high_freq_factor=block.high_freq_factor,
        original_context=block.original_max_position_embeddings or hf.max_position_embeddings,
    )
    return Rope(theta, head_dim, llama3=scaling)


def _gguf_divisors(kind: str, factor: float, factors: tuple[float, ...]) -> tuple[float, ...]:
    if kind not in ("none", "linear"):
        raise ConfigError(
            f"rope scaling {kind!r} is not supported (supported: none, linear)",
            field="rope.scaling.type",
        )
    if kind == "none":
        return factors
    return tuple(factor * value for value in factors) or (factor,)
