"""A real vLLM as P, the embedded engine as D: exact by the oracle, with nothing left behind."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch

from local_engine.testing_gap import top_two_gap
from prfaas.settings import load_settings
from prfaas.testing.oracle import Comparison
from prfaas.testing.stack import Answer, RunningStack, wait_until
from prfaas.testing.tinygguf import write_tiny_gguf
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
# Without a prefix cache of its own, so that all of each prompt is asked of P.
D_ENGINE = {
    "chunk_tokens": 64,
    "kv_memory_bytes": 32 << 20,
    "max_context": 4096,
    "prefix_cache": False,
}


def vllm_process(
    stack: Stack,
    *,
    block: int,
    dtype: str,
    batch_tokens: int,
    prefix_cache: bool,
    kv_bytes: int = 64 << 20,
    eager: bool = True,
    core: str = "0",
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
        *("-m", "prfaas.testing.vllm_server", "--port", str(stack.ports.p_engine)),
        *("--core", core, "--"),
        *(str(stack.plan.model), "--served-model-name", stack.plan.served_model_name),
        *("--dtype", dtype, "--block-size", str(block), "--max-model-len", "4096"),
        *("--kv-cache-memory-bytes", str(kv_bytes), *(("--enforce-eager",) if eager else ())),
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


def remote_cached(found: dict[str, object]) -> int:
    return int(str(found["remote_cached_tokens"]))


LENGTHS = [2, 31, 32, 33, 64, 65, 66, 129, 300, 1000, 2050]


@pytest.mark.parametrize("length", LENGTHS)
def test_fp32_gives_the_tokens_of_a_local_run(fp32: RunningStack, length: int) -> None:
    prompt = make_prompt(length)
    expected = local_only(fp32, prompt)
    got = remote(fp32, prompt)
    assert got.token_ids == expected.token_ids
    found = outcome(fp32, got)
    assert (found["status"], found["reason"]) == ("staged", "")


def test_prefix_cached_blocks_are_read_from_vllm_s_pool(fp32: RunningStack) -> None:
    shared = make_prompt(700, seed=2)
    first = [*shared, *make_prompt(50, seed=3)]
    assert remote(fp32, first, salt="one").token_ids == local_only(fp32, first).token_ids
    second = [*shared, *make_prompt(90, seed=4)]
    got = remote(fp32, second, salt="one")
    assert got.token_ids == local_only(fp32, second).token_ids
    assert remote_cached(outcome(fp32, got)) >= 640
    other = remote(fp32, second, salt="two")
    assert remote_cached(outcome(fp32, other)) == 0


def test_the_gateway_sees_load_and_index_of_vllm(fp32: RunningStack) -> None:
    prompt = make_prompt(640, seed=6)
    remote(fp32, prompt, salt="index")

    def indexed() -> bool:
        got = remote(fp32, [*prompt, *make_prompt(9, seed=7)], salt="index")
        snapshot = fp32.record(got.request_id)["snapshot"]["remotes"][0]
        return int(snapshot["matched_tokens"]) >= 608

    wait_until(indexed, 10, "the gateway's index to show what vLLM has cached")
    cluster = fp32.get(f"{fp32.stack.gateway_url}/prfaas/cluster")["remotes"][0]
    assert cluster["load"]["total_blocks"] > 0
    assert cluster["curve"]["token_s"] > 0


def test_many_at_once_are_all_exact_and_leave_nothing(fp32: RunningStack) -> None:
    prompts = [make_prompt(100 + 137 * index, seed=8) for index in range(10)]
    expected = [local_only(fp32, prompt).token_ids for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        got = list(pool.map(lambda prompt: remote(fp32, prompt, salt="many"), prompts))
    assert [answer.token_ids for answer in got] == expected
    assert {outcome(fp32, answer)["status"] for answer in got} == {"staged"}
    assert_nothing_left(fp32)


def test_clients_that_leave_stop_vllm_and_leave_nothing(fp32: RunningStack) -> None:
    for seed in range(6):
        with pytest.raises(TimeoutError):
            fp32.complete(
                make_prompt(3000, seed=20 + seed), max_tokens=4, timeout_s=0.02 + 0.02 * seed
            )
    assert_nothing_left(fp32)
    prompt = make_prompt(333, seed=30)
    assert remote(fp32, prompt).token_ids == local_only(fp32, prompt).token_ids


def second_decode_side(stack: RunningStack, name: str, model: Path) -> None:
    """One more D beside the stack's, pairing with the same P."""
    watch, port = free_ports(2)
    socket = stack.stack.directory / f"{name}.sock"
    for spec in stack.stack.decode_side(
        agent={"port": watch, "socket": socket, "name": f"{name}-agent"},
        engine={
            **D_ENGINE, "model": model, "port": port, "port_socket": socket,
            "dtype": "float32", "kv_dtype": "float32",
        },
        suffix=f"-{name}",
    ):  # fmt: skip
        stack.add(spec)


