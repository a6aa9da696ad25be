"""Remote prefill gives exactly the answer of a local-only run, by the oracle of prfaas.testing."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from prfaas.testing import asking
from prfaas.testing.asking import make_prompt
from prfaas.testing.oracle import Comparison, TopTwoGap
from prfaas.testing.stack import Answer, RunningStack, wait_until

CHUNK, D_BLOCK, P_BLOCK = 64, 64, 16
OUTPUT = 12
local_only = partial(asking.local_only, max_tokens=OUTPUT)

LENGTHS = sorted(
    {1, 2, 3, 5, 40, 300, 777, 1000, 2047, 2500, 3000}
    | {edge + d for edge in (P_BLOCK, D_BLOCK, 2 * CHUNK, 1024) for d in (-1, 0, 1, 2)}
    | {5 * CHUNK + 1, 5 * CHUNK + P_BLOCK, 5 * CHUNK + P_BLOCK + 1, 7 * CHUNK, 11 * CHUNK + 33}
)


def remote(stack: RunningStack, prompt: list[int], salt: str = "remote") -> Answer:
    answer = stack.complete(prompt, max_tokens=OUTPUT, cache_salt=salt)
    assert answer.status == 200, answer.body
    return answer


def idle_counts(stack: RunningStack) -> list[dict[str, object]]:
    """Both engines' pool counts once nothing runs; the integrity check runs on the way."""

    def settled() -> list[dict[str, object]] | None:
        urls = (stack.stack.d_engine_url, stack.stack.p_engine_url)
        counts = [stack.integrity(url) for url in urls]
        busy = any(
            c["running"] or c["waiting"] or c["free_blocks"] < c["total_blocks"] for c in counts
        )
        return None if busy else counts

    return wait_until(settled, 10, "engines to be idle")


def assert_nothing_in_flight(stack: RunningStack) -> None:
    idle_counts(stack)

    def links_empty() -> bool:
        cluster = stack.get(f"{stack.stack.gateway_url}/prfaas/cluster")
        return all(r["link"]["in_flight_bytes"] == 0 for r in cluster["remotes"])

    wait_until(links_empty, 10, "links to be empty")


@pytest.mark.parametrize("length", LENGTHS)
def test_fp32_kv_gives_the_tokens_of_a_local_run(
    always_remote_fp32: RunningStack, length: int
) -> None:
    stack, prompt = always_remote_fp32, make_prompt(length, 1)
    expected = local_only(stack, prompt)
    got = remote(stack, prompt)
    assert got.token_ids == expected.token_ids
    assert got.body["usage"]["prompt_tokens"] == length
    record = stack.record(got.request_id)
    if length == 1:
        assert record["decision"]["target"] == "local"
        return
    assert record["decision"]["target"] == "remote"
    outcome = record["outcome"]
    assert (outcome["status"], outcome["reason"]) == ("staged", "")
    assert outcome["received_tokens"] == length - 1
    assert got.cached_tokens == length - 1
    assert_nothing_in_flight(stack)


@pytest.mark.parametrize("length", [2, CHUNK, CHUNK + 1, CHUNK + 2, 5 * CHUNK + 7, 1025, 3000])
def test_bf16_kv_on_one_chunk_grid_gives_the_tokens_of_a_local_run(
    always_remote_bf16: RunningStack, length: int
) -> None:
    stack, prompt = always_remote_bf16, make_prompt(length, 2)
    expected = local_only(stack, prompt)
    got = remote(stack, prompt)
    assert got.token_ids == expected.token_ids
    assert stack.record(got.request_id)["outcome"]["status"] == "staged"
    assert_nothing_in_flight(stack)


@pytest.mark.parametrize("shared", [P_BLOCK, D_BLOCK - 1, D_BLOCK, 2 * CHUNK + P_BLOCK, 640])
def test_shared_prefixes_cross_once_and_stay_exact(
    always_remote_fp32: RunningStack, shared: int
) -> None:
    stack = always_remote_fp32
    prefix = make_prompt(shared, 3)
    salt = f"shared-{shared}"
    for turn in range(3):
        prompt = prefix + make_prompt(300 + turn, 40 + turn)
        got = remote(stack, prompt, salt)
        assert got.token_ids == local_only(stack, prompt).token_ids
        outcome = stack.record(got.request_id)["outcome"]
        assert outcome["status"] == "staged"
        held = 0 if turn == 0 else shared // D_BLOCK * D_BLOCK
        assert outcome["have_tokens"] == held
        assert outcome["received_tokens"] == len(prompt) - 1 - held
        cached_at_p = 0 if turn == 0 else shared // P_BLOCK * P_BLOCK
        assert outcome["remote_cached_tokens"] == cached_at_p
    assert_nothing_in_flight(stack)


