"""vLLM decodes from KV that the agent staged: exact, bounded in each step, and safe when it ends
early.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from prfaas.testing.vllm_inprocess import InProcessVllm

OPTIONS = {"import_bytes_per_step": 8192}
"""One tensor of a chunk is 32 KiB: a load takes many steps, so that a test may step in."""


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length}/{seed}").choices(range(10, 600), k=length)


@pytest.mark.parametrize("length", [2, 31, 32, 33, 34, 63, 64, 65, 66, 129, 300, 513])
def test_remote_kv_gives_the_tokens_of_a_local_run(vllm: InProcessVllm, length: int) -> None:
    prompt = prompt_of(length)
    expected = vllm.local_run(prompt)
    one = vllm.add(prompt)
    vllm.steps(lambda: one.tokens)
    staged = vllm.kv_of(np.array(prompt))[:, :, : length - 1]
    np.testing.assert_array_equal(vllm.read_kv(one, 0, length - 1), staged)
    vllm.finish(one)
    assert one.tokens == expected
    assert one.cached_tokens == length - 1
    (asked,) = vllm.agent.asked
    released = vllm.agent.wait_for(lambda _: asked.released)
    assert (released.result, released.imported_tokens) == ("imported", length - 1)
    assert (asked.fetch.have, asked.fetch.want) == (0, length - 1)


def test_the_digest_is_that_of_the_staged_bytes(vllm: InProcessVllm) -> None:
    import hashlib

    prompt = prompt_of(200)
    vllm.local_run(prompt)
    one = vllm.add(prompt)
    vllm.finish(one)
    (asked,) = vllm.agent.asked
    released = vllm.agent.wait_for(lambda _: asked.released)
    staged = vllm.agent.extent(asked, 199)
    assert released.digest == hashlib.blake2b(staged, digest_size=16).hexdigest()


def test_changed_kv_changes_the_answer(vllm: InProcessVllm) -> None:
    prompt = prompt_of(100)
    expected = vllm.local_run(prompt)
    vllm.agent.script.kv = lambda tokens: -vllm.kv_of(tokens)
    one = vllm.add(prompt)
    vllm.finish(one)
    assert one.tokens != expected


def test_a_prefix_in_the_cache_is_not_asked_for(vllm: InProcessVllm) -> None:
    prefix = prompt_of(96)
    prompt = prefix + prompt_of(101, seed=1)
    expected = vllm.local_run(prompt)
    first = vllm.add(prefix, plan=False)
    vllm.finish(first)
    one = vllm.add(prompt)
    vllm.finish(one)
    assert one.tokens == expected
    (asked,) = vllm.agent.asked
    assert (asked.fetch.have, asked.fetch.want) == (96, 196)
    assert one.cached_tokens == 196


def test_a_prompt_that_is_all_cached_is_told_and_not_waited_for(vllm: InProcessVllm) -> None:
    prompt = prompt_of(97)
    expected = vllm.local_run(prompt)
    vllm.finish(vllm.add(prompt, plan=False))
    vllm.agent.script.status = ""
    one = vllm.add(prompt)
    vllm.finish(one)
    assert one.tokens == expected
    (asked,) = vllm.agent.wait_for(lambda agent: agent.asked)
    assert asked.fetch.have == asked.fetch.want == 96


@pytest.mark.parametrize("token_end", [7, 32, 40, 64, 150])
def test_a_part_that_came_is_used_and_the_rest_computed(
    vllm: InProcessVllm, token_end: int
) -> None:
    prompt = prompt_of(200)
    expected = vllm.local_run(prompt)
    vllm.agent.script.status, vllm.agent.script.token_end = "partial", token_end
    one = vllm.add(prompt)
    vllm.finish(one)
    assert one.tokens == expected
    assert one.cached_tokens == token_end // 32 * 32


def test_a_refusal_ends_the_request_with_an_error(vllm: InProcessVllm) -> None:
    vllm.agent.script.status, vllm.agent.script.message = "refused", "no instance has room"
    one = vllm.add(prompt_of(100))
    vllm.finish(one)
    assert one.finish_reason == "error"
    assert one.tokens == []


def test_memory_that_cannot_be_reached_ends_the_request_with_an_error(vllm: InProcessVllm) -> None:
    prompt = prompt_of(100)
    vllm.local_run(prompt)
    port = vllm.worker._worker._port
    inner, port.staging = port.staging, lambda *_: None
    timeout = __import__("prfaas_connect.vllm.decode_worker", fromlist=["x"])
    before, timeout.JOIN_TIMEOUT_S = timeout.JOIN_TIMEOUT_S, 0.05
    try:
        one = vllm.add(prompt)
        vllm.finish(one)
    finally:
        port.staging, timeout.JOIN_TIMEOUT_S = inner, before
    assert one.finish_reason == "error"
    (asked,) = vllm.agent.asked
    assert vllm.agent.wait_for(lambda _: asked.released).result == "failed"


def test_a_step_copies_a_bounded_part_and_others_go_on(vllm: InProcessVllm) -> None:
    prompt = prompt_of(400)
    vllm.local_run(prompt)
    other = vllm.add(prompt_of(20, seed=5), plan=False, max_tokens=100)
    vllm.steps(lambda: other.tokens)
    one = vllm.add_loading(prompt, steps=0)
    before = len(other.tokens)
    vllm.steps(lambda: one.tokens)
    # 7 chunks of 3 layers, one tensor in a step, one of them before it was looked at.
    assert 18 <= len(other.tokens) - before <= 25
    vllm.finish(one, other)


def test_a_client_that_leaves_mid_load_frees_blocks_and_staging(vllm: InProcessVllm) -> None:
    prompt = prompt_of(400)
    vllm.local_run(prompt)
    free = vllm.free_blocks
    one = vllm.add_loading(prompt)
    vllm.abort(one)
    vllm.steps(lambda: vllm.free_blocks == free, 50)
    (asked,) = vllm.agent.asked
    assert vllm.agent.wait_for(lambda _: asked.released).result == "aborted"


def test_the_agent_may_die_while_a_request_waits(vllm: InProcessVllm) -> None:
    prompt = prompt_of(100)
    expected = vllm.local_run(prompt)
    vllm.agent.script.status = ""
    one = vllm.add(prompt)
    vllm.step()
    vllm.agent.wait_for(lambda agent: agent.asked)
    vllm.agent.stop()
    vllm.finish(one)
    assert one.tokens == expected
    vllm.agent.asked.clear()
    vllm.agent.start()
    vllm.agent.script.status = "staged"
    vllm.wait(lambda: vllm.half._port.connected)
    assert vllm.engine.reset_prefix_cache()
    again = vllm.add(prompt)
    vllm.finish(again)
    assert again.tokens == expected
    assert again.cached_tokens == 99


def test_the_agent_may_die_in_the_middle_of_a_load(vllm: InProcessVllm) -> None:
    prompt = prompt_of(400)
    expected = vllm.local_run(prompt)
    one = vllm.add_loading(prompt)
    vllm.agent.stop()
    vllm.finish(one)
    assert one.tokens == expected
    assert one.cached_tokens == 399
    vllm.agent.asked.clear()
    vllm.agent.start()


def test_two_requests_with_one_prefix_fetch_it_once(vllm: InProcessVllm) -> None:
    prefix = prompt_of(320)
    prompts = [prefix + prompt_of(20, seed=seed) for seed in (1, 2)]
    expected = [vllm.local_run(prompt) for prompt in prompts]
    requests = [vllm.add(prompt) for prompt in prompts]
    vllm.finish(*requests)
    assert [one.tokens for one in requests] == expected
    assert [asked.fetch.have for asked in vllm.agent.asked] == [0, 320]


def test_requests_whose_logprobs_need_the_whole_prompt_are_computed(vllm: InProcessVllm) -> None:
    prompt = prompt_of(100)
    expected = vllm.local_run(prompt)
    one = vllm.add(prompt, prompt_logprobs=1)
    vllm.finish(one)
    assert one.tokens == expected


def test_many_at_once_are_all_exact(vllm: InProcessVllm) -> None:
    prompts = [prompt_of(30 + 37 * index, seed=index) for index in range(10)]
    expected = [vllm.local_run(prompt) for prompt in prompts]
    requests = [vllm.add(prompt) for prompt in prompts]
    vllm.finish(*requests)
    assert [one.tokens for one in requests] == expected
    assert [one.cached_tokens for one in requests] == [len(p) - 1 for p in prompts]
