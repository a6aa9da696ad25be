"""Tensor names and row order of the file formats."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from local_engine.loader import gguf_config
from local_engine.models.llama import expected_tensors
from local_engine.weights import GgufSource, SafetensorsSource, hugging_face_name
from prfaas.gguf_file import GgufFile
from prfaas.testing.tinygguf import write_tiny_gguf
from prfaas.testing.tinymodel import make_tiny_model


@pytest.mark.parametrize(
    ("gguf", "hugging_face"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("output.weight", "lm_head.weight"),
        ("blk.12.attn_q.weight", "model.layers.12.self_attn.q_proj.weight"),
        ("blk.0.attn_output.bias", "model.layers.0.self_attn.o_proj.bias"),
        ("blk.3.ffn_norm.weight", "model.layers.3.post_attention_layernorm.weight"),
        ("blk.3.ffn_down.weight", "model.layers.3.mlp.down_proj.weight"),
        ("blk.3.attn_q_norm.weight", "blk.3.attn_q_norm.weight"),
        ("something.else", "something.else"),
    ],
)
def test_gguf_names_map_to_hugging_face_names(gguf: str, hugging_face: str) -> None:
    assert hugging_face_name(gguf) == hugging_face


def test_gguf_rows_come_in_hugging_face_order(tiny_model_dir: Path, tmp_path: Path) -> None:
    file = GgufFile(write_tiny_gguf(tiny_model_dir, tmp_path / "tiny.gguf"))
    config = gguf_config(file)
    source = GgufSource(file, config)
    stored = load_file(tiny_model_dir / "model.safetensors")
    assert source.names() == stored.keys() == expected_tensors(config).keys()
    for name, tensor in stored.items():
        assert source.shape(name) == tuple(tensor.shape)
        assert torch.equal(source.read(name), tensor)
    # In the file they lie otherwise: row 1 of a head is its partner half a head on.
    raw = torch.from_numpy(file.tensor("blk.0.attn_q.weight"))
    head_dim = config.head_dim
    q = stored["model.layers.0.self_attn.q_proj.weight"]
    assert torch.equal(raw[0], q[0])
    assert torch.equal(raw[1], q[head_dim // 2])
    assert torch.equal(raw[head_dim], q[head_dim])


def test_shards_are_one_source(tmp_path: Path) -> None:
    single = SafetensorsSource(make_tiny_model(tmp_path / "single"))
    sharded = SafetensorsSource(make_tiny_model(tmp_path / "sharded", shards=4))
    assert sharded.names() == single.names()
    for name in single.names():
        assert sharded.shape(name) == single.shape(name)
        assert torch.equal(sharded.read(name), single.read(name))
    assert single.shape("absent") is None
