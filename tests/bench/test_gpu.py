"""The CUDA benchmark: says where there is no GPU, knows what it needs, and runs when tried."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from bench.gpu_packages import NEEDED, missing, present, read_pins
from prfaas.codecs.native import native

ROOT = Path(__file__).parents[2]


def test_without_a_gpu_it_says_so_and_exits_0() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    done = subprocess.run(
        [ROOT / "bench" / "gpu.sh"],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "bench gpu: no CUDA GPU on this machine, nothing measured\n"


def test_it_knows_every_dependency_of_the_product() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["engine"]]
    names = {re.split(r"[<>=!;\[ ]", item)[0].lower().replace("_", "-") for item in wanted}
    assert names - {"prfaas-connect", "torch"} <= set(NEEDED.values())


def test_here_nothing_is_missing_and_what_is_missing_is_pinned() -> None:
    assert missing(read_pins()) == []
    assert not present("no_such_module.inner")
    assert set(NEEDED.values()) <= set(read_pins())


@pytest.mark.timeout(180)
def test_the_tiny_trial_finds_equal_answers_and_leaves_no_figures() -> None:
    results = ROOT / "bench" / "results" / "gpu.json"
    before = results.read_bytes() if results.exists() else None
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu", "--tiny"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "exact: 1 share (of 5 prompts equal)" in done.stdout
    assert "remote_ttft.512" in done.stdout
    if native is not None:
        assert "stand-ins of streams and events, not a measurement" in done.stdout
        assert "codec.bytes_equal: 1 1: yes" in done.stdout
    assert (results.read_bytes() if results.exists() else None) == before
