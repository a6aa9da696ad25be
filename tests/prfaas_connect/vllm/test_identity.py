"""The digests of a vLLM engine are those of the embedded engine of the same model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from local_engine.loader import identity_of as embedded_identity
from local_engine.models.config import config_from_hf
from prfaas.tokens import Tokenizer
from prfaas_connect.port.layout import LayoutError
from prfaas_connect.vllm.identity import identity_of

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "architectures": ["LlamaForCausalLM"],
    "dtype": "float32",
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}
CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "theta": {"rope_theta": 100000.0},
    "new spelling": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    "linear": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama3": {"rope_theta": 500000.0, "rope_scaling": LLAMA3},
    "head_dim": {"head_dim": 32},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "all heads": {"num_key_value_heads": None},
    "tied": {"tie_word_embeddings": True, "vocab_size": 320},
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a byte-level tokenizer of both spellings of merges and a special token."""
    directory = tmp_path_factory.mktemp("tokenizer")
    vocab = {chr(0x21 + index): index for index in range(80)}
    vocab |= {"ab": 80, "abc": 81, "\u0120a": 82, "\u0120": 83, "日": 84}
    raw = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": 85,
                "content": "<|end|>",
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        ],
        "normalizer": None,
        "pre_tokenizer": BYTE_LEVEL,
        "post_processor": None,
        "decoder": BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "vocab": vocab,
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "merges": [["a", "b"], ["ab", "c"], ["\u0120", "a"]],
        },
    }
    (directory / "tokenizer.json").write_text(json.dumps(raw))
    return directory


@pytest.mark.parametrize("name", CHANGES)
def test_both_engines_say_the_same_of_a_llama(tokenizer: Path, name: str) -> None:
    raw = LLAMA | CHANGES[name]
    expected = embedded_identity(config_from_hf(raw), Tokenizer.load(tokenizer).digest)
    found = identity_of(raw, tokenizer / "tokenizer.json")
    assert found.tokenizer_digest == expected.tokenizer_digest
    assert found.config_digest == expected.config_digest
    assert found.model_identity == expected.model_identity


def test_what_changes_kv_changes_the_digest() -> None:
    digests = {name: identity_of(LLAMA | change, None) for name, change in CHANGES.items()}
    same = {digests[name].config_digest for name in ("plain", "tied")}
    assert len(same) == 1
    assert len({each.config_digest for each in digests.values()}) == len(CHANGES) - 1


def test_other_architectures_are_told_apart_by_their_configuration() -> None:
    base = {"model_type": "qwen9", "hidden_size": 64, "rope_theta": 1e6, "dtype": "bfloat16"}
    one = identity_of(base, None)
    assert one == identity_of(base | {"dtype": "float32", "transformers_version": "7"}, None)
    assert one != identity_of(base | {"rope_theta": 1e5}, None)


def test_a_rope_without_a_digest_is_refused_by_name() -> None:
    with pytest.raises(LayoutError, match="yarn"):
        identity_of(LLAMA | {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, None)
