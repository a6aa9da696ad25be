"""A GGUF file and the directory made of it are one model: config, tokenizer and weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from local_engine import demo_safetensors
from local_engine.demo_safetensors import DIRECTORY, convert, demo_model_directory
from local_engine.loader import load_model
from local_engine.weights import GgufSource, SafetensorsSource
from prfaas.chat_template import Message
from prfaas.gguf_file import GgufFile
from prfaas.testing.tinygguf import write_tiny_gguf
from prfaas.testing.tinymodel import make_tiny_model
from prfaas.tokens import Tokenizer


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    return write_tiny_gguf(make_tiny_model(tmp_path / "original"), tmp_path / "tiny.gguf")


def test_both_have_one_identity_and_the_same_weights(gguf: Path, tmp_path: Path) -> None:
    convert(gguf, tmp_path / "made")
    theirs, ours = load_model(gguf), load_model(tmp_path / "made")
    assert ours.identity == theirs.identity
    text = "How many, then?"
    assert ours.tokenizer.encode(text) == theirs.tokenizer.encode(text)
    file = GgufFile(gguf)
    expected = GgufSource(file, theirs.config)
    found = SafetensorsSource(tmp_path / "made")
    assert found.names() == expected.names()
    assert found.names()
    assert all(torch.equal(found.read(name), expected.read(name)) for name in found.names())


def test_the_chat_template_comes_along(gguf: Path, tmp_path: Path) -> None:
    convert(gguf, tmp_path / "made")
    settings = json.loads((tmp_path / "made" / "tokenizer_config.json").read_text())
    assert settings["chat_template"] == GgufFile(gguf).scalars()["tokenizer.chat_template"]
    message: Message = {"role": "user", "content": "How many, then?"}
    made, original = Tokenizer.load(tmp_path / "made"), Tokenizer.load(gguf)
    assert made.render_chat([message]) == original.render_chat([message])


def test_it_is_made_once(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    monkeypatch.setattr(demo_safetensors, "fetch_demo_model", lambda directory, say: gguf)
    said: list[str] = []
    first = demo_model_directory(cache, said.append)
    written = (first / "model.safetensors").stat().st_mtime_ns
    assert demo_model_directory(cache, said.append) == first == cache / DIRECTORY
    assert (first / "model.safetensors").stat().st_mtime_ns == written
    assert [path.name for path in cache.iterdir()] == [DIRECTORY]
    assert len(said) == 1
