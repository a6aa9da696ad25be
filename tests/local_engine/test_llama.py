"""Logits equal those of transformers, whatever the batch shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from local_engine.models.base import ForwardBatch, SeqSlice
from local_engine.models.config import config_from_hf
from local_engine.models.llama import LlamaModel, expected_tensors
from local_engine.weights import SafetensorsSource, check_tensors
from prfaas.testing.contiguous_kv import ContiguousKv, Span

# The bars would leave a semaphore behind, which the leak check reports.
transformers.utils.logging.disable_progress_bar()

TOLERANCE = 2e-5
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mqa": {"num_key_value_heads": 1},
    "mha": {"num_key_value_heads": 4},
    "tied": {"tie_word_embeddings": True},
    "rope llama3": {"rope_scaling": LLAMA3},
    "rope linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "rope theta": {"rope_theta": 500000.0},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "head_dim": {"head_dim": 24, "rms_norm_eps": 1e-3},
}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def build(
    tmp_path: Path, variant: str, seed: int
) -> tuple[transformers.LlamaForCausalLM, LlamaModel]:
    """The same random weights in transformers and, by way of its files, in ours."""
    settings = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.125,
        "bos_token_id": None,
        "eos_token_id": None,
    } | VARIANTS[variant]
    torch.manual_seed(seed)
    reference = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings)).eval()
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    reference.save_pretrained(tmp_path)
    config = config_from_hf(reference.config.to_dict())
    source = SafetensorsSource(tmp_path)
    check_tensors(source, expected_tensors(config))
    return reference, LlamaModel(config, source, torch.float32, torch.device("cpu"))


def run(model: LlamaModel, kv: ContiguousKv, parts: list[tuple[int, Tensor, int]]) -> Tensor:
    """One step over parts (sequence, its new tokens, tokens it has stored); logits of all rows."""
    spans, seqs, start = [], [], 0
    for seq_id, tokens, context in parts:
        length = len(tokens)
        spans.append(Span(seq_id, start, length))
        seqs.append(SeqSlice(start, length, context, torch.arange(context + length)))
        start += length
    kv.begin(spans)
    batch = ForwardBatch(
        token_ids=torch.cat([tokens for _, tokens, _ in parts]),
        positions=torch.cat([torch.arange(c, c + len(t)) for _, t, c in parts]),
        seqs=tuple(seqs),
    )
    return model.logits(model.forward(batch, kv))


@torch.no_grad()
def expected(reference: transformers.LlamaForCausalLM, tokens: Tensor) -> Tensor:
    logits: Tensor = reference(tokens.unsqueeze(0)).logits[0]
    return logits


def prompt(length: int, seed: int = 1) -> Tensor:
    return torch.randint(0, 128, (length,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("variant", VARIANTS)
def test_one_shot_logits_equal_transformers(tmp_path: Path, variant: str, seed: int) -> None:
    reference, model = build(tmp_path, variant, seed)
    tokens = prompt(200)
    want = expected(reference, tokens)
    assert want.std() > 0.8
    got = run(model, ContiguousKv(), [(0, tokens, 0)])
    torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_chunked_then_token_by_token_equals_transformers(tmp_path: Path, variant: str) -> None:
    reference, model = build(tmp_path, variant, seed=2)
    tokens = prompt(130)
    kv, got, done = ContiguousKv(), [], 0
    for size in (64, 1, 37, 20, *([1] * 8)):
        got.append(run(model, kv, [(0, tokens[done : done + size], done)]))
        done += size
    assert done == len(tokens)
    torch.testing.assert_close(torch.cat(got), expected(reference, tokens), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("variant", ["gqa", "rope llama3", "biases"])
def test_sequences_in_one_batch_do_not_see_each_other(tmp_path: Path, variant: str) -> None:
    reference, model = build(tmp_path, variant, seed=3)
    prompts = [prompt(length, seed=length) for length in (50, 7, 1)]
    kv = ContiguousKv()
    run(model, kv, [(0, prompts[0][:40], 0), (1, prompts[1][:5], 0)])
    got = run(
        model,
        kv,
        [(0, prompts[0][40:], 40), (1, prompts[1][5:], 5), (2, prompts[2], 0)],
    )
    want = [expected(reference, tokens) for tokens in prompts]
    torch.testing.assert_close(
        got, torch.cat([want[0][40:], want[1][5:], want[2]]), atol=TOLERANCE, rtol=0
    )


def test_the_layer_hook_sees_every_layer_once_in_order_with_the_kv_of_the_step(
    tmp_path: Path,
) -> None:
    _, model = build(tmp_path, "gqa", seed=4)
    kv, seen = ContiguousKv(), []
    tokens = prompt(9)
    kv.begin([Span(0, 0, 9)])
    batch = ForwardBatch(tokens, torch.arange(9), (SeqSlice(0, 9, 0, torch.arange(9)),))
    model.forward(batch, kv, lambda layer, k, v: seen.append((layer, k, v)))
    assert [layer for layer, _, _ in seen] == [0, 1, 2]
    for layer, k, v in seen:
        stored_k, stored_v = kv.stored(layer, 0)
        assert k.shape == (9, 2, 16)
        assert torch.equal(k, stored_k)
        assert torch.equal(v, stored_v)


def test_rows_selects_hidden_states_and_leaves_kv_as_it_is(tmp_path: Path) -> None:
    _, model = build(tmp_path, "biases", seed=6)
    tokens, everything = prompt(12), ContiguousKv()
    batch = ForwardBatch(tokens, torch.arange(12), (SeqSlice(0, 12, 0, torch.arange(12)),))
    everything.begin([Span(0, 0, 12)])
    all_hidden = model.forward(batch, everything)
    for rows in (torch.tensor([11]), torch.tensor([3, 7]), torch.empty(0, dtype=torch.int64)):
        kv, layers = ContiguousKv(), []
        kv.begin([Span(0, 0, 12)])
        hidden = model.forward(batch, kv, lambda layer, k, v: layers.append(layer), rows)  # noqa: B023
        assert hidden.shape == (len(rows), 64)
        torch.testing.assert_close(hidden, all_hidden[rows], atol=TOLERANCE, rtol=0)
        assert layers == [0, 1, 2]
        for layer in layers:
            assert torch.equal(kv.stored(layer, 0)[0], everything.stored(layer, 0)[0])
            assert torch.equal(kv.stored(layer, 0)[1], everything.stored(layer, 0)[1])


def test_bf16_compute_stays_near_fp32_and_logits_are_fp32(tmp_path: Path) -> None:
    reference, _ = build(tmp_path, "gqa", seed=5)
    config = config_from_hf(reference.config.to_dict())
    model = LlamaModel(config, SafetensorsSource(tmp_path), torch.bfloat16, torch.device("cpu"))
    tokens = prompt(64)
    got = run(model, ContiguousKv(), [(0, tokens, 0)])
    assert got.dtype == torch.float32
    want = expected(reference, tokens)
    assert (got - want).abs().mean() < 0.05 * want.std()
