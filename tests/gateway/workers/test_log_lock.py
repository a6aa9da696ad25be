"""Lines of several processes come out whole, also where they are longer than a pipe takes."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.workers.log_lock import LogLock, share_handlers

WRITES = """
import logging, sys
from pathlib import Path
from gateway.workers.log_lock import share_handlers

logging.basicConfig(level=logging.INFO, format="%(message)s")
share_handlers(Path(sys.argv[1]))
for number in range(40):
    logging.getLogger("x").info("%s", sys.argv[2] * 30_000)
"""


def test_lines_do_not_mix(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    made = [
        subprocess.Popen([sys.executable, "-c", WRITES, tmp_path / "lock", mark], stderr=writer)
        for mark in "ab"
    ]
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        lines = pipe.read().split(b"\n")[:-1]
    for process in made:
        assert process.wait(60) == 0
    assert len(lines) == 80
    assert set(lines) == {b"a" * 30_000, b"b" * 30_000}


def test_it_is_taken_again_by_who_has_it(tmp_path: Path) -> None:
    one, other = LogLock(tmp_path / "lock"), LogLock(tmp_path / "lock")
    with one, one:
        pass
    with other:
        pass


def test_the_roots_handlers_have_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handler = logging.StreamHandler()
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    share_handlers(tmp_path / "lock")
    assert isinstance(handler.lock, LogLock)
    with handler.lock:
        pass
