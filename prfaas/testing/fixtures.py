"""Pytest plugin: every test is seeded and leaves no process, task or shared memory behind."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import sys
import time
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

T = TypeVar("T")

_GRACE_S = float(os.environ.get("PRFAAS_LEAK_GRACE_S", "10"))
"""How long what a test closed may take to be gone: exits and cancelled tasks are not instant."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The task check needs a running loop, so only coroutine tests get it; first in, last out."""
    for item in items:
        if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.function):
            item.fixturenames.insert(0, "no_task_left")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """pytest-randomly seeds random and numpy; torch is seeded here once something loaded it."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(zlib.crc32(item.nodeid.encode()))


@pytest.fixture(autouse=True)
def no_process_or_shared_memory_left() -> Iterator[None]:
    """Fail a test that leaves a child process or a shared memory mapping it made.

    A process that was there before may have been restarted: it is known by its command line.
    """
    processes, segments = _child_processes(), _shared_memory()
    yield
    left = _wait_gone(lambda: set(_child_processes() - processes))
    assert not left, f"processes left behind: {sorted(left)}"
    if _shared_memory() - segments:
        gc.collect()
    unmapped = _wait_gone(lambda: _shared_memory() - segments)
    assert not unmapped, f"shared memory left mapped: {sorted(unmapped)}"


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama model as a Hugging Face directory; read it, never write to it."""
    from prfaas.testing.tinymodel import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def tiny_hybrid_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random hybrid: recurrent layers first, between and last, two attention layers."""
    from prfaas.testing.tinymodel import make_tiny_model

    directory = tmp_path_factory.mktemp("hybrid") / "model"
    return make_tiny_model(directory, layers=5, recurrent=(0, 2, 4))


@pytest.fixture
async def no_task_left() -> AsyncIterator[None]:
    """Fail a test that leaves an asyncio task running."""
    before = asyncio.all_tasks()
    yield
    deadline = time.monotonic() + _GRACE_S
    while left := {t for t in asyncio.all_tasks() - before if t is not asyncio.current_task()}:
        if time.monotonic() > deadline:
            raise AssertionError(f"tasks left running: {sorted(map(repr, left))}")
        await asyncio.sleep(0.01)


def _wait_gone(left: Callable[[], set[T]]) -> set[T]:
    deadline = time.monotonic() + _GRACE_S
    while (remaining := left()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return remaining


def _child_processes() -> Counter[str]:
    """Command lines of living direct children, without their numbers (pipes differ from start to
    start), but for multiprocessing's helpers, which serve all tests.
    """
    alive: Counter[str] = Counter()
    for path in Path(f"/proc/{os.getpid()}/task").glob("*/children"):
        try:
            pids = [int(pid) for pid in path.read_text().split()]
        except OSError:
            continue
        alive.update(text for pid in pids if "multiprocessing" not in (text := _describe(pid)))
    return alive


def _describe(pid: int) -> str:
    try:
        words = psutil.Process(pid).cmdline()
    except psutil.Error:
        return "(gone)"
    return " ".join(word for word in words if not word.isdigit())


def _shared_memory() -> set[str]:
    """Names of the /dev/shm segments this process has mapped."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return set()
    return {line.split()[5] for line in lines if "/dev/shm/" in line}
