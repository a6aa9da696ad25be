"""bf16 KV, larger blocks, prefill in chunks, no prefix cache."""

from __future__ import annotations

import random

import numpy as np
import pytest

from prfaas.testing.vllm_inprocess import InProcessVllm

ENGINE = {
    "dtype": "bfloat16",
    "block_size": 64,
    "enable_prefix_caching": False,
    "max_num_batched_tokens": 128,
    "max_num_seqs": 16,
}


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length}/{seed}").choices(range(10, 600), k=length)


@pytest.mark.parametrize("length", [2, 64, 65, 66, 129, 300])
def test_the_very_kv_lies_in_the_blocks(vllm: InProcessVllm, length: int) -> None:
    prompt = prompt_of(length)
    vllm.local_run(prompt)
    one = vllm.add(prompt)
    vllm.steps(lambda: one.tokens)
    staged = vllm.kv_of(np.array(prompt))[:, :, : length - 1]
    np.testing.assert_array_equal(vllm.read_kv(one, 0, length - 1), staged)
    vllm.finish(one)
    assert one.cached_tokens == length - 1
    (asked,) = vllm.agent.asked
    released = vllm.agent.wait_for(lambda _: asked.released)
    assert (released.result, bool(released.digest)) == ("imported", True)


def test_the_same_prompt_is_fetched_again_where_nothing_is_cached(vllm: InProcessVllm) -> None:
    prompt = prompt_of(200)
    vllm.local_run(prompt)
    for _ in range(2):
        vllm.finish(vllm.add(prompt))
    assert [(a.fetch.have, a.fetch.want) for a in vllm.agent.asked] == [(0, 199)] * 2


def test_the_rest_of_a_partial_load_is_computed_in_chunks(vllm: InProcessVllm) -> None:
    prompt = prompt_of(400)
    expected = vllm.local_run(prompt)
    vllm.agent.script.status, vllm.agent.script.token_end = "partial", 70
    one = vllm.add(prompt)
    vllm.finish(one)
    assert one.cached_tokens == 64
    assert one.tokens == expected
