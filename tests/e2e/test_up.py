"""`prfaas up`: it stops in order, names what went wrong, and nothing outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from prfaas.testing.up_process import UP, running_up, started
from prfaas.up.stack import free_ports


def assert_gone(pids: dict[str, int]) -> None:
    deadline = time.monotonic() + 10
    while alive := [name for name, pid in pids.items() if psutil.pid_exists(pid)]:
        assert time.monotonic() < deadline, f"still running: {alive}"
        time.sleep(0.05)


@pytest.mark.timeout(120)
def test_ctrl_c_stops_everything_in_order(tiny_model_dir: Path, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    options = ("--model", str(tiny_model_dir), "--no-pin", "--port", str(port))
    with running_up(tmp_path, *options) as process:
        pids = started(process)
        assert set(pids) == {"p-engine", "p-agent", "d-agent", "d-engine", "gateway"}
        process.send_signal(signal.SIGINT)
        text, _ = process.communicate(timeout=60)
    assert process.returncode == 0, text
    assert text.rstrip().endswith("stopping"), text
    assert_gone(pids)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(120)
def test_a_process_that_dies_ends_it_all_and_is_named(tiny_model_dir: Path, tmp_path: Path) -> None:
    options = ("--model", str(tiny_model_dir), "--no-pin", "--port", "0")
    with running_up(tmp_path, *options) as process:
        pids = started(process)
        os.kill(pids["d-agent"], signal.SIGKILL)
        text, _ = process.communicate(timeout=60)
    assert process.returncode == 1, text
    assert "d-agent ended with status -9; the end of its log:" in text
    assert_gone(pids)
    (kept,) = tmp_path.iterdir()
    assert f"logs and configuration are kept in {kept}" in text
    assert (kept / "d-agent.log").exists()
    assert kept.stat().st_mode & 0o077 == 0


@pytest.mark.timeout(120)
def test_killing_it_leaves_no_orphan(tiny_model_dir: Path, tmp_path: Path) -> None:
    options = ("--model", str(tiny_model_dir), "--no-pin", "--port", "0")
    with running_up(tmp_path, *options) as process:
        pids = started(process)
        process.kill()
        process.wait()
        assert_gone(pids)


def test_a_missing_model_is_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [*UP, "--model", str(tmp_path / "absent")], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr == f"prfaas: --model: {tmp_path / 'absent'} does not exist\n"


def test_a_model_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    broken = tmp_path / "model"
    broken.mkdir()
    (broken / "config.json").write_text("{}")
    with running_up(tmp_path, "--model", str(broken), "--once") as process:
        text, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "engine ended with status" in text


def test_a_port_in_use_is_named(tmp_path: Path, tiny_model_dir: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run(
            [*UP, "--model", str(tiny_model_dir), "--port", str(port)],
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 2
    assert done.stderr.startswith(f"prfaas: --port: {port} cannot be used")
