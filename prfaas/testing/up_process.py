"""`prfaas up` as a process of a test."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

UP = (sys.executable, "-m", "prfaas", "up")


@contextmanager
def running_up(tmp_path: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A started `prfaas up` with its temporary directories below `tmp_path`."""
    process = subprocess.Popen(
        [*UP, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "1", "COLUMNS": "200"},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def started(process: subprocess.Popen[str]) -> dict[str, int]:
    """Process ids by name, once all five run."""
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if line.startswith("running: "):
            return {name: int(pid) for name, pid in re.findall(r"([a-z-]+) (\d+)", line[9:])}
    raise AssertionError("".join(seen))
