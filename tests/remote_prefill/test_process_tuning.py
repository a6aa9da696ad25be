"""gRPC knows the experiments by their names, malloc keeps what it had, the environment wins."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SERVE = """
import asyncio, os, sys
from remote_prefill.process_tuning import tune_process
assert "grpc" not in sys.modules
tune_process()
import grpc.aio
async def main():
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        await asyncio.wait_for(channel.channel_ready(), 10)
    await server.stop(None)
asyncio.run(main())
print(os.environ["GRPC_EXPERIMENTS"])
"""

FAULTS = """
import resource
from remote_prefill.process_tuning import tune_process
tune_process()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    bytes(1 << 20)
before = faults()
for _ in range(50):
    bytearray(b"x") * (1 << 20)
print(faults() - before)
"""


def run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "GRPC_EXPERIMENTS"}
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env=kept | environment,
    )


def test_grpc_has_the_experiments_that_it_is_asked_for() -> None:
    done = run(SERVE)
    assert done.stdout.split() == ["tcp_rcv_lowat,tcp_frame_size_tuning"]
    assert "xperiment" not in done.stderr


def test_grpc_says_so_when_it_has_not() -> None:
    done = run(SERVE, GRPC_EXPERIMENTS="no_such_thing")
    assert done.stdout.split() == ["no_such_thing"]
    assert "xperiment" in done.stderr


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's mallopt")
def test_memory_of_a_message_is_not_given_back_and_fetched_again() -> None:
    kept = int(run(FAULTS).stdout)
    fetched = int(run(FAULTS, MALLOC_MMAP_THRESHOLD_="131072").stdout)
    assert kept < fetched / 10
