"""A model with recurrent layers over the wire: states come at checkpoints, answers are exact."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from prfaas.testing.asking import Asker, make_prompt
from prfaas.testing.footprint import wait_nothing_held
from prfaas.testing.slowstack import (
    CHUNK,
    MANY_TOKENS,
    assert_imports_were_whole,
    fast_link,
    is_recovered,
    slow_stack,
)
from prfaas.testing.stack import RunningStack, running_stack

CHECKPOINT = 2 * CHUNK
"""512 bytes of KV for each token, 6 KiB of states: a tenth of 128 tokens, not of 64."""
ENGINE = {
    "chunk_tokens": CHUNK,
    "kv_memory_bytes": 16 << 20,
    "state_memory_bytes": 1 << 20,
    "max_context": 8192,
    "kv_dtype": "float32",
}
IMPORTED = 'prfaas_agent_imports_total{result="imported"}'


@pytest.fixture(scope="module")
def hybrid(
    tmp_path_factory: pytest.TempPathFactory, tiny_hybrid_dir: Path
) -> Iterator[RunningStack]:
    """Blocks of 16 at P and 64 at D; every import read back and compared."""
    with running_stack(
        tmp_path_factory.mktemp("hybrid") / "stack",
        tiny_hybrid_dir,
        gateway={"policy": {"name": "always_remote"}, "short_body_bytes": 0},
        agent={"verify_import": True},
        d_engine={**ENGINE, "block_tokens": 64},
        p_engine={**ENGINE, "block_tokens": 16},
    ) as stack:
        yield stack
        assert_imports_were_whole(stack)


@pytest.mark.parametrize(
    "length",
    [1, 2, 17, 63, 64, 65, 66, 127, 128, 129, 130, 191, 257, 640, 1000, 1025, 2050],
)
def test_remote_prefill_gives_the_tokens_of_a_local_run(hybrid: RunningStack, length: int) -> None:
    with Asker(hybrid, max_tokens=12) as asker:
        prompt = make_prompt(length, "hybrid")
        answer = asker.ask(prompt)
        record = asker.check(prompt, answer)
        if length == 1:
            assert record["decision"]["target"] == "local"
            return
        outcome = record["outcome"]
        assert (outcome["status"], outcome["reason"]) == ("staged", "")
        assert outcome["received_tokens"] == answer.cached_tokens == length - 1
        states = (length - 2) // CHECKPOINT + 1
        assert outcome["raw_bytes"] == 512 * (length - 1) + 6144 * states
    wait_nothing_held(hybrid)


@pytest.mark.parametrize("shared", [60, 200, 640])
def test_a_shared_prefix_counts_as_far_as_a_state_is_kept(
    hybrid: RunningStack, shared: int
) -> None:
    prefix = make_prompt(shared, "prefix")
    with Asker(hybrid, max_tokens=12, salt=f"shared-{shared}") as asker:
        for turn in range(3):
            prompt = prefix + make_prompt(300 + turn, f"tail/{turn}")
            outcome = asker.outcome(prompt)
            assert outcome["status"] == "staged"
            # D has the states that came, P those of every chunk it computed.
            held = 0 if turn == 0 else shared // CHECKPOINT * CHECKPOINT
            assert outcome["have_tokens"] == held
            assert outcome["received_tokens"] == len(prompt) - 1 - held
            cached_at_p = 0 if turn == 0 else shared // CHUNK * CHUNK
            assert outcome["remote_cached_tokens"] == cached_at_p
    wait_nothing_held(hybrid)


def test_a_prompt_seen_before_goes_on_from_its_last_state(hybrid: RunningStack) -> None:
    with Asker(hybrid, max_tokens=12, salt="again") as asker:
        prompt = make_prompt(3 * CHECKPOINT + 1, "again")
        asker.outcome(prompt)
        second = asker.ask(prompt)
        asker.check(prompt, second)
        assert second.cached_tokens == 3 * CHECKPOINT
        # What D decoded itself is kept as well: the next turn of a conversation goes on from there.
        longer = [*prompt, *asker.ask(prompt, max_tokens=CHUNK + 8).token_ids, 11]
        third = asker.ask(longer)
        assert third.status == 200
        assert third.cached_tokens == len(longer) - 1
        record = hybrid.record(third.request_id)
        assert record["outcome"] is None or record["outcome"]["have_tokens"] == 7 * CHUNK
    wait_nothing_held(hybrid)


@pytest.fixture(scope="module")
def slow_hybrid_one(
    tmp_path_factory: pytest.TempPathFactory, tiny_hybrid_dir: Path
) -> Iterator[RunningStack]:
    """One stack over a slow link for both victims."""
    with slow_stack(tmp_path_factory.mktemp("slow-hybrid"), tiny_hybrid_dir) as stack:
        yield stack


@pytest.fixture
def slow_hybrid(slow_hybrid_one: RunningStack) -> RunningStack:
    return slow_hybrid_one.whole_again()


@pytest.mark.parametrize("victim", ["p-agent", "p-engine"])
def test_p_killed_at_random_moments_leaves_whole_checkpoints(
    slow_hybrid: RunningStack, victim: str
) -> None:
    """The agent dies while it sends, the engine while it computes, until a transfer was cut."""
    rng = random.Random(f"hybrid/{victim}")
    stack, statuses = slow_hybrid, []
    with Asker(stack, salt=victim) as asker:
        while len(statuses) < 2 or ("partial" not in statuses and len(statuses) < 6):
            round_ = len(statuses)
            prompt = make_prompt(MANY_TOKENS, f"{victim}/{round_}")
            with fast_link(stack) if victim == "p-engine" else nullcontext():
                asking = asker.start(prompt)
                asker.wait_moving(rng.randrange(100_000, 1_200_000))
                stack.kill(victim)
                answer = asking.result(60)
            outcome = asker.check(prompt, answer)["outcome"]
            statuses.append(outcome["status"])
            end = outcome["have_tokens"] + outcome["received_tokens"]
            assert end == len(prompt) - 1 or end % CHECKPOINT == 0
            stack.restart(victim)
            is_recovered(stack, asker, f"{victim}/{round_}")
        assert stack.metrics("d-agent")[IMPORTED] > 0
    assert "partial" in statuses, f"no transfer was cut midway: {statuses}"
