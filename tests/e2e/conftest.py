"""Fixtures of the end-to-end tests: whole stacks of processes on the tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from prfaas.testing.oracle import TopTwoGap
from prfaas.testing.slowstack import slow_stack
from prfaas.testing.stack import RunningStack, running_stack

ENGINE = {"chunk_tokens": 64, "kv_memory_bytes": 16 << 20, "max_context": 8192}


def always_remote(
    directory: Path, model: Path, kv_dtype: str, p_block: int
) -> AbstractContextManager[RunningStack]:
    """Every prompt goes to P, every import is read back and compared."""
    return running_stack(
        directory / "stack",
        model,
        gateway={"policy": {"name": "always_remote"}, "short_body_bytes": 0},
        agent={"verify_import": True},
        d_engine={**ENGINE, "kv_dtype": kv_dtype, "block_tokens": 64},
        p_engine={**ENGINE, "kv_dtype": kv_dtype, "block_tokens": p_block},
    )


@pytest.fixture(scope="session")
def fp32_one(
    tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path
) -> Iterator[RunningStack]:
    """fp32 KV; blocks of 16 at P and 64 at D."""
    with always_remote(tmp_path_factory.mktemp("fp32"), tiny_model_dir, "float32", 16) as stack:
        yield stack


@pytest.fixture
def always_remote_fp32(fp32_one: RunningStack) -> RunningStack:
    return fp32_one.whole_again()


@pytest.fixture(scope="session")
def always_remote_bf16(
    tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path
) -> Iterator[RunningStack]:
    """bf16 KV; chunks, tails and prefix hits start at multiples of one chunk size on both sides."""
    with always_remote(tmp_path_factory.mktemp("bf16"), tiny_model_dir, "bfloat16", 64) as stack:
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
    return slow_one.whole_again()


@pytest.fixture(scope="session")
def tiny_gap(tiny_model_dir: Path) -> TopTwoGap:
    """Top-2 logit gap of the tiny model after any tokens."""
    from local_engine.testing_gap import top_two_gap

    return top_two_gap(tiny_model_dir)
