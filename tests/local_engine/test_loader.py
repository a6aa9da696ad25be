"""Models load the same from every file format; a file that is wrong is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file
from torch import Tensor

from local_engine.loader import LoadedModel, load_model
from local_engine.models.base import ForwardBatch, SeqSlice
from prfaas.errors import ConfigError
from prfaas.testing.contiguous_kv import ContiguousKv, Span
from prfaas.testing.tinygguf import write_tiny_gguf
from prfaas.testing.tinymodel import make_tiny_model

transformers.utils.logging.disable_progress_bar()

Tensors = dict[str, npt.NDArray[np.float32]]


def logits(loaded: LoadedModel, ids: list[int]) -> Tensor:
    """Logits [tokens, vocab] of one sequence in one step."""
    length, kv = len(ids), ContiguousKv()
    kv.begin([Span(0, 0, length)])
    batch = ForwardBatch(
        torch.tensor(ids), torch.arange(length), (SeqSlice(0, length, 0, torch.arange(length)),)
    )
    return loaded.model.logits(loaded.model.forward(batch, kv))


def edited(source: Path, target: Path, edit: Callable[[Tensors], None]) -> Path:
    """A copy of a model directory with its tensors changed."""
    shutil.copytree(source, target)
    weights = load_file(target / "model.safetensors")
    edit(weights)
    save_file(weights, target / "model.safetensors")
    return target


@pytest.fixture(scope="module")
def prompt(tiny_model_dir: Path) -> list[int]:
    return load_model(tiny_model_dir).tokenizer.encode("The same prompt for every format.\n" * 4)


def test_sharded_single_and_gguf_files_give_the_same_logits_and_identity(
    tiny_model_dir: Path, tmp_path: Path, prompt: list[int]
) -> None:
    single = load_model(tiny_model_dir)
    sharded = load_model(make_tiny_model(tmp_path / "sharded", shards=3))
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) == 3
    gguf = load_model(write_tiny_gguf(tiny_model_dir, tmp_path / "tiny.gguf"))
    want = logits(single, prompt)
    assert torch.equal(logits(sharded, prompt), want)
    assert torch.equal(logits(gguf, prompt), want)
    assert single.identity == sharded.identity == gguf.identity
    identity = single.identity
    assert (identity.layers, identity.kv_heads, identity.head_dim) == (4, 2, 16)


def test_padding_of_the_vocabulary_is_not_part_of_the_identity(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    padded = load_model(write_tiny_gguf(tiny_model_dir, tmp_path / "t.gguf", padding_tokens=8))
    plain = load_model(tiny_model_dir)
    assert padded.config.vocab_size == plain.config.vocab_size + 8
    assert padded.identity == plain.identity


def test_another_rope_or_tokenizer_is_another_identity(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    plain = load_model(tiny_model_dir).identity
    linear = {"rope_type": "linear", "factor": 2.0}
    scaled = load_model(make_tiny_model(tmp_path / "a", rope_scaling=linear)).identity
    other = load_model(make_tiny_model(tmp_path / "b", vocab_size=600)).identity
    assert scaled.config_digest != plain.config_digest
    assert scaled.tokenizer_digest == plain.tokenizer_digest
    assert other.tokenizer_digest != plain.tokenizer_digest
    assert other.config_digest == plain.config_digest
    assert len({plain.model_identity, scaled.model_identity, other.model_identity}) == 3


def test_a_tied_model_and_rope_factors_load_from_gguf(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path / "tied", tied=True)
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    plain = load_model(write_tiny_gguf(directory, tmp_path / "a.gguf"))
    scaled = load_model(write_tiny_gguf(directory, tmp_path / "b.gguf", rope_factors=factors))
    ids = [5, 6, 7] * 20
    assert torch.equal(logits(plain, ids), logits(load_model(directory), ids))
    assert scaled.config.rope.divisors == tuple(factors.tolist())
    assert not torch.allclose(logits(scaled, ids), logits(plain, ids), atol=0.1)


def test_a_stored_head_of_a_tied_model_and_old_rope_tables_are_not_in_the_way(
    tmp_path: Path,
) -> None:
    directory = make_tiny_model(tmp_path / "tied", tied=True)

    def add(weights: Tensors) -> None:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()
        weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, dtype=np.float32)

    loaded = load_model(edited(directory, tmp_path / "more", add))
    assert torch.equal(logits(loaded, [9, 8]), logits(load_model(directory), [9, 8]))


def test_weights_are_held_in_the_compute_dtype(tiny_model_dir: Path) -> None:
    loaded = load_model(tiny_model_dir, torch.bfloat16)
    assert loaded.model.dtype == torch.bfloat16
    assert logits(loaded, [5, 6]).dtype == torch.float32


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda w: w.pop("model.layers.2.mlp.up_proj.weight"),
            r"lack tensor model\.layers\.2\.mlp\.up_proj\.weight",
        ),
        (
            lambda w: w.update({"model.norm.weight": np.ones(7, dtype=np.float32)}),
            r"model\.norm\.weight has shape \[7\], the config says \[64\]",
        ),
        (
            lambda w: w.update(
                {"model.layers.0.self_attn.q_norm.weight": np.ones(16, dtype=np.float32)}
            ),
            r"does not use: model\.layers\.0\.self_attn\.q_norm\.weight",
        ),
    ],
)
def test_a_tensor_that_is_missing_misshapen_or_unknown_is_named(
    tiny_model_dir: Path, tmp_path: Path, edit: Callable[[Tensors], None], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_model(edited(tiny_model_dir, tmp_path / "edited", edit))


def _truncate(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def _scribble(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"\xff" * 4096)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_truncate, "not a whole safetensors file"),
        (_scribble, "not a whole safetensors file"),
        (lambda d: (d / "model.safetensors").unlink(), "has neither model.safetensors nor"),
        (
            lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"),
            "has neither model.safetensors nor",
        ),
        (lambda d: (d / "config.json").unlink(), "config.json does not exist"),
        (lambda d: (d / "config.json").write_text("{"), "config.json is not readable JSON"),
        (lambda d: (d / "config.json").write_text("[]"), "config.json is not a JSON object"),
        (lambda d: (d / "tokenizer.json").unlink(), "tokenizer.json does not exist"),
    ],
)
def test_a_damaged_directory_is_named(
    tiny_model_dir: Path, tmp_path: Path, damage: Callable[[Path], Any], message: str
) -> None:
    shutil.copytree(tiny_model_dir, tmp_path / "model")
    damage(tmp_path / "model")
    with pytest.raises(ConfigError, match=message):
        load_model(tmp_path / "model")


def _index(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda d: (d / "model-00002-of-00002.safetensors").unlink(),
            "lacks the weight file model-00002-of-00002",
        ),
        (
            lambda d: _index(
                d,
                lambda i: i["weight_map"].update(
                    {"model.norm.weight": "model-00001-of-00002.safetensors"}
                ),
            ),
            r"lacks tensor model\.norm\.weight, which the index says",
        ),
        (
            lambda d: _index(d, lambda i: i["weight_map"].update({"x": "../x.safetensors"})),
            "not a plain file name",
        ),
        (lambda d: _index(d, lambda i: i.pop("weight_map")), "is not a weight index"),
    ],
)
def test_a_damaged_set_of_shards_is_named(
    tmp_path: Path, damage: Callable[[Path], Any], message: str
) -> None:
    directory = make_tiny_model(tmp_path / "model", shards=2)
    damage(directory)
    with pytest.raises(ConfigError, match=message):
        load_model(directory)


@pytest.mark.parametrize("kept_bytes", [0, 3, 100, 20_000, -1000])
def test_a_truncated_gguf_file_is_named(
    tiny_model_dir: Path, tmp_path: Path, kept_bytes: int
) -> None:
    path = write_tiny_gguf(tiny_model_dir, tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes()[:kept_bytes])
    with pytest.raises(ConfigError, match="not a readable GGUF file"):
        load_model(path)


def test_an_unsupported_architecture_is_named(tiny_model_dir: Path, tmp_path: Path) -> None:
    gguf = write_tiny_gguf(tiny_model_dir, tmp_path / "t.gguf", metadata={"llama.expert_count": 4})
    with pytest.raises(ConfigError, match="mixture-of-experts"):
        load_model(gguf)
    shutil.copytree(tiny_model_dir, tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "gpt_neox"}')
    with pytest.raises(ConfigError, match="'gpt_neox' is not supported"):
        load_model(tmp_path / "model")


def test_a_path_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"neither a model directory nor a \.gguf file"):
        load_model(tmp_path / "absent")


@pytest.fixture(scope="module")
def demo_reference(demo_model_path: Path) -> Any:
    """Loaded outside the test: progress bars leave a semaphore, which the leak check reports."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        demo_model_path.parent, gguf_file=demo_model_path.name, dtype=torch.float32
    ).eval()


@pytest.mark.real_model
@pytest.mark.timeout(300)  # transformers unpacks the GGUF for a quarter of a minute of CPU time
@torch.no_grad()
def test_logits_of_the_demo_model_equal_those_of_transformers(
    demo_model_path: Path, demo_reference: Any
) -> None:
    loaded = load_model(demo_model_path)
    ids = loaded.tokenizer.encode_chat(
        [{"role": "user", "content": "Name three rivers of Europe, please."}]
    )
    want = demo_reference(torch.tensor([ids])).logits[0]
    got = logits(loaded, ids)
    # The tolerance of the random models, whose logits have a deviation of about 1.
    assert (got - want).abs().max() < 2e-5 * want.std()
    assert torch.equal(got.argmax(-1), want.argmax(-1))
