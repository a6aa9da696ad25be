"""Configurations parse the same from both formats, and what is not supported is named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from local_engine.models.config import ModelConfig, config_from_gguf, config_from_hf
from prfaas.errors import ConfigError

HF: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
GGUF: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.vocab_size": 1000,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.block_count": 3,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.context_length": 2048,
    "llama.attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
    "llama.rope.freq_base": 100000.0,
    "llama.rope.dimension_count": 16,
}


def test_both_formats_give_one_configuration() -> None:
    hf, gguf = config_from_hf(HF), config_from_gguf(GGUF, {"blk.0.attn_q.weight"})
    assert replace(gguf, rms_eps=1e-5) == hf
    assert gguf.digest() == hf.digest()
    assert hf == ModelConfig(
        architecture="llama",
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=96,
        layers=3,
        heads=4,
        kv_heads=2,
        head_dim=16,
        max_context=2048,
        rms_eps=1e-5,
        rope=hf.rope,
        tied_embeddings=True,
        attention_bias=False,
        mlp_bias=False,
    )
    assert (hf.rope.theta, hf.rope.divisors, hf.rope.llama3) == (100000.0, (), None)


@pytest.mark.parametrize(
    ("names", "field", "value"),
    [
        ({"output.weight"}, "tied_embeddings", False),
        ({"blk.0.attn_q.bias"}, "attention_bias", True),
        ({"blk.0.ffn_down.bias"}, "mlp_bias", True),
    ],
)
def test_gguf_tensors_tell_what_the_metadata_does_not(
    names: set[str], field: str, value: bool
) -> None:
    assert getattr(config_from_gguf(GGUF, names), field) is value


@pytest.mark.parametrize(
    "change",
    [
        {"rope_theta": 10000.0},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rms_norm_eps": 1e-6},
        {"num_hidden_layers": 4},
        {"num_key_value_heads": 4},
        {"head_dim": 32},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"intermediate_size": 128},
    ],
)
def test_what_decides_kv_changes_the_digest(change: dict[str, Any]) -> None:
    assert config_from_hf(HF | change).digest() != config_from_hf(HF).digest()


@pytest.mark.parametrize(
    "change",
    [{"max_position_embeddings": 8192}, {"vocab_size": 1024}, {"tie_word_embeddings": False}],
)
def test_what_does_not_decide_kv_leaves_the_digest(change: dict[str, Any]) -> None:
    assert config_from_hf(HF | change).digest() == config_from_hf(HF).digest()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba2"}, r"'mamba2' is not supported \(supported: llama, qwen2, qwen3\)"),
        ({"model_type": None}, "None is not supported"),
        ({"hidden_size": "64"}, r"config.json: .*hidden_size"),
        ({"hidden_size": 0}, "hidden_size must be positive"),
        ({"num_key_value_heads": 3}, "4 heads are not a multiple of 3 kv heads"),
        ({"num_attention_heads": 0, "head_dim": 16}, "0 heads"),
        ({"head_dim": 15}, "head_dim 15 must be even"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"sliding_window": 512}, "sliding_window"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised safetensors"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope type 'dynamic'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'linear' needs a factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.0}}, "must be positive"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0}},
            "high_freq_factor must exceed",
        ),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial rotary"),
    ],
)
def test_a_config_json_that_is_wrong_or_not_supported_is_named(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from_hf(HF | change)


def test_a_missing_field_is_named() -> None:
    with pytest.raises(ConfigError, match="num_hidden_layers"):
        config_from_hf({key: value for key, value in HF.items() if key != "num_hidden_layers"})
    with pytest.raises(ConfigError, match=r"llama\.block_count"):
        config_from_gguf({k: v for k, v in GGUF.items() if k != "llama.block_count"}, ())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"general.architecture": "qwen2"}, "'qwen2' is not supported"),
        ({"llama.expert_count": 8}, "mixture-of-experts"),
        ({"llama.attention.sliding_window": 512}, "sliding_window"),
        ({"llama.rope.dimension_count": 8}, "8 of 16"),
        ({"llama.rope.scaling.type": "yarn"}, "rope scaling 'yarn'"),
    ],
)
def test_gguf_metadata_that_is_not_supported_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from_gguf(GGUF | change, ())


def test_rope_factors_of_gguf_equal_llama3_scaling_of_config_json() -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 256}
    hf = config_from_hf(HF | {"rope_scaling": scaling})
    plain = config_from_hf(HF).rope.inverse_frequencies()
    factors = (plain / hf.rope.inverse_frequencies()).tolist()
    assert 1.0 in factors
    assert 8.0 in factors
    assert any(1.0 < factor < 8.0 for factor in factors)
    gguf = config_from_gguf(GGUF, (), factors)
    assert gguf.digest() == hf.digest() != config_from_hf(HF).digest()


def test_linear_scaling_is_one_in_both_formats() -> None:
    hf = config_from_hf(HF | {"rope_scaling": {"type": "linear", "factor": 4.0}})
    metadata = GGUF | {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    gguf = config_from_gguf(metadata, ())
    assert gguf.digest() == hf.digest()
    assert gguf.rope.divisors == hf.rope.divisors == (4.0,)


def test_the_newer_spelling_of_rope_settings_means_the_same() -> None:
    old = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}}
    plain = {key: value for key, value in HF.items() if key != "rope_theta"}
    assert config_from_hf(plain | old) == config_from_hf(plain | new)


def test_a_list_of_factors_must_fit_the_head() -> None:
    with pytest.raises(ConfigError, match="7 factors for head_dim 16"):
        config_from_gguf(GGUF, (), [1.0] * 7)
