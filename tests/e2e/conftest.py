"""Fixtures of the end-to-end tests: whole stacks of processes on the tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from prfaas.testing.oracle import TopTwoGap
from prfaas.testing.slowstack import slow_stack
from prfaas.testing.stack import RunningStack, running_stack

ENGINE = {"chunk_tokens": 64, "kv_memory_bytes": 16 << 20, "max_context": 8192}


@pytest.fixture(scope="session")
def fp32_one(
    tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path
) -> Iterator[RunningStack]:
    """fp32 KV; blocks of 16 at P and 64 at D; every import read back and compared."""
    with running_stack(
        tmp_path_factory.mktemp("fp32") / "stack",
        tiny_model_dir,
        gateway={"policy": {"name": "always_remote"}, "short_body_bytes": 0},
        agent={"verify_import": True},
        d_engine={**ENGINE, "kv_dtype": "float32", "block_tokens": 64},
        p_engine={**ENGINE, "kv_dtype": "float32", "block_tokens": 16},
    ) as stack:
        yield stack


@pytest.fixture
def always_remote_fp32(fp32_one: RunningStack) -> RunningStack:
    """The same, whole again whatever the test before has left of it."""
    fp32_one.ensure_up()
    fp32_one.wait_link_ready()
    return fp32_one


@pytest.fixture(scope="session")
def always_remote_bf16(
    tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path
) -> Iterator[RunningStack]:
    """bf16 KV; chunks, tails and prefix hits start at multiples of one chunk size on both sides."""
    with running_stack(
        tmp_path_factory.mktemp("bf16") / "stack",
        tiny_model_dir,
        gateway={"policy": {"name": "always_remote"}, "short_body_bytes": 0},
        agent={"verify_import": True},
        d_engine={**ENGINE, "kv_dtype": "bfloat16", "block_tokens": 64},
        p_engine={**ENGINE, "kv_dtype": "bfloat16", "block_tokens": 64},
    ) as stack:
        yield stack


@pytest.fixture(scope="session")
def slow_one(
    tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path
) -> Iterator[RunningStack]:
    """One stack over a slow link for all tests that break something."""
    with slow_stack(tmp_path_factory.mktemp("slow"), tiny_model_dir) as stack:
        yield stack


@pytest.fixture
def slow(slow_one: RunningStack) -> RunningStack:
    """The same, whole again whatever the test before has left of it."""
    slow_one.ensure_up()
    slow_one.wait_link_ready()
    return slow_one


@pytest.fixture(scope="session")
def tiny_gap(tiny_model_dir: Path) -> TopTwoGap:
    """Top-2 logit gap of the tiny model after any tokens."""
    from local_engine.testing_gap import top_two_gap

    return top_two_gap(tiny_model_dir)
