"""Loads where blocks are scarce: a pool that holds one and a half of the requests."""

from __future__ import annotations

import random

import numpy as np

from prfaas.testing.vllm_inprocess import InProcessVllm

ENGINE = {"num_gpu_blocks_override": 21, "max_model_len": 600}
"""One of them is nobody's. A prompt below takes 13."""
OPTIONS = {"import_bytes_per_step": 8192}


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length}/{seed}").choices(range(10, 600), k=length)


def test_two_loads_come_one_after_the_other_and_are_exact(vllm: InProcessVllm) -> None:
    prompts = [prompt_of(400, seed) for seed in (1, 2)]
    expected = [vllm.local_run(prompt) for prompt in prompts]
    requests = [vllm.add(prompt) for prompt in prompts]
    vllm.finish(*requests)
    assert [one.tokens for one in requests] == expected
    assert [one.cached_tokens for one in requests] == [399, 399]
    for asked in vllm.agent.asked:
        released = vllm.agent.wait_for(lambda _, asked=asked: asked.released)
        assert released.result == "imported"


def test_late_bytes_never_reach_blocks_that_are_anothers(vllm: InProcessVllm) -> None:
    prompt, other_prompt = prompt_of(400), prompt_of(390, seed=1)
    vllm.local_run(prompt)
    expected = vllm.local_run(other_prompt)
    one = vllm.add_loading(prompt)
    taken = vllm.blocks(one)
    vllm.abort(one)
    other = vllm.add(other_prompt, plan=False, max_tokens=8)
    vllm.steps(lambda: other.tokens)
    assert set(vllm.blocks(other)) & set(taken)
    found = vllm.read_kv(other, 0, 390)
    np.testing.assert_array_equal(found, vllm.kv_of(np.array(other_prompt)))
    vllm.finish(other)
    assert other.tokens == expected


def test_a_refusal_in_a_full_pool_waits_for_room_and_disturbs_nobody(vllm: InProcessVllm) -> None:
    # It claims one block, but vLLM admits no request whose prompt does not fit as a whole.
    expected = vllm.local_run(prompt_of(500), max_tokens=60)
    runs = vllm.add(prompt_of(500), plan=False, max_tokens=60)
    vllm.steps(lambda: runs.tokens)
    vllm.agent.script.status = "refused"
    one = vllm.add(prompt_of(400, 3))
    vllm.finish(one, runs)
    assert one.finish_reason == "error"
    assert runs.tokens == expected


def test_a_request_that_is_preempted_after_its_load_is_computed_again(vllm: InProcessVllm) -> None:
    # 12 and 7 blocks of the 20, and then both grow: the later one must give way.
    prompts = [prompt_of(380, 4), prompt_of(220, 5)]
    expected = [vllm.local_run(prompt, max_tokens=60) for prompt in prompts]
    requests = [vllm.add(prompt, max_tokens=60) for prompt in prompts]
    preempted = vllm.count_preemptions()
    vllm.finish(*requests)
    assert preempted(), "nothing was preempted: the test tests nothing"
    assert [one.tokens for one in requests] == expected
    assert len(vllm.agent.asked) == 2
