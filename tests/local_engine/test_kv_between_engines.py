"""KV from one engine's pool to another's, through their ports: answers and digests are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from local_engine.loader import LoadedModel, load_model
from local_engine.runner import TorchRunner
from local_engine.testing import CHAIN_LAYOUT, CHAIN_VOCAB, CoreHarness, LoopbackAgents
from prfaas.layout import GroupKind, KvLayout, LayerGroup
from prfaas.testing.fake_port import FakePort
from prfaas_connect.port.messages import Release

PARAMS = {"version": 1, "transfer_id": "t", "plan": [{"peer": "p", "instance": "i"}]}
CHUNK = 8


def tokens(count: int, seed: int = 0) -> list[int]:
    return [(seed * 131 + i * 7 + i * i) % CHAIN_VOCAB for i in range(count)]


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize(("d_block", "p_block"), [(4, 4), (4, 1), (16, 4), (3, 8)])
@pytest.mark.parametrize("ring_tokens", [CHUNK, 64])
def test_kv_travels_between_two_engines(
    verify: bool, d_block: int, p_block: int, ring_tokens: int
) -> None:
    layer_token = CHAIN_LAYOUT.groups[0].token_bytes
    decode = CoreHarness(
        blocks=400 // d_block, block_tokens=d_block, port=FakePort(verify_import=verify)
    )
    prefill = CoreHarness(
        blocks=800 // p_block, block_tokens=p_block,
        port=FakePort(ring_bytes=ring_tokens * layer_token), chunk_tokens=CHUNK,
    )  # fmt: skip
    agents = LoopbackAgents(decode, prefill)
    for index, length in enumerate((1, 2, 8, 9, 30, 50, 33)):
        ids = [*tokens(20), *tokens(length, index)] if index % 2 else tokens(length, index)
        decode.submit(f"r{index}", ids, 5, params=PARAMS)
    for _ in range(3000):
        busy = decode.step() | prefill.step()
        agents.pump()
        if not busy and decode.core.idle and prefill.core.idle:
            break
    decode.assert_answered(*decode.streams)
    assert decode.runner.chunks == [], "D prefilled something itself"
    decode.assert_empty()
    prefill.assert_empty()
    assert decode.port is not None
    digests = {r.session: r.digest for r in decode.port.of(Release)}
    assert len(digests) == 6
    if verify:
        assert digests == agents.digests()


def torch_engine(
    model: LoadedModel, kv_dtype: str, block_tokens: int, **kwargs: Any
) -> CoreHarness:
    """A harness over a real model; chunks of 32 tokens."""
    config = model.config
    layers = tuple(range(config.layers))
    group = LayerGroup(GroupKind.FULL, layers, config.kv_heads, config.head_dim, kv_dtype)
    return CoreHarness(
        layout=KvLayout((group,)),
        make_runner=lambda pool: TorchRunner(model.model, pool),
        blocks=1024 // block_tokens,
        block_tokens=block_tokens,
        chunk_tokens=32,
        **kwargs,
    )


@pytest.fixture(scope="module")
def tiny_model(tiny_model_dir: Path) -> LoadedModel:
    torch.set_num_threads(1)
    return load_model(tiny_model_dir)


@pytest.mark.parametrize(
    ("kv_dtype", "d_block", "p_block"),
    # Rounded KV is the same bit for bit where prefix hits start on the chunk grid on both sides.
    [("float32", 16, 4), ("float32", 5, 64), ("bfloat16", 32, 32), ("float16", 16, 64)],
)
def test_a_real_model_answers_from_remote_kv_as_it_does_alone(
    tiny_model: LoadedModel, kv_dtype: str, d_block: int, p_block: int
) -> None:
    local = torch_engine(tiny_model, kv_dtype, 32 if d_block == 16 else d_block)
    # D caches nothing, so that P's cache has something to give.
    decode = torch_engine(
        tiny_model,
        kv_dtype,
        d_block,
        port=FakePort(staging_bytes=1 << 22, verify_import=True),
        prefix_cache=False,
    )
    prefill = torch_engine(tiny_model, kv_dtype, p_block, port=FakePort(ring_bytes=3 << 12))
    agents = LoopbackAgents(decode, prefill)
    stem = tokens(70)
    lengths = (1, 2, 31, 32, 33, 64, 97, 150)
    # One at a time: concurrency changes the shape of sums, and with it their last bits.
    for index, length in enumerate(lengths):
        shared = stem if index % 2 else []
        prompt = [token % 700 + 3 for token in (*shared, *tokens(length, index))]
        local.submit(f"r{index}", prompt, 12)
        local.run()
        decode.submit(f"r{index}", prompt, 12, params=PARAMS)
        while decode.step() | prefill.step() or not decode.core.idle:
            agents.pump()
    for name, stream in local.streams.items():
        assert decode.streams[name].tokens == stream.tokens
        assert len(stream.tokens) == 12
    remote = decode.core.stats()
    assert remote.computed_tokens == 0
    assert remote.kv_outcomes == {"prefix_at_d": 1, "staged": len(lengths) - 1}
    assert decode.port is not None
    sent = agents.digests()
    received = {r.session: r.digest for r in decode.port.of(Release)}
    assert received == sent
    assert any(record.cached for record, _ in agents.records), "P used its own prefix cache"
