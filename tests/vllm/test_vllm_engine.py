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


_IMPORT = """
import sys
import prfaas_connect
from prfaas_connect.vllm.connector import PrfaasConnector
ours = {n.partition(".")[0] for n in sys.modules} & {"prfaas", "grpc", "google"}
print(prfaas_connect.__file__, sorted(ours))
"""


def test_the_connector_s_wheel_is_all_it_needs() -> None:
    """As it is installed, without the working tree, it loads neither prfaas nor grpc."""
    root = HERE.parents[2]
    subprocess.run([root / "scripts" / "vllm_env.sh"], check=True, timeout=200)
    done = subprocess.run(
        [PYTHON, "-I", "-c", _IMPORT], cwd="/", capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    path, loaded = done.stdout.splitlines()[-1].split(" ", 1)
    assert Path(path).is_relative_to(PYTHON.parents[1])
    assert loaded == "[]"