def test_the_same_weights_as_gguf_at_d_pass_the_probe(
    fp32: RunningStack, model: Path, tmp_path: Path
) -> None:
    second_decode_side(fp32, "gguf", write_tiny_gguf(model, tmp_path / "tiny.gguf"))
    log = lambda: fp32.log("d-agent-gguf")  # noqa: E731
    wait_until(lambda: "paired <Peer" in log(), 30, "the pair to be probed")
    for name in ("d-engine-gguf", "d-agent-gguf"):
        fp32.terminate(name)


def test_other_weights_at_d_fail_the_probe_by_layer(fp32: RunningStack, tmp_path: Path) -> None:
    other = make_tiny_model(
        tmp_path / "other", seed=9, hidden=128, heads=4, kv_heads=2, head_dim=32
    )
    second_decode_side(fp32, "other", other)
    log = lambda: fp32.log("d-agent-other")  # noqa: E731
    wait_until(lambda: "numeric probe failed: layers[" in log(), 30, "the probe to fail")
    assert "paired <Peer" not in log()
    for name in ("d-engine-other", "d-agent-other"):
        fp32.terminate(name)


def kill_all_of(stack: RunningStack, name: str) -> None:
    """SIGKILL a process and all below it, as when its machine dies."""
    below = psutil.Process(stack.pids[name]).children(recursive=True)
    stack.kill(name)
    for process in below:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def test_after_p_s_vllm_is_killed_answers_are_right_and_it_is_paired_anew(
    fp32: RunningStack,
) -> None:
    prompts = [make_prompt(2000 + index, seed=40) for index in range(3)]
    expected = [local_only(fp32, prompt).token_ids for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = [pool.submit(remote, fp32, prompt, "killed") for prompt in prompts]
        kill_all_of(fp32, "p-engine")
        assert [answer.result().token_ids for answer in answers] == expected
    fp32.restart("p-engine")
    fp32.wait_link_ready()
    prompt = make_prompt(500, seed=41)
    got = remote(fp32, prompt)
    assert got.token_ids == local_only(fp32, prompt).token_ids
    assert outcome(fp32, got)["status"] == "staged"
    assert_nothing_left(fp32)


def test_bf16_large_blocks_no_prefix_cache_and_preemption(tmp_path: Path, model: Path) -> None:
    """A pool for one and a half of three prompts: vLLM preempts, and what leaves is right."""
    with vllm_stack(
        tmp_path / "s", model, block=128, dtype="bfloat16", batch_tokens=CHUNK,
        prefix_cache=False, kv_bytes=3 << 20, extra=("--max-model-len", "2048"),
    ) as stack:  # fmt: skip
        # Other kernels and another grid in bf16: near ties may fall the other way.
        compared = Comparison(top_two_gap(model, torch.bfloat16))
        for length in (65, 129, 500):
            prompt = make_prompt(length, seed=50)
            got = remote(stack, prompt)
            compared.add(
                f"{length} tokens", prompt, local_only(stack, prompt).token_ids, got.token_ids
            )
            assert outcome(stack, got)["status"] == "staged"
        prompts = [make_prompt(1700 + 32 * index, seed=51) for index in range(3)]
        expected = [local_only(stack, prompt).token_ids for prompt in prompts]
        with ThreadPoolExecutor(len(prompts)) as pool:
            got_all = list(pool.map(lambda prompt: remote(stack, prompt), prompts))
        for prompt, want, answer in zip(prompts, expected, got_all, strict=True):
            compared.add(f"{len(prompt)} tokens at once", prompt, want, answer.token_ids)
        assert {outcome(stack, answer)["status"] for answer in got_all} == {"staged"}
        preempted = [
            value for name, value in stack.metrics("p-engine").items()
            if name.startswith("vllm:num_preemptions_total")
        ]  # fmt: skip
        assert sum(preempted) > 0
        assert_nothing_left(stack)


@pytest.mark.parametrize("how", ["tensor parallel", "compiled"])
def test_other_ways_to_run_vllm_are_exact_too(tmp_path: Path, model: Path, how: str) -> None:
    parallel = how == "tensor parallel"
    with vllm_stack(
        tmp_path / "s",
        model,
        block=64,
        eager=parallel,
        core="0|1" if parallel else "0",
        extra=("--tensor-parallel-size", "2") if parallel else (),
    ) as stack:
        for length in (2, 65, 130, 777):
            prompt = make_prompt(length, seed=60)
            got = remote(stack, prompt)
            assert got.token_ids == local_only(stack, prompt).token_ids
            assert outcome(stack, got)["status"] == "staged"
        assert_nothing_left(stack)
