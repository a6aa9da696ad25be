"""What is found of a vLLM by looking at it, and what is refused with a sentence."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from prfaas.testing.fake_vllm import VERSIONS, base_class
from prfaas.testing.fake_vllm_engine import fake_config
from prfaas_connect.vllm.features import (
    UnsupportedVllm,
    detect,
    require_decode,
    require_engine,
    summary,
)


def features_of(name: str) -> Any:
    version = VERSIONS[name]
    config = fake_config(version, "s", role="kv_both").kv_transfer_config
    return detect(base_class(version), config, name), config


@pytest.mark.parametrize("name", VERSIONS)
def test_features_are_found_by_looking(name: str) -> None:
    version = VERSIONS[name]
    found, _ = features_of(name)
    assert found.kv_cache_config == version.three_arguments
    assert found.may_answer_none == version.none_answers
    assert found.load_errors == version.load_errors
    assert found.failure_policy == version.failure_policy
    assert found.request_hook == version.request_hook
    assert found.block_pool == version.block_pool
    assert found.worker_meta == version.worker_meta


def test_a_log_line_names_what_is_missing_and_can_be_missed() -> None:
    assert summary(features_of("0.32")[0]) == "vLLM 0.32"
    assert summary(features_of("0.21")[0]) == "vLLM 0.21 without request_hook, block_pool"


@pytest.mark.parametrize("name", ["0.32", "0.21", "0.13"])
def test_versions_that_can_decode_are_taken(name: str) -> None:
    require_decode(*features_of(name))


@pytest.mark.parametrize(
    ("where", "name", "value", "word"),
    [
        ("parallel_config", "pipeline_parallel_size", 2, "pipeline"),
        ("parallel_config", "decode_context_parallel_size", 2, "context"),
        ("parallel_config", "data_parallel_size", 2, "data parallelism"),
        ("cache_config", "cache_dtype", "fp8_e4m3", "fp8"),
        ("", "speculative_config", SimpleNamespace(), "speculative"),
    ],
)
def test_what_is_not_carried_is_refused_in_a_sentence(
    where: str, name: str, value: object, word: str
) -> None:
    config = fake_config(VERSIONS["0.32"], "s", role="kv_both")
    require_engine(config)
    setattr(getattr(config, where) if where else config, name, value)
    with pytest.raises(UnsupportedVllm, match=word):
        require_engine(config)
