"""Real vLLMs on a core for each side: a pair with prfaas, one with shared storage, one alone."""

from __future__ import annotations

import json
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import shared_storage
from bench.site import Site, watched
from local_engine.demo_safetensors import demo_model_directory
from prfaas.settings import load_settings
from prfaas.testing.link import LinkShape
from prfaas.testing.link_process import LinkProcess
from prfaas.testing.vllm_beside import agent_settings, vllm_options
from prfaas.up.client import OpenAIClient
from prfaas.up.cluster import paired, wait_cluster
from prfaas.up.paths import default_cache_dir
from prfaas.up.process import ProcessSpec
from prfaas.up.stack import Stack, StackPlan, engine_cores, free_ports
from prfaas.up.supervisor import Supervisor

MODEL_NAME = "smollm2-135m-instruct"
BLOCK_TOKENS = 32
D_BATCH_TOKENS = 256
"""A local prefill goes through D in pieces of this size, between which running chats decode."""
P_BATCH_TOKENS = 4096
"""Whole prompts at P: ExampleConnector saves nothing right when a prompt is cut."""

_MAX_CONTEXT = 4096
_KV_BYTES = 256 << 20
_READY_TIMEOUT_S = 600.0
_PAIRED_TIMEOUT_S = 120.0
_REQUEST_TIMEOUT_S = 600.0
_STOP_GRACE_S = 15.0


@dataclass(frozen=True, slots=True)
class SharedStorage:
    """A pair of vLLMs with ExampleConnector, whose files go from P's directory to D's."""

    p_engine: OpenAIClient
    d_engine: OpenAIClient
    p_root: Path
    d_root: Path
    link: LinkProcess
    """Bent like the other pair's; what is at its near end serves P's files."""


@dataclass(frozen=True, slots=True)
class VllmSite:
    """Clients of everything that runs; closed by `running_vllm_site`."""

    site: Site
    """The pair with prfaas; nobody is `serial`."""
    storage: SharedStorage
    alone: OpenAIClient
    """A vLLM on D's core without any connector."""
    model: Path
    pids: Mapping[str, int]
    """Of all processes by name; a vLLM's are the descendants of the one named."""


@asynccontextmanager
async def running_vllm_site(say: Callable[[str], None]) -> AsyncIterator[VllmSite]:
    """Start everything, wait until D is paired with P, and end everything."""
    model = demo_model_directory(default_cache_dir(), say)
    base = load_settings()
    plan = StackPlan(base=base, model=model, served_model_name=MODEL_NAME, threads=1)
    d_core, p_core = engine_cores(plan.pin)
    say(f"vLLMs pinned: D's on core {d_core}, P's on core {p_core}; everything else floats")
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="prfaas-bench-")))
        main = Stack.create(plan, directory)
        local_port, p_storage, d_storage, alone = free_ports(4)
        p_root, d_root = directory / "p-storage", directory / "d-storage"
        for root in (p_root, d_root):
            root.mkdir()
        link = await stack.enter_async_context(
            LinkProcess("127.0.0.1", main.ports.p_agent, LinkShape())
        )
        files = await stack.enter_async_context(shared_storage.serving(p_root))
        storage_link = await stack.enter_async_context(LinkProcess("127.0.0.1", files, LinkShape()))
        supervisor = await stack.enter_async_context(Supervisor(stop_grace_s=_STOP_GRACE_S))

        def vllm(name: str, port: int, core: int | None, more: tuple[str, ...]) -> ProcessSpec:
            return vllm_process(name, model, port, core, more, directory / f"{name}.log")

        say("starting five vLLMs, two agents and two gateways: a minute or two")
        # No bursts of the link meter: here the link is what the benchmark says it is.
        d_agent = {
            "probe_bytes": 0,
            "slower_by": 0,
            **agent_settings(main.d_engine_url, directory, "d"),
        }
        await supervisor.start(
            (
                *main.prefill_side(agent=agent_settings(main.p_engine_url, directory, "p"))[1:],
                *main.decode_side(prefill_port=link.port, agent=d_agent)[:1],
                vllm("p-engine", main.ports.p_engine, p_core, vllm_options(directory, "p")),
                vllm("d-engine", main.ports.d_engine, d_core, vllm_options(directory, "d")),
                vllm("p-storage", p_storage, p_core, _storing(p_root)),
                vllm("d-storage", d_storage, d_core, _storing(d_root)),
                vllm("d-alone", alone, d_core, ()),
            ),
            _READY_TIMEOUT_S,
        )
        always: dict[str, Any] = {"policy": {**dict(base.gateway.policy), "name": "always_remote"}}
        await supervisor.start(
            (
                main.gateway(prefill_port=link.port, settings=always),
                main.gateway(name="gateway-local", port=local_port, settings={"offload": False}),
            ),
            _READY_TIMEOUT_S,
        )

        async def client(port: int) -> OpenAIClient:
            return await stack.enter_async_context(
                OpenAIClient(f"http://127.0.0.1:{port}", timeout_s=_REQUEST_TIMEOUT_S)
            )

        remote = await client(main.ports.gateway)
        running = VllmSite(
            site=Site(
                link=link,
                p_engine=await client(main.ports.p_engine),
                d_engine=await client(main.ports.d_engine),
                remote=remote,
                local=await client(local_port),
                serial=remote,
            ),
            storage=SharedStorage(
                await client(p_storage), await client(d_storage), p_root, d_root, storage_link
            ),
            alone=await client(alone),
            model=model,
            pids={process.spec.name: process.pid for process in supervisor.processes},
        )
        await wait_cluster(remote, "P to be paired", paired, _PAIRED_TIMEOUT_S)
        async with watched(supervisor):
            yield running


def vllm_process(
    name: str, model: Path, port: int, core: int | None, more: tuple[str, ...], log: Path
) -> ProcessSpec:
    """A vLLM in fp32 on one core, as its side (`name` begins with it) is set up here."""
    batch_tokens = P_BATCH_TOKENS if name.startswith("p") else D_BATCH_TOKENS
    arguments = (
        *("-m", "prfaas.testing.vllm_server", "--port", str(port), "--core", str(core or 0)),
        *("--", str(model), "--served-model-name", MODEL_NAME, "--dtype", "float32"),
        *("--block-size", str(BLOCK_TOKENS), "--max-model-len", str(_MAX_CONTEXT)),
        *("--kv-cache-memory-bytes", str(_KV_BYTES), "--max-num-seqs", "16", "--enforce-eager"),
        *("--max-num-batched-tokens", str(batch_tokens), "--enable-prompt-tokens-details"),
        *more,
    )
    return ProcessSpec(name, arguments, log, core)


def _storing(root: Path) -> tuple[str, ...]:
    connector = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(root)},
    }
    return ("--kv-transfer-config", json.dumps(connector))
