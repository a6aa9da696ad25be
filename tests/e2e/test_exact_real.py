"""The same exactness on SmolLM2-135M and natural text: five prompts in CI, more in test-real."""

from __future__ import annotations

import pydoc_data.topics
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from prfaas.testing.stack import RunningStack, running_stack, wait_until
from prfaas.tokens import Tokenizer

CHUNK, D_BLOCK, P_BLOCK = 256, 32, 16
OUTPUT = 8
IN_CI = (2, D_BLOCK + 1, CHUNK + 1, 2 * CHUNK + 45, 1000)
ALL = sorted(
    {1, 3, 5, 100, 777, 1500, 2047, 2500, 3000, 3 * CHUNK, 3 * CHUNK + P_BLOCK}
    | {edge + d for edge in (P_BLOCK, D_BLOCK, CHUNK, 2 * CHUNK, 1024) for d in (-1, 0, 1, 2)}
)

pytestmark = pytest.mark.real_model


@pytest.fixture(scope="module")
def stack(
    tmp_path_factory: pytest.TempPathFactory, demo_model_path: Path
) -> Iterator[RunningStack]:
    """Two engines with the demo model, fp32 KV, other block sizes on the two sides."""
    engine = {"chunk_tokens": CHUNK, "kv_memory_bytes": 512 << 20, "kv_dtype": "float32"}
    with running_stack(
        tmp_path_factory.mktemp("real") / "stack",
        demo_model_path,
        gateway={"policy": {"name": "always_remote"}, "short_body_bytes": 0},
        agent={"verify_import": True},
        d_engine={**engine, "block_tokens": D_BLOCK},
        p_engine={**engine, "block_tokens": P_BLOCK},
    ) as running:
        yield running


@pytest.fixture(scope="module")
def text_tokens(demo_model_path: Path) -> list[int]:
    """Some ten thousand tokens of natural text."""
    text = "\n".join(pydoc_data.topics.topics.values())[:60_000]
    return Tokenizer.load(demo_model_path).encode(text)


def check(stack: RunningStack, text_tokens: list[int], length: int) -> None:
    """One prompt of `length` tokens, prefilled at D and at P: the same tokens come out."""
    start = random.Random(length).randrange(len(text_tokens) - length)
    prompt = text_tokens[start : start + length]
    local = stack.complete(
        prompt,
        url=stack.stack.d_engine_url,
        timeout_s=110,
        max_tokens=OUTPUT,
        cache_salt=f"oracle-{length}",
    )
    remote = stack.complete(prompt, timeout_s=110, max_tokens=OUTPUT, cache_salt=f"r-{length}")
    assert (local.status, remote.status) == (200, 200), (local.body, remote.body)
    assert remote.token_ids == local.token_ids
    record = stack.record(remote.request_id)
    if length > 1:
        outcome = record["outcome"]
        assert (outcome["status"], outcome["received_tokens"]) == ("staged", length - 1)


@pytest.mark.parametrize("length", IN_CI)
def test_the_demo_model_answers_as_a_local_run(
    stack: RunningStack, text_tokens: list[int], length: int
) -> None:
    check(stack, text_tokens, length)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("length", ALL)
def test_the_demo_model_answers_as_a_local_run_at_every_boundary(
    stack: RunningStack, text_tokens: list[int], length: int
) -> None:
    check(stack, text_tokens, length)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_model_answers_under_concurrency(
    stack: RunningStack, text_tokens: list[int]
) -> None:
    prompts = [text_tokens[400 * i : 400 * i + 150 + 90 * i] for i in range(8)]
    url = stack.stack.d_engine_url
    local = [
        stack.complete(p, url=url, timeout_s=110, max_tokens=OUTPUT, cache_salt=f"o{i}")
        for i, p in enumerate(prompts)
    ]
    with ThreadPoolExecutor(4) as pool:
        remote = list(
            pool.map(
                lambda p: stack.complete(p, timeout_s=300, max_tokens=OUTPUT, cache_salt="c"),
                prompts,
            )
        )
    # Natural text has clear winners: no near tie was seen in these prompts.
    assert [r.token_ids for r in remote] == [a.token_ids for a in local]


def test_nothing_is_left_afterwards(stack: RunningStack) -> None:
    def idle() -> bool:
        urls = (stack.stack.d_engine_url, stack.stack.p_engine_url)
        counts = [stack.integrity(url) for url in urls]
        return all(
            not c["running"] and not c["waiting"] and c["free_blocks"] == c["total_blocks"]
            for c in counts
        )

    wait_until(idle, 30, "engines to be idle")
