"""How a vLLM introduces itself to its agent, out of vLLM's own configuration."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prfaas.testing.fake_vllm import VERSIONS
from prfaas.testing.fake_vllm_engine import (
    DIM,
    HEADS,
    LAYERS,
    SlidingWindowSpec,
    fake_config,
    fake_kv_cache_config,
)
from prfaas.testing.tinymodel import make_tiny_model
from prfaas_connect.port.layout import KvLayout, LayoutError
from prfaas_connect.vllm.hello import Options, hello_of, layer_index, layout_of


def config_of(role: str = "kv_both", **options: Any) -> Any:
    return fake_config(VERSIONS["0.32"], "sock", role=role, **options)


def hello(config: Any, kv_cache_config: Any = None) -> Any:
    options = Options.of(config.kv_transfer_config.kv_connector_extra_config)
    return hello_of(config, kv_cache_config, options, epoch="e", version="0.32")


@pytest.mark.parametrize("with_cache", [True, False])
def test_the_layout_is_of_all_ranks_together(with_cache: bool) -> None:
    config = config_of()
    config.parallel_config.tensor_parallel_size = 2
    said = hello(config, fake_kv_cache_config() if with_cache else None)
    (group,) = KvLayout.from_dict(said.layout).groups
    assert (group.layers, group.kv_heads, group.head_dim) == (tuple(range(LAYERS)), HEADS, DIM)
    assert group.dtype == "float32"
    assert said.ranks == [[0, 1], [1, 2]]


@pytest.mark.parametrize(
    ("role", "decodes"), [("kv_consumer", True), ("kv_both", True), ("kv_producer", False)]
)
def test_roles_are_vllm_s(role: str, decodes: bool) -> None:
    assert ("decode" in hello(config_of(role)).roles) == decodes


def test_it_says_how_many_it_decodes_at_once() -> None:
    config = config_of()
    assert hello(config).max_running == 0
    config.scheduler_config = SimpleNamespace(max_num_seqs=256)
    assert hello(config).max_running == 256


@pytest.mark.parametrize(("served", "name"), [(["a", "b"], "a"), ("c", "c"), (None, "fake")])
def test_the_model_is_called_as_vllm_serves_it(served: Any, name: str) -> None:
    config = config_of()
    config.model_config.served_model_name = served
    assert hello(config).model == name


def test_what_is_not_stated_is_computed(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "m")
    config = config_of(model_identity="", config_digest="", tokenizer_digest="stated")
    raw = __import__("json").loads((model / "config.json").read_text())
    config.model_config.hf_config = SimpleNamespace(to_dict=lambda: raw)
    config.model_config.tokenizer = str(model)
    said = hello(config)
    assert said.tokenizer_digest == "stated"
    assert len(said.config_digest) == len(said.model_identity) == 32


def test_other_kinds_of_kv_are_refused() -> None:
    config = config_of()
    with pytest.raises(LayoutError, match="2 kinds of KV cache"):
        layout_of(config, fake_kv_cache_config(groups=2))
    with pytest.raises(LayoutError, match="keeps KV as vLLM's SlidingWindowSpec"):
        layout_of(config, fake_kv_cache_config(kind=SlidingWindowSpec))
    config.model_config.dtype = torch.float64
    with pytest.raises(LayoutError, match="float64"):
        layout_of(config, None)
    config.model_config.use_mla = True
    with pytest.raises(LayoutError, match="MLA"):
        layout_of(config, None)


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("model.layers.3.self_attn.attn", 3),
        ("language_model.model.layers.12.self_attn.attn", 12),
        ("transformer.h.7.attn", 7),
    ],
)
def test_a_cache_s_name_says_its_layer(name: str, index: int) -> None:
    assert layer_index(name) == index


def test_a_cache_without_a_layer_is_refused() -> None:
    with pytest.raises(LayoutError, match="which layer"):
        layer_index("draft.attn")


@pytest.mark.parametrize(
    ("extra", "word"),
    [
        ({}, "socket"),
        ({"socket": ""}, "socket"),
        ({"socket": "s", "chunk": 1}, "chunk is unknown"),
        ({"socket": "s", "chunk_tokens": 0}, "positive"),
        ({"socket": "s", "chunk_tokens": True}, "must be int"),
        ({"socket": 5}, "must be str"),
    ],
)
def test_options_are_checked_by_name(extra: dict[str, Any], word: str) -> None:
    with pytest.raises(LayoutError, match=word):
        Options.of(extra)
