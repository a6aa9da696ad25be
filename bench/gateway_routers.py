"""The routers under test: ours, and others in environments of their own, all on one core."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import yaml

from bench.gateway_engine import ENGINE, INSTANCE, MODEL, PEER
from bench.wan_site import process_cpu_s
from gateway.upstream import HttpUpstream
from prfaas.errors import PrfaasError
from prfaas.limits import Limits
from prfaas.up.stack import free_ports

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENTS = ROOT / ".cache" / "routers"
VERSIONS = {"sglang": "sglang-router==0.3.2", "vllm": "vllm-router==0.1.17"}

_INSTALL_TIMEOUT_S = 300.0
_READY_TIMEOUT_S = 40.0
_STOP_S = 5.0


@dataclass(frozen=True, slots=True)
class Router:
    """One router that runs; ended by `running`."""

    name: str
    url: str
    pid: int

    def cpu_s(self) -> float:
        """CPU seconds so far, of the process and what it started, from schedstat."""
        process = psutil.Process(self.pid)
        pids = [self.pid, *(child.pid for child in process.children(recursive=True))]
        return sum(process_cpu_s(pid) for pid in pids)

    def rss_bytes(self) -> int:
        return int(psutil.Process(self.pid).memory_info().rss)


def environment(name: str, say: Callable[[str], None]) -> Path | None:
    """A Python that has this baseline; None, said aloud, where it cannot be installed."""
    python = ENVIRONMENTS / name / "bin" / "python"
    check = [str(python), "-c", f"import {name}_router.launch_router"]
    if python.exists() and subprocess.run(check, capture_output=True).returncode == 0:
        return python
    say(f"installing {VERSIONS[name]} into {python.parents[1]}")
    try:
        for command in (
            [sys.executable, "-m", "venv", str(python.parents[1])],
            [str(python), "-m", "pip", "install", "--quiet", VERSIONS[name]],
            check,
        ):
            subprocess.run(command, check=True, capture_output=True, timeout=_INSTALL_TIMEOUT_S)
    except (subprocess.SubprocessError, OSError) as exc:
        say(f"{VERSIONS[name]} cannot be had here, so its rows are left out: {exc}")
        return None
    return python


def ours(
    directory: Path,
    port: int,
    engine_url: str,
    more: Mapping[str, object] | None = None,
    name: str = "gateway",
) -> list[str]:
    """The gateway as it is shipped: routing, admission, limits, metrics, a log line a request.

    `more`: settings over those; `name`: of its file, where there are several.
    """
    settings = {
        "config_version": 1,
        "gateway": {
            "host": "127.0.0.1",
            "port": port,
            "model": MODEL,
            "engines": [{"name": "d-0", "url": engine_url}],
            **(more or {}),
        },
    }
    path = directory / f"{name}.yaml"
    path.write_text(yaml.safe_dump(settings))
    return [sys.executable, "-m", "prfaas", "gateway", "--config", str(path)]


def ours_placing(
    directory: Path, port: int, engine_urls: Sequence[str], tokenizer: Path | None = None
) -> list[str]:
    """The same before two engines, so that it looks for the one that has a prompt's prefix: by
    blocks of text, or with a tokenizer by the blocks of tokens that engines cache."""
    more: dict[str, object] = {
        "engines": [{"name": f"d-{at}", "url": url} for at, url in enumerate(engine_urls)],
        "tokenize_check_every": 0,
    }
    if tokenizer is not None:
        more["tokenizer"] = str(tokenizer)
    return ours(directory, port, "", more, "placing" if tokenizer is None else "exact")


def ours_offloading(
    directory: Path, port: int, engine_url: str, d_agent: str, p_agent: str
) -> list[str]:
    """The same with agents, so that it decides, signs and hears outcomes; every prompt is worth
    offloading."""
    settings = {
        "config_version": 1,
        "gateway": {
            "host": "127.0.0.1",
            "port": port,
            "model": MODEL,
            "engines": [{"name": ENGINE, "url": engine_url, "agent": d_agent}],
            "peers": [{"peer": PEER, "instance": INSTANCE, "watch": p_agent}],
            "transfer_key": "a key of this benchmark",
            "short_body_bytes": 0,
            "policy": {"name": "least_ttft", "min_uncached_tokens": 1},
        },
        "limits": {"fallback_budget_tokens": 1_000_000},
    }
    path = directory / "offloading.yaml"
    path.write_text(yaml.safe_dump(settings))
    return [sys.executable, "-m", "prfaas", "gateway", "--config", str(path)]


def vllm_two_legs(python: Path, port: int, prefill_url: str, decode_url: str) -> list[str]:
    """A request goes to the prefill engine and then to the decode engine."""
    command = baseline(python, "vllm", "round_robin", port, decode_url)
    at = command.index("--worker-urls")
    legs = ["--vllm-pd-disaggregation", "--prefill", prefill_url, "--decode", decode_url]
    return [*command[:at], *legs, *command[at + 2 :]]


def plain_proxy(port: int, engine_url: str) -> list[str]:
    return [sys.executable, "-m", "bench.plain_proxy", str(port), engine_url]


def baseline(python: Path, name: str, policy: str, port: int, *engine_urls: str) -> list[str]:
    """Both take the same arguments."""
    (metrics,) = free_ports(1)
    return [
        str(python), "-m", f"{name}_router.launch_router", "--host", "127.0.0.1",
        "--port", str(port), "--worker-urls", *engine_urls, "--policy", policy,
        "--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics),
        "--log-level", "warn" if name == "sglang" else "warning",
    ]  # fmt: skip


@asynccontextmanager
async def process(
    command: list[str], log: Path, core: int, *, reads_line: bool = False
) -> AsyncIterator[tuple[int, str]]:
    """A process on one core: its pid and, where asked for, its first line. Ends with the block."""
    stdout = asyncio.subprocess.PIPE if reads_line else asyncio.subprocess.DEVNULL
    with log.open("ab") as errors:
        running = await asyncio.create_subprocess_exec(
            *command,
            cwd=ROOT,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=stdout,
            stderr=errors,
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        )
    try:
        line = b""
        if running.stdout is not None:
            line = await asyncio.wait_for(running.stdout.readline(), _READY_TIMEOUT_S)
        yield running.pid, line.decode().strip()
    finally:
        if running.returncode is None:
            running.terminate()
            try:
                await asyncio.wait_for(running.wait(), _STOP_S)
            except TimeoutError:
                running.kill()
                await running.wait()


@asynccontextmanager
async def running(
    commands: Mapping[str, Callable[[int], list[str]]],
    directory: Path,
    core: int,
    say: Callable[[str], None],
    key: str = "",
) -> AsyncIterator[dict[str, Router]]:
    """All that come up, each given a free port; one that does not is said aloud and left out.

    `key`: for those that ask for one.
    """
    routers: dict[str, Router] = {}
    async with AsyncExitStack() as stack:
        for name, command in commands.items():
            (port,) = free_ports(1)
            log = directory / f"{name}.log"
            pid, _ = await stack.enter_async_context(process(command(port), log, core))
            router = Router(name, f"http://127.0.0.1:{port}", pid)
            if await _answers(router.url, key):
                routers[name] = router
                say(f"{name} is up")
            else:
                tail = log.read_text(errors="replace")[-500:]
                say(f"{name} did not come up, so its rows are left out: {tail}")
        yield routers


async def _answers(url: str, key: str) -> bool:
    """It relays a request to the engine within the time that routers take to find a worker."""
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}).encode()
    upstream = HttpUpstream(url, "router", Limits())
    headers = {"content-type": "application/json"}
    if key:
        headers["authorization"] = f"Bearer {key}"
    try:
        async with asyncio.timeout(_READY_TIMEOUT_S):
            while True:
                try:
                    async with upstream.post("/v1/chat/completions", headers, body) as response:
                        if response.status == 200 and b"hello" in await response.read(1 << 20):
                            return True
                except PrfaasError:
                    pass
                await asyncio.sleep(0.2)
    except TimeoutError:
        return False
    finally:
        await upstream.close()
