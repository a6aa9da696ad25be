"""Qwen2 and Qwen3 from their files: logits equal transformers', and their KV travels."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from local_engine.kv.pool import KvPool
from local_engine.loader import LoadedModel, load_model
from local_engine.requests import SamplingParams
from local_engine.runner import DecodeRow, PrefillChunk, TorchRunner
from local_engine.sampler import TokenDraw
from local_engine.testing import CoreHarness, LoopbackAgents
from prfaas.errors import ConfigError
from prfaas.testing.fake_port import FakePort
from prfaas_connect.port.messages import Release

transformers.utils.logging.disable_progress_bar()

TOLERANCE = 2e-5
VOCAB = 768
GREEDY = TokenDraw(SamplingParams(max_tokens=1, temperature=0.0), 0, 0)
PARAMS = {"version": 1, "transfer_id": "t", "plan": [{"peer": "p", "instance": "i"}]}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {}),
    "qwen2 tied": ("Qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen3": ("Qwen3", {"head_dim": 24}),
    "qwen3 with biases": ("Qwen3", {"head_dim": 16, "attention_bias": True, "rms_norm_eps": 1e-3}),
}


@dataclass
class Pair:
    """One model in transformers, and what the loader makes of its directory."""

    reference: Any
    loaded: LoadedModel
    directory: Path

    @torch.no_grad()
    def expected(self, tokens: list[int]) -> torch.Tensor:
        logits: torch.Tensor = self.reference(torch.tensor([tokens])).logits[0]
        return logits


Build = Callable[[str], Pair]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Build:
    torch.set_num_threads(1)
    made: dict[str, Pair] = {}

    def build(variant: str) -> Pair:
        if variant not in made:
            family, changes = VARIANTS[variant]
            settings = {
                "vocab_size": VOCAB,
                "hidden_size": 64,
                "intermediate_size": 96,
                "num_hidden_layers": 3,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 1024,
                "initializer_range": 0.125,
                "rope_theta": 1e6,
                "bos_token_id": None,
                "eos_token_id": None,
            } | changes
            torch.manual_seed(len(made))
            config = getattr(transformers, f"{family}Config")(**settings)
            reference = getattr(transformers, f"{family}ForCausalLM")(config).eval()
            with torch.no_grad():
                for name, parameter in reference.named_parameters():
                    if name.endswith("bias") or "norm" in name:
                        parameter.add_(torch.randn_like(parameter) * 0.3)
            directory = tmp_path_factory.mktemp("qwen")
            reference.save_pretrained(directory)
            for name in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(tiny_model_dir / name, directory / name)
            made[variant] = Pair(reference, load_model(directory), directory)
        return made[variant]

    return build


def prompt(length: int, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()


@pytest.mark.parametrize("variant", VARIANTS)
def test_chunked_prefill_and_cached_decode_equal_transformers(pair: Build, variant: str) -> None:
    both = pair(variant)
    tokens = prompt(150)
    want = both.expected(tokens)
    assert want.std() > 0.8
    for sizes in ((139,), (64, 64, 11), (1, 37, 101)):
        pool = KvPool(both.loaded.config.kv_layout("float32"), 64, 4)
        runner, table = TorchRunner(both.loaded.model, pool), pool.new_table()
        table.extend(range(3, 41))
        done = 0
        for size in sizes:
            runner.prefill_chunk(PrefillChunk(tokens[done : done + size], done, table))
            done += size
        for at in range(done, len(tokens)):
            got = runner.logits([DecodeRow(tokens[at], at, table, GREEDY)])
            torch.testing.assert_close(got[0], want[at], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_sequences_of_one_batch_do_not_see_each_other(pair: Build, variant: str) -> None:
    both = pair(variant)
    pool = KvPool(both.loaded.config.kv_layout("float32"), 64, 4)
    runner, rows = TorchRunner(both.loaded.model, pool), []
    prompts = [prompt(length, seed=length) for length in (70, 9, 1)]
    for number, tokens in enumerate(prompts):
        table = pool.new_table()
        table.extend(range(20 * number, 20 * number + 20))
        if len(tokens) > 1:
            runner.prefill_chunk(PrefillChunk(tokens[:-1], 0, table))
        rows.append(DecodeRow(tokens[-1], len(tokens) - 1, table, GREEDY))
    want = torch.stack([both.expected(tokens)[-1] for tokens in prompts])
    torch.testing.assert_close(runner.logits(rows), want, atol=TOLERANCE, rtol=0)


BIAS = ((5, 2.0), (9, -100.0), (700, 4.0))


@pytest.mark.parametrize("variant", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({}, {}),
        ({"repetition_penalty": 1.6}, {"repetition_penalty": 1.6}),
        (
            {"logit_bias": BIAS, "repetition_penalty": 1.2},
            {
                "sequence_bias": [[[token], bias] for token, bias in BIAS],
                "repetition_penalty": 1.2,
            },
        ),
    ],
    ids=["plain", "repetition", "bias and repetition"],
)
def test_an_answer_is_the_one_transformers_generates(
    pair: Build, variant: str, ours: dict[str, Any], theirs: dict[str, Any]
) -> None:
    both = pair(variant)
    tokens = prompt(75)
    with torch.no_grad():
        want = both.reference.generate(
            torch.tensor([tokens]), max_new_tokens=16, do_sample=False, pad_token_id=0,
            return_dict_in_generate=True, output_logits=True, **theirs,
        )  # fmt: skip
    engine = harness(both.loaded, "float32", 16)
    stream = engine.submit("r", tokens, 16, logprobs=3, **ours)
    engine.run()
    assert stream.tokens == want.sequences[0, len(tokens) :].tolist()
    told = [one for event in stream.events for one in event.logprobs]
    for token, one, raw in zip(stream.tokens, told, want.logits, strict=True):
        logprobs = torch.log_softmax(raw[0], -1)
        assert one.logprob == pytest.approx(float(logprobs[token]), abs=1e-4)
        assert [other for other, _ in one.top] == logprobs.topk(3).indices.tolist()


def test_penalties_and_logprobs_survive_preemption(pair: Build) -> None:
    model = pair("qwen3").loaded
    answers = []
    for blocks in (64, 11):
        engine = harness(model, "float32", 8, blocks=blocks)
        for seed in range(3):
            engine.submit(
                f"r{seed}", prompt(20, seed), 14, temperature=1.0, seed=seed,
                repetition_penalty=1.5, frequency_penalty=0.5, logprobs=0,
            )  # fmt: skip
        engine.run()
        answers.append([stream.tokens for stream in engine.streams.values()])
        told = [one for event in engine.streams["r0"].events for one in event.logprobs]
        assert len(told) == 14
    assert engine.core.stats().preemptions > 0
    assert answers[0] == answers[1]


def harness(model: LoadedModel, kv_dtype: str, block_tokens: int, **kwargs: Any) -> CoreHarness:
    return CoreHarness(
        layout=model.config.kv_layout(kv_dtype),
        make_runner=lambda pool: TorchRunner(model.model, pool),
        **{"blocks": 1024 // block_tokens, "block_tokens": block_tokens, "chunk_tokens": 32}
        | kwargs,
    )


@pytest.mark.parametrize("variant", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("kv_dtype", "d_block", "p_block"), [("float32", 16, 4), ("bfloat16", 32, 32)]
)
def test_answers_from_remote_kv_are_those_given_alone(
    pair: Build, variant: str, kv_dtype: str, d_block: int, p_block: int
) -> None:
    model = pair(variant).loaded
    local = harness(model, kv_dtype, d_block)
    decode = harness(
        model, kv_dtype, d_block, port=FakePort(staging_bytes=1 << 22, verify_import=True),
    )  # fmt: skip
    prefill = harness(model, kv_dtype, p_block, port=FakePort(ring_bytes=3 << 12))
    agents = LoopbackAgents(decode, prefill)
    lengths = (2, 32, 33, 97)
    for index, length in enumerate(lengths):
        tokens = prompt(length, seed=index)
        local.submit(f"r{index}", tokens, 8)
        local.run()
        decode.submit(f"r{index}", tokens, 8, params=PARAMS)
        while decode.step() | prefill.step() or not decode.core.idle:
            agents.pump()
    for name, stream in local.streams.items():
        assert decode.streams[name].tokens == stream.tokens
        assert len(stream.tokens) == 8
    assert decode.core.stats().computed_tokens == 0
    assert decode.port is not None
    assert {r.session: r.digest for r in decode.port.of(Release)} == agents.digests()


def test_the_families_are_different_models_to_a_peer(pair: Build) -> None:
    digests = {pair(variant).loaded.identity.config_digest for variant in VARIANTS}
    assert len(digests) == len(VARIANTS)


@pytest.mark.parametrize(
    ("variant", "change", "message"),
    [
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64}, "sliding_window .* qwen2"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 3}, "sliding_window .* qwen3"),
        ("qwen3", {"head_dim": 32}, r"q_norm\.weight has shape"),
        ("qwen3", {"model_type": "qwen2"}, r"lack tensor .*q_proj\.bias"),
        ("qwen2", {"model_type": "llama"}, r"does not use: .*k_proj\.bias"),
        ("qwen2", {"model_type": "qwen2_moe"}, "supported: llama, qwen2, qwen3"),
    ],
)
def test_a_directory_that_is_not_what_it_says_is_named(
    pair: Build, tmp_path: Path, variant: str, change: dict[str, Any], message: str
) -> None:
    shutil.copytree(pair(variant).directory, tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=message):
        load_model(tmp_path / "model")


def test_a_window_that_is_switched_off_is_not_in_the_way(pair: Build, tmp_path: Path) -> None:
    shutil.copytree(pair("qwen2").directory, tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    off = {"use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 3}
    path.write_text(json.dumps(json.loads(path.read_text()) | off))
    assert load_model(tmp_path / "model").identity == pair("qwen2").loaded.identity