def test_a_prompt_seen_before_is_not_shipped_again(always_remote_fp32: RunningStack) -> None:
    stack, prompt = always_remote_fp32, make_prompt(5 * D_BLOCK + 1, 4)
    first = remote(stack, prompt, "again")
    second = remote(stack, prompt, "again")
    assert second.token_ids == first.token_ids
    assert second.cached_tokens == 5 * D_BLOCK
    # The feed may be behind, and the gateway then plans a transfer that D finds it does not need:
    # it asks its agent for nothing, so there is no outcome either.
    record = stack.get(f"{stack.stack.gateway_url}/prfaas/requests/{second.request_id}")
    assert record["outcome"] is None or record["outcome"]["raw_bytes"] == 0


def test_tenants_with_other_salts_share_nothing(always_remote_fp32: RunningStack) -> None:
    stack, prompt = always_remote_fp32, make_prompt(400, 5)
    for salt in ("tenant-a", "tenant-b"):
        got = remote(stack, prompt, salt)
        outcome = stack.record(got.request_id)["outcome"]
        assert (outcome["have_tokens"], outcome["remote_cached_tokens"]) == (0, 0)


def test_concurrent_requests_differ_at_near_ties_only(
    always_remote_fp32: RunningStack, tiny_gap: TopTwoGap
) -> None:
    stack = always_remote_fp32
    shared = make_prompt(200, 6)
    prompts = [
        (shared if i % 3 == 0 else []) + make_prompt(50 + 37 * i, 600 + i) for i in range(24)
    ]
    expected = [local_only(stack, prompt) for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda p: remote(stack, p, "concurrent"), prompts))
    comparison = Comparison(tiny_gap)
    for i, (prompt, want, got) in enumerate(zip(prompts, expected, answers, strict=True)):
        comparison.add(f"prompt {i}", prompt, want.token_ids, got.token_ids)
    comparison.verdict()
    targets = [stack.record(a.request_id)["decision"]["target"] for a in answers]
    assert targets.count("remote") == len(targets)
    assert_nothing_in_flight(stack)


@pytest.mark.parametrize("victim", ["p-agent", "p-engine"])
def test_answers_are_exact_when_p_is_killed_at_random_moments(
    always_remote_fp32: RunningStack, tiny_gap: TopTwoGap, victim: str
) -> None:
    stack = always_remote_fp32
    rng = random.Random(f"kill/{victim}")
    statuses: list[str] = []
    comparison = Comparison(tiny_gap)
    least, most = (4, 8) if victim == "p-agent" else (2, 6)
    for round_ in range(most):
        if round_ >= least and set(statuses) - {"staged"}:
            break
        prompts = [make_prompt(1500 + 300 * i, 7000 + 10 * round_ + i) for i in range(3)]
        expected = [local_only(stack, prompt) for prompt in prompts]
        delay_s = rng.uniform(0.0, 0.6)
        killer = threading.Thread(target=lambda d=delay_s: (time.sleep(d), stack.kill(victim)))
        with ThreadPoolExecutor(3) as pool:
            killer.start()
            answers = list(pool.map(lambda p: remote(stack, p, f"kill/{victim}"), prompts))
        killer.join()
        for i, (prompt, want, got) in enumerate(zip(prompts, expected, answers, strict=True)):
            comparison.add(f"round {round_}.{i}", prompt, want.token_ids, got.token_ids)
            record = stack.record(got.request_id)
            outcome = record.get("outcome")
            statuses.append(outcome["status"] if outcome else record["decision"]["reason"])
            if outcome and outcome["status"] == "partial":
                chunk_end = outcome["have_tokens"] + outcome["received_tokens"]
                assert chunk_end % CHUNK == 0
        stack.restart(victim)
        stack.wait_link_ready()
        assert_nothing_in_flight(stack)
    comparison.verdict()
    assert set(statuses) - {"staged"}, "no transfer was hit; the kill came too late"
