"""Tests of the watch on vLLM's server, with processes that are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from prfaas_connect.vllm.server_watch import ServerWatch

_SERVER = """
import multiprocessing, os, sys, time

def engine():
    from prfaas_connect.vllm.server_watch import ServerWatch
    watch = ServerWatch(lambda: print("gone", flush=True), interval_s=0.01)
    print(os.getppid(), flush=True)
    watch._thread.join(20)

if __name__ == "__main__":
    multiprocessing.get_context("fork").Process(target=engine).start()
    time.sleep(60)
"""


def test_an_engine_hears_that_its_server_was_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", _SERVER], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        assert int(server.stdout.readline()) == server.pid
        os.kill(server.pid, signal.SIGKILL)
        assert server.stdout.readline() == b"gone\n"


def test_an_engine_in_its_server_s_own_process_has_nothing_to_watch() -> None:
    watch = ServerWatch(lambda: None)
    assert watch._thread is None
    watch.close()
