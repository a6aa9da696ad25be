"""The hybrid computes, in any batch and any chunks, what its recurrence says token by token."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from local_engine.kv.pool import KvPool
from local_engine.loader import LoadedModel, load_model
from local_engine.models.base import ForwardBatch, SeqSlice
from local_engine.models.config import config_from_hf
from local_engine.models.hybrid import HybridModel
from local_engine.requests import SamplingParams
from local_engine.runner import DecodeRow, PrefillChunk, TorchRunner
from local_engine.sampler import TokenDraw
from local_engine.weights import SafetensorsSource
from prfaas.errors import ConfigError
from prfaas.layout import GroupKind
from prfaas.testing.contiguous_kv import ContiguousKv, Span

GREEDY = TokenDraw(SamplingParams(max_tokens=1, temperature=0.0), seed=0, index=0)
TOLERANCE = 2e-4


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def loaded(tiny_hybrid_dir: Path) -> LoadedModel:
    return load_model(tiny_hybrid_dir)


class Reference:
    """The same weights, one token at a time, in the plainest torch; states and KV as it goes."""

    def __init__(self, directory: Path) -> None:
        self.config: dict[str, Any] = json.loads((directory / "config.json").read_text())
        source = SafetensorsSource(directory)
        self.weights = {name: source.read(name).double() for name in source.names()}
        self.states: dict[int, Tensor] = {}
        self.keys: dict[int, list[Tensor]] = {}
        self.values: dict[int, list[Tensor]] = {}
        self.position = 0

    def step(self, token: int) -> Tensor:
        """Logits after one more token."""
        x = self.weights["model.embed_tokens.weight"][token]
        for layer, kind in enumerate(self.config["layer_types"]):
            prefix = f"model.layers.{layer}"
            normed = self.norm(x, f"{prefix}.input_layernorm")
            mix = self.recur if kind == "linear_attention" else self.attend
            x = x + self.weights[f"{prefix}.self_attn.o_proj.weight"] @ mix(layer, normed)
            normed = self.norm(x, f"{prefix}.post_attention_layernorm")
            gate = self.weights[f"{prefix}.mlp.gate_proj.weight"] @ normed
            up = self.weights[f"{prefix}.mlp.up_proj.weight"] @ normed
            x = x + self.weights[f"{prefix}.mlp.down_proj.weight"] @ (F.silu(gate) * up)
        self.position += 1
        return self.weights["lm_head.weight"] @ self.norm(x, "model.norm")

    def norm(self, x: Tensor, name: str) -> Tensor:
        scale = (x.square().mean() + self.config["rms_norm_eps"]).rsqrt()
        return x * scale * self.weights[f"{name}.weight"]

    def heads(self, layer: int, name: str, x: Tensor, heads: int) -> Tensor:
        return (self.weights[f"model.layers.{layer}.self_attn.{name}_proj.weight"] @ x).view(
            heads, -1
        )

    def recur(self, layer: int, x: Tensor) -> Tensor:
        heads = self.config["linear_num_heads"]
        q, k, v = (self.heads(layer, name, x, heads) for name in "qkv")
        weights = f"model.layers.{layer}.self_attn.decay_proj"
        logits = self.weights[f"{weights}.weight"] @ x + self.weights[f"{weights}.bias"]
        outputs, states = [], []
        for head in range(heads):
            unit = k[head] / k[head].norm()
            old = self.states[layer][head] if layer in self.states else 0
            state = torch.sigmoid(logits[head]) * old + torch.outer(unit, v[head])
            out = q[head] @ state
            outputs.append(out * (out.square().mean() + self.config["rms_norm_eps"]).rsqrt())
            states.append(state)
        self.states[layer] = torch.stack(states)
        return torch.cat(outputs)

    def attend(self, layer: int, x: Tensor) -> Tensor:
        heads, kv_heads = (self.config[f"num_{name}_heads"] for name in ("attention", "key_value"))
        q, k = self.heads(layer, "q", x, heads), self.heads(layer, "k", x, kv_heads)
        self.keys.setdefault(layer, []).append(self.rotate(k))
        self.values.setdefault(layer, []).append(self.heads(layer, "v", x, kv_heads))
        keys, values = torch.stack(self.keys[layer]), torch.stack(self.values[layer])
        outputs = []
        for head, query in enumerate(self.rotate(q)):
            group = head // (heads // kv_heads)
            scores = keys[:, group] @ query / query.shape[0] ** 0.5
            outputs.append(scores.softmax(0) @ values[:, group])
        return torch.cat(outputs)

    def rotate(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        powers = torch.arange(half, dtype=torch.float64) / half
        angles = self.position / self.config["rope_theta"] ** powers
        low, high = x[..., :half], x[..., half:]
        return torch.cat(
            (low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()), -1
        )


def tokens(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 700, (count,), generator=generator).tolist()


def forward(
    model: HybridModel, kv: ContiguousKv, parts: list[tuple[int, list[int], int]]
) -> Tensor:
    """Logits of all rows of a batch: (sequence, its new tokens, tokens before)."""
    spans, slices, at = [], [], 0
    for name, ids, before in parts:
        spans.append(Span(name, at, len(ids)))
        slices.append(SeqSlice(at, len(ids), before, torch.arange(before + len(ids))))
        at += len(ids)
    kv.begin(spans)
    batch = ForwardBatch(
        torch.tensor([t for _, ids, _ in parts for t in ids]),
        torch.tensor([b + i for _, ids, b in parts for i in range(len(ids))]),
        tuple(slices),
    )
    return model.logits(model.forward(batch, kv))


@pytest.fixture(scope="module")
def reference_run(tiny_hybrid_dir: Path) -> tuple[list[int], Tensor, Reference]:
    """A prompt longer than a block of the parallel form, with the logits after each token."""
    reference, prompt = Reference(tiny_hybrid_dir), tokens(300)
    return prompt, torch.stack([reference.step(token) for token in prompt]).float(), reference


@pytest.mark.parametrize("cuts", [[], [1], [64, 128, 192, 256], [5, 6, 7, 150], [299]])
def test_any_chunks_give_the_logits_of_the_recurrence(
    loaded: LoadedModel, reference_run: tuple[list[int], Tensor, Reference], cuts: list[int]
) -> None:
    prompt, want, reference = reference_run
    assert isinstance(loaded.model, HybridModel)
    kv, got = ContiguousKv(), []
    for start, end in zip([0, *cuts], [*cuts, len(prompt)], strict=True):
        got.append(forward(loaded.model, kv, [(0, prompt[start:end], start)]))
    assert (torch.cat(got) - want).abs().max() < TOLERANCE * want.abs().max()
    for place, layer in enumerate((0, 2, 4)):
        (state,) = kv.read_states(place, (2, 16, 16))
        assert (state - reference.states[layer]).abs().max() < 1e-4


def test_sequences_in_one_batch_do_not_see_each_other(loaded: LoadedModel) -> None:
    assert isinstance(loaded.model, HybridModel)
    model, prompts = loaded.model, [tokens(40, 1), tokens(7, 2), tokens(1, 3)]
    alone, together = ContiguousKv(), ContiguousKv()
    for name, ids in enumerate(prompts):
        forward(model, alone, [(name, ids, 0)])
    forward(model, together, [(name, ids, 0) for name, ids in enumerate(prompts)])
    nexts = [(name, [11 + name], len(ids)) for name, ids in enumerate(prompts)]
    want = torch.cat([forward(model, alone, [part]) for part in nexts])
    got = forward(model, together, nexts)
    assert (got - want).abs().max() < TOLERANCE * want.abs().max()


def test_old_tokens_matter_through_the_states_alone(loaded: LoadedModel) -> None:
    """Else the tests of exactness would pass without any state."""
    assert isinstance(loaded.model, HybridModel)
    prompt = tokens(200, 4)
    kv = ContiguousKv()
    forward(loaded.model, kv, [(0, prompt[:-1], 0)])
    states = [kv.read_states(place, (2, 16, 16)).clone() for place in range(3)]
    right = forward(loaded.model, kv, [(0, prompt[-1:], len(prompt) - 1)])
    kv = ContiguousKv()
    forward(loaded.model, kv, [(0, prompt[:-1], 0)])
    for place, state in enumerate(states):
        kv.write_states(place, torch.zeros_like(state))
    wrong = forward(loaded.model, kv, [(0, prompt[-1:], len(prompt) - 1)])
    assert (wrong - right).abs().max() > 1.0


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_the_runner_prefills_and_decodes_with_states_in_slots(
    loaded: LoadedModel, reference_run: tuple[list[int], Tensor, Reference], kv_dtype: str
) -> None:
    prompt, want, _ = reference_run
    pool = KvPool(loaded.config.kv_layout(kv_dtype), 64, 16, state_slots=4)
    runner = TorchRunner(loaded.model, pool)
    tables = [pool.new_table(), pool.new_table()]
    tables[0].extend(range(20))
    tables[1].extend(range(20, 40))
    ends = (298, 157)
    for table, slot, end in zip(tables, (3, 1), ends, strict=True):
        for start in range(0, end, 64):
            chunk = prompt[start : min(start + 64, end)]
            seen: list[int] = []
            runner.prefill_chunk(PrefillChunk(chunk, start, table, slot), seen.append)
            assert seen == [0, 1, 2, 3, 4]
    for step in range(2):
        rows = [
            DecodeRow(prompt[end + step], end + step, table, GREEDY, slot)
            for table, slot, end in zip(tables, (3, 1), ends, strict=True)
        ]
        got = runner.logits(rows)
        right = torch.stack([want[end + step] for end in ends])
        limit = TOLERANCE if kv_dtype == "float32" else 0.03
        assert (got - right).abs().max() < limit * right.abs().max()
    assert pool.states is not None
    assert not pool.states.layers[0][2].any()


def test_the_configuration_is_checked_and_part_of_the_identity(tiny_hybrid_dir: Path) -> None:
    raw = json.loads((tiny_hybrid_dir / "config.json").read_text())
    config = config_from_hf(raw)
    assert config.attention_layers == (1, 3)
    kv, states = config.kv_layout("bfloat16").groups
    assert (kv.kind, kv.layers, kv.kv_heads, kv.head_dim) == (GroupKind.FULL, (1, 3), 2, 16)
    assert (states.kind, states.layers) == (GroupKind.RECURRENT, (0, 2, 4))
    assert (states.kv_heads, states.state_dim, states.head_dim) == (2, 16, 16)
    assert config.recurrent is not None
    other = replace(config, recurrent=replace(config.recurrent, key_dim=8))
    assert other.digest() != config.digest()
    for change, field in (
        ({"layer_types": raw["layer_types"][:-1]}, "layer_types"),
        ({"layer_types": ["full_attention"] * 5}, "layer_types"),
        ({"layer_types": ["sliding_attention", *raw["layer_types"][1:]]}, "layer_types"),
        ({"linear_num_heads": 0}, "heads"),
    ):
        with pytest.raises(ConfigError) as caught:
            config_from_hf(raw | change)
        assert caught.value.field == field
