"""A real vLLM server as a child, told ready like our own processes; `.venv-vllm` has it.

Its engine and its workers are processes that outlive a server which is killed; here all of them
end with this one, however that ends.

python -m prfaas.testing.vllm_server --port P -- MODEL [options of vLLM]
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("PRFAAS_VLLM_VENV", ROOT / ".venv-vllm")) / "bin" / "python"
READY_TIMEOUT_S = 300.0
"""A start takes 40 s of CPU, as much again where it compiles, and two may start at once."""


def vllm_is_here() -> bool:
    """Whether its environment has been built (scripts/vllm_env.sh)."""
    return PYTHON.is_file() and (PYTHON.parents[1] / ".installed-pins").is_file()


def environment(core: str = "0") -> dict[str, str]:
    """Of a vLLM on a CPU `core`, with the working tree's plug-in."""
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PYTHONHASHSEED": "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": core,
        "OMP_NUM_THREADS": "1",
    }


def _guard_of(group: int) -> subprocess.Popen[bytes]:
    """A process that kills the group once its input ends, as it does with this process."""
    command = ("/bin/sh", "-c", 'read -r _; kill -s KILL -- "-$0"', str(group))
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    )


def _healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def main(argv: Sequence[str]) -> int:
    """Run until the server ends or we are told to; its status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ready-fd", type=int)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--core", default="0")
    parser.add_argument("vllm", nargs="*")
    # `--ready-fd N` comes last, behind the `--` of vLLM's own options.
    words = list(argv)
    ready = words[-1:] if len(words) > 1 and words[-2] == "--ready-fd" else []
    given = parser.parse_args(words[:-2] if ready else words)
    command = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", *given.vllm]
    command += ["--host", "127.0.0.1", "--port", str(given.port)]
    server = subprocess.Popen(command, env=environment(given.core), start_new_session=True, cwd="/")
    told = False

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal told
        told = True
        os.killpg(server.pid, signal.SIGTERM if server.poll() is None else signal.SIGKILL)

    with _guard_of(server.pid):
        signal.signal(signal.SIGTERM, end)
        signal.signal(signal.SIGINT, end)
        while server.poll() is None and not _healthy(given.port):
            time.sleep(0.2)
        if ready and server.poll() is None:
            os.write(int(ready[0]), f"{given.port}\n".encode())
            os.close(int(ready[0]))
        status = server.wait()
    return 0 if told else status or 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
