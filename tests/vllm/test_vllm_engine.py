"""Runs tests/vllm/engine in .venv-vllm, a process for each file: one holds one vLLM."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from prfaas.testing.vllm_server import PYTHON, vllm_is_here

HERE = Path(__file__).parent / "engine"
FILES = sorted(path.name for path in HERE.glob("test_*.py"))

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(320),
    pytest.mark.skipif(not vllm_is_here(), reason="no vLLM here: scripts/vllm_env.sh builds it"),
]


@pytest.mark.parametrize("file", FILES)
def test_in_one_process_with_vllm(file: str) -> None:
    command = [PYTHON, "-m", "pytest", "-c", "pytest.ini", "--rootdir", ".", "--confcutdir", "."]
    done = subprocess.run(
        [*command, "-q", "--tb=short", file],
        cwd=HERE,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]
    print(done.stdout[-2_000:])
