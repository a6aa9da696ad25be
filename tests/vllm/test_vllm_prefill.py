"""A real vLLM as P, the embedded engine as D: exact by the oracle, with nothing left behind."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from prfaas.settings import load_settings
from prfaas.testing.stack import Answer, RunningStack, wait_until
from prfaas.testing.tinymodel import make_tiny_model
from prfaas.testing.vllm_server import vllm_is_here
from prfaas.up.process import ProcessSpec
from prfaas.up.stack import Stack, StackPlan, free_ports

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not vllm_is_here(), reason="no vLLM here: scripts/vllm_env.sh builds it"),
]

CHUNK, OUTPUT = 64, 12
D_ENGINE = {"chunk_tokens": 64, "kv_memory_bytes": 32 << 20, "max_context": 4096}


def vllm_process(
    stack: Stack,
    *,
    block: int,
    dtype: str,
    batch_tokens: int,
    prefix_cache: bool,
    kv_bytes: int = 64 << 20,
    extra: tuple[str, ...] = (),
) -> ProcessSpec:
    """P's engine: a vLLM that exports through the agent's port."""
    connector = {
        "kv_connector": "PrfaasConnector",
        "kv_connector_module_path": "prfaas_connect.vllm.connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {
            "socket": str(stack.directory / "p.sock"),
            "chunk_tokens": CHUNK,
        },
    }
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"ipc://{stack.directory}/events",
        "replay_endpoint": f"ipc://{stack.directory}/replay",
    }
    arguments = (
        *("-m", "prfaas.testing.vllm_server", "--port", str(stack.ports.p_engine), "--"),
        *(str(stack.plan.model), "--served-model-name", stack.plan.served_model_name),
        *("--dtype", dtype, "--block-size", str(block), "--max-model-len", "4096"),
        *("--kv-cache-memory-bytes", str(kv_bytes), "--enforce-eager"),
        *("--max-num-batched-tokens", str(batch_tokens), "--max-num-seqs", "16"),
        "--enable-prefix-caching" if prefix_cache else "--no-enable-prefix-caching",
        *("--kv-transfer-config", json.dumps(connector)),
        *("--kv-events-config", json.dumps(events)),
        *extra,
    )
    return ProcessSpec("p-engine", arguments, stack.directory / "p-engine.log")


@contextmanager
def vllm_stack(
    directory: Path,
    model: Path,
    *,
    block: int = 32,
    dtype: str = "float32",
    batch_tokens: int = 256,
    prefix_cache: bool = True,
    d_block: int = 64,
    **options: object,
) -> Iterator[RunningStack]:
    """Gateway, embedded D, both agents, vLLM P; every import read back and compared."""
    directory.mkdir(mode=0o700, exist_ok=True)
    plan = StackPlan(load_settings(), model, "test-model", threads=1, pin=False)
    stack = Stack.create(plan, directory)
    d_metrics, p_metrics = free_ports(2)
    p_agent = {
        "metrics_port": p_metrics,
        "engine": "vllm",
        "vllm": {
            "url": stack.p_engine_url,
            "kv_events": f"ipc://{directory}/events",
            "kv_events_replay": f"ipc://{directory}/replay",
        },
    }
    specs = (
        vllm_process(
            stack, block=block, dtype=dtype, batch_tokens=batch_tokens,
            prefix_cache=prefix_cache, **options,  # type: ignore[arg-type]
        ),
        stack.prefill_side(agent=p_agent)[1],
        *stack.decode_side(
            agent={"metrics_port": d_metrics, "verify_import": True},
            engine={**D_ENGINE, "dtype": dtype, "kv_dtype": dtype, "block_tokens": d_block},
        ),
        stack.gateway(settings={"policy": {"name": "always_remote"}, "short_body_bytes": 0}),
    )  # fmt: skip
    running = RunningStack(stack, specs, None, {"d-agent": d_metrics, "p-agent": p_metrics})
    try:
        running.start()
        yield running
    finally:
        running.stop()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with heads of a size that vLLM's CPU attention takes."""
    directory = tmp_path_factory.mktemp("model") / "tiny"
    return make_tiny_model(directory, hidden=128, heads=4, kv_heads=2, head_dim=32)


@pytest.fixture(scope="module")
def fp32(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[RunningStack]:
    """Small blocks, prompts of several steps, prefix caching."""
    with vllm_stack(tmp_path_factory.mktemp("fp32") / "s", model, block=32) as stack:
        yield stack


def make_prompt(length: int, seed: int = 1) -> list[int]:
    return random.Random(f"{length}/{seed}").choices(range(10, 600), k=length)


def local_only(stack: RunningStack, prompt: list[int]) -> Answer:
    salt = f"oracle-{len(prompt)}-{hash(tuple(prompt))}"
    answer = stack.complete(
        prompt, url=stack.stack.d_engine_url, max_tokens=OUTPUT, cache_salt=salt
    )
    assert answer.status == 200, answer.body
    return answer


def remote(stack: RunningStack, prompt: list[int], salt: str = "remote") -> Answer:
    answer = stack.complete(prompt, max_tokens=OUTPUT, cache_salt=salt)
    assert answer.status == 200, answer.body
    return answer


def outcome(stack: RunningStack, answer: Answer) -> dict[str, object]:
    found: dict[str, object] = stack.record(answer.request_id)["outcome"]
    return found


def assert_nothing_left(stack: RunningStack) -> None:
    """vLLM's blocks are free, P's agent has no session and its ring no record."""

    def free() -> bool:
        vllm, agent = stack.metrics("p-engine"), stack.metrics("p-agent")
        usage = [v for k, v in vllm.items() if k.startswith("vllm:kv_cache_usage_perc")]
        ours = [v for k, v in agent.items() if "ring_records" in k or k.endswith("_sessions")]
        return usage == [0.0] and not any(ours)

    wait_until(free, 15, "P to be idle")


@pytest.mark.parametrize("length", [2, 15, 16, 17, 64, 65, 66, 129, 300, 1000, 2050])
def test_fp32_gives_the_tokens_of_a_local_run(fp32: RunningStack, length: int) -> None:
    prompt = make_prompt(length)
    expected = local_only(fp32, prompt)
    got = remote(fp32, prompt)
    assert got.token_ids == expected.token_ids
    found = outcome(fp32, got)
    assert (found["status"], found["reason"]) == ("staged", "")
