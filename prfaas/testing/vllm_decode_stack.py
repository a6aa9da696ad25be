"""A whole stack whose D is a real vLLM: gateway, both agents, embedded P, and a link to bend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prfaas.settings import load_settings
from prfaas.testing.link import LinkShape
from prfaas.testing.link_process import LinkProcess
from prfaas.testing.stack import RunningStack
from prfaas.testing.vllm_beside import agent_settings, vllm_options
from prfaas.testing.vllm_server import READY_TIMEOUT_S
from prfaas.up.process import ProcessSpec
from prfaas.up.stack import Stack, StackPlan, free_ports

CHUNK_TOKENS = 64
LIMITS = {"connect_timeout_s": 20.0, "control_timeout_s": 20.0}
"""Several vLLMs on two cores keep an agent from running for seconds. What these tests break is
seen at once, not by a deadline.
"""


def vllm_decode_process(
    stack: Stack,
    model: Path,
    *,
    block: int = 32,
    dtype: str = "float32",
    max_context: int = 4096,
    kv_bytes: int = 64 << 20,
    core: str = "0",
    pin: int | None = None,
    eager: bool = True,
    options: Mapping[str, Any] | None = None,
    extra: Sequence[str] = (),
) -> ProcessSpec:
    """D's engine; `options` of the connector, `extra` of vLLM.

    `core` binds the threads of its workers, `pin` all its processes.
    """
    arguments = (
        *("-m", "prfaas.testing.vllm_server", "--port", str(stack.ports.d_engine)),
        *("--core", core, "--", str(model)),
        *("--served-model-name", stack.plan.served_model_name),
        *("--dtype", dtype, "--block-size", str(block), "--max-model-len", str(max_context)),
        *("--kv-cache-memory-bytes", str(kv_bytes), *(("--enforce-eager",) if eager else ())),
        *("--max-num-seqs", "16"),
        *vllm_options(stack.directory, "d", chunk_tokens=CHUNK_TOKENS, **(options or {})),
        *extra,
    )
    return ProcessSpec("d-engine", arguments, stack.directory / "d-engine.log", core=pin)


@contextmanager
def vllm_decode_stack(
    directory: Path,
    p_model: Path,
    d_model: Path,
    *,
    dtype: str = "float32",
    p_block: int = 16,
    link: LinkShape | None = None,
    limits: Mapping[str, Any] | None = None,
    gateway: Mapping[str, Any] | None = None,
    p_engine: Mapping[str, Any] | None = None,
    **vllm: Any,
) -> Iterator[RunningStack]:
    """Started, paired and probed; every import is read back and compared."""
    directory.mkdir(mode=0o700, exist_ok=True)
    base = load_settings(overrides={"limits": {**LIMITS, **(limits or {})}})
    plan = StackPlan(base, p_model, "test-model", threads=1, pin=False)
    stack = Stack.create(plan, directory)
    d_metrics, p_metrics, link_port = free_ports(3)
    relay = None
    if link is not None:
        relay = LinkProcess("127.0.0.1", stack.ports.p_agent, link, listen_port=link_port)
    prefill_port = link_port if link is not None else None
    d_agent = {
        "metrics_port": d_metrics,
        "slower_by": 0,
        "verify_import": True,
        **agent_settings(stack.d_engine_url, directory, "d"),
    }
    decode_agent, _ = stack.decode_side(agent=d_agent, prefill_port=prefill_port)
    specs = (
        *stack.prefill_side(
            agent={"metrics_port": p_metrics},
            engine={
                "chunk_tokens": CHUNK_TOKENS,
                "kv_memory_bytes": 64 << 20,
                "max_context": 4096,
                "dtype": dtype,
                "kv_dtype": dtype,
                "block_tokens": p_block,
                **(p_engine or {}),
            },
        ),
        decode_agent,
        vllm_decode_process(stack, d_model, dtype=dtype, **vllm),
        stack.gateway(
            prefill_port=prefill_port,
            settings={
                "policy": {"name": "always_remote"},
                "short_body_bytes": 0,
                "tokenizer": d_model,
                **(gateway or {}),
            },
        ),
    )
    running = RunningStack(
        stack,
        specs,
        relay,
        {"d-agent": d_metrics, "p-agent": p_metrics},
        ready_timeout_s=READY_TIMEOUT_S,
    )
    try:
        running.start()
        yield running
    finally:
        running.stop()
