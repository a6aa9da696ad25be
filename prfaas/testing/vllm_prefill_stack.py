"""A whole stack whose P is a real vLLM: gateway, both agents, and D embedded or a vLLM too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prfaas.settings import load_settings
from prfaas.testing.stack import RunningStack
from prfaas.testing.vllm_beside import agent_settings, vllm_options
from prfaas.testing.vllm_decode_stack import CHUNK_TOKENS, LIMITS, vllm_decode_process
from prfaas.testing.vllm_server import READY_TIMEOUT_S
from prfaas.up.process import ProcessSpec
from prfaas.up.stack import Stack, StackPlan, free_ports

# Without a prefix cache of its own, so that all of each prompt is asked of P.
D_ENGINE = {
    "chunk_tokens": CHUNK_TOKENS,
    "kv_memory_bytes": 32 << 20,
    "max_context": 4096,
    "prefix_cache": False,
}


def vllm_prefill_process(
    stack: Stack,
    *,
    block: int = 32,
    dtype: str = "float32",
    batch_tokens: int = 256,
    prefix_cache: bool = True,
    kv_bytes: int = 64 << 20,
    max_context: int = 4096,
    eager: bool = True,
    ranks: int = 1,
    core: str = "0",
    crowds: bool = False,
) -> ProcessSpec:
    """P's engine: a vLLM that exports through the agent's port.

    `crowds`: it begins prompts side by side that do not fit its pool together, and preempts.
    """
    arguments = (
        *("-m", "prfaas.testing.vllm_server", "--port", str(stack.ports.p_engine)),
        *("--core", core, "--"),
        *(str(stack.plan.model), "--served-model-name", stack.plan.served_model_name),
        *("--dtype", dtype, "--block-size", str(block), "--max-model-len", str(max_context)),
        *("--kv-cache-memory-bytes", str(kv_bytes), *(("--enforce-eager",) if eager else ())),
        *("--max-num-batched-tokens", str(batch_tokens), "--max-num-seqs", "16"),
        "--enable-prefix-caching" if prefix_cache else "--no-enable-prefix-caching",
        *("--tensor-parallel-size", str(ranks)),
        *(("--no-scheduler-reserve-full-isl",) if crowds else ()),
        *(("--long-prefill-token-threshold", str(CHUNK_TOKENS)) if crowds else ()),
        *vllm_options(stack.directory, "p", chunk_tokens=CHUNK_TOKENS),
    )
    return ProcessSpec("p-engine", arguments, stack.directory / "p-engine.log")


@contextmanager
def vllm_prefill_stack(
    directory: Path,
    model: Path,
    *,
    dtype: str = "float32",
    d_block: int = 64,
    d_vllm: Mapping[str, Any] | None = None,
    **vllm: Any,
) -> Iterator[RunningStack]:
    """Started, paired and probed; every import is read back and compared.

    `vllm`: options of P's. `d_vllm`: D is a vLLM too, with these options of `vllm_decode_process`.
    """
    directory.mkdir(mode=0o700, exist_ok=True)
    base = load_settings(overrides={"limits": LIMITS})
    plan = StackPlan(base, model, "test-model", threads=1, pin=False)
    stack = Stack.create(plan, directory)
    d_metrics, p_metrics = free_ports(2)
    d_agent = {"metrics_port": d_metrics, "verify_import": True, "slower_by": 0}
    p_agent = {"metrics_port": p_metrics, **agent_settings(stack.p_engine_url, directory, "p")}
    if d_vllm is not None:
        d_agent |= agent_settings(stack.d_engine_url, directory, "d")
    decode_agent, decode_engine = stack.decode_side(
        agent=d_agent,
        engine={**D_ENGINE, "dtype": dtype, "kv_dtype": dtype, "block_tokens": d_block},
    )
    if d_vllm is not None:
        decode_engine = vllm_decode_process(stack, model, dtype=dtype, **d_vllm)
    specs = (
        vllm_prefill_process(stack, dtype=dtype, **vllm),
        stack.prefill_side(agent=p_agent)[1],
        decode_agent,
        decode_engine,
        stack.gateway(settings={"policy": {"name": "always_remote"}, "short_body_bytes": 0}),
    )
    running = RunningStack(
        stack,
        specs,
        None,
        {"d-agent": d_metrics, "p-agent": p_metrics},
        ready_timeout_s=READY_TIMEOUT_S,
    )
    try:
        running.start()
        yield running
    finally:
        running.stop()
