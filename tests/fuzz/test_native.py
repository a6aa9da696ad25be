"""The codecs' C files under the address and undefined behaviour sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "prfaas" / "codecs" / "csrc"
FLAGS = [
    *("-O1", "-g", "-std=gnu11", "-ffp-contract=off", "-Wall", "-Wextra"),
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
]
ROUNDS = 600


def test_nothing_is_read_or_written_outside_whatever_comes(tmp_path: Path) -> None:
    """States one by one, with AVX2 and with AVX-512, which makes the same bytes."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    files = [str(p) for p in SOURCES.glob("*.c") if p.name != "module.c"]
    program = tmp_path / "fuzz"
    driver = str(Path(__file__).with_name("codecs_fuzz.c"))
    command = [compiler, *FLAGS, f"-I{SOURCES}", driver, *files, "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=110)
    if "cannot find" in built.stderr and "san" in built.stderr:
        pytest.skip("the compiler has no sanitizers")
    assert built.returncode == 0, built.stderr
    assert "warning" not in built.stderr
    seed = os.environ.get("PRFAAS_FUZZ_SEED", "1")
    made = set()
    for level in ("0", "1", "2"):
        done = subprocess.run(
            [str(program), seed, str(ROUNDS), level], capture_output=True, text=True, timeout=50
        )
        assert done.returncode == 0, f"seed {seed} {level}: {done.stdout}{done.stderr}"
        assert done.stdout.startswith("ok ")
        made.add(done.stdout)
    assert len(made) == 1
