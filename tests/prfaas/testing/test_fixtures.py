"""The leak checks fail the tests that leak and no others."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

_LEAKS = """
import asyncio, subprocess, sys
from multiprocessing import shared_memory
KEEP = []

def test_leaves_a_process():
    KEEP.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(20)"]))

def test_leaves_shared_memory():
    KEEP.append(shared_memory.SharedMemory(create=True, size=64))

async def test_leaves_a_task():
    KEEP.append(asyncio.create_task(asyncio.sleep(20)))

def test_clean_process():
    assert subprocess.run([sys.executable, "-c", ""], check=True).returncode == 0

def test_clean_shared_memory():
    segment = shared_memory.SharedMemory(create=True, size=64)
    segment.close()
    segment.unlink()

async def test_clean_task():
    await asyncio.create_task(asyncio.sleep(0))
    closing = asyncio.create_task(asyncio.sleep(0.1))

def test_cleanup():
    for thing in KEEP:
        if isinstance(thing, subprocess.Popen):
            thing.kill()
            thing.wait()
        elif isinstance(thing, shared_memory.SharedMemory):
            thing.close()
            thing.unlink()
"""


@pytest.mark.timeout(60)
def test_each_leak_fails_its_test_and_clean_tests_pass(tmp_path: Path) -> None:
    module = tmp_path / "test_leaks.py"
    module.write_text(_LEAKS)
    plugins = ("no:randomly", "no:cacheprovider", "prfaas.testing.fixtures")
    options = [option for plugin in plugins for option in ("-p", plugin)]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-o", "asyncio_mode=auto", str(module)],
        cwd=tmp_path,
        env=os.environ | {"PRFAAS_LEAK_GRACE_S": "1"},
        capture_output=True,
        text=True,
        timeout=50,
    )
    errors = set(re.findall(r"^ERROR .*::(\w+)", run.stdout, re.MULTILINE))
    leaking = {"test_leaves_a_process", "test_leaves_shared_memory", "test_leaves_a_task"}
    assert errors == leaking, run.stdout
    assert "7 passed" in run.stdout, run.stdout
