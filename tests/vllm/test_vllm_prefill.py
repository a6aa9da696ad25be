"""A real vLLM as P, the embedded engine as D: exact by the oracle, with nothing left behind."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from signal import SIGSTOP

import psutil
import pytest
import torch

from local_engine.testing_gap import top_two_gap
from prfaas.testing import asking
from prfaas.testing.asking import make_prompt
from prfaas.testing.stack import Answer, RunningStack, wait_until
from prfaas.testing.tinygguf import write_tiny_gguf
from prfaas.testing.tinymodel import make_tiny_model
from prfaas.testing.vllm_prefill_stack import D_ENGINE, vllm_prefill_stack
from prfaas.testing.vllm_server import vllm_is_here
from prfaas.up.stack import free_ports

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not vllm_is_here(), reason="no vLLM here: scripts/vllm_env.sh builds it"),
]

OUTPUT = 12
local_only = partial(asking.local_only, max_tokens=OUTPUT)
BF16_TIE = 1.0
"""Gap of the two best logits in bf16, whose steps are 0.125 to 0.25 in this model."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with heads of a size that vLLM's CPU attention takes."""
    directory = tmp_path_factory.mktemp("model") / "tiny"
    return make_tiny_model(directory, hidden=128, heads=4, kv_heads=2, head_dim=32)


@pytest.fixture(scope="module")
def fp32(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[RunningStack]:
    """Small blocks, prompts of several steps, prefix caching."""
    with vllm_prefill_stack(tmp_path_factory.mktemp("fp32") / "s", model, block=32) as stack:
        yield stack


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


def test_after_p_s_vllm_is_killed_answers_are_right_and_it_is_paired_anew(
    fp32: RunningStack,
) -> None:
    prompts = [make_prompt(2000 + index, seed=40) for index in range(3)]
    expected = [local_only(fp32, prompt).token_ids for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = [pool.submit(remote, fp32, prompt, "killed") for prompt in prompts]
        fp32.kill("p-engine")
        assert [answer.result().token_ids for answer in answers] == expected
    fp32.restart("p-engine")
    fp32.wait_link_ready()
    prompt = make_prompt(500, seed=41)
    got = remote(fp32, prompt)
    assert got.token_ids == local_only(fp32, prompt).token_ids
    assert outcome(fp32, got)["status"] == "staged"
    assert_nothing_left(fp32)


def test_large_blocks_no_prefix_cache_and_preemption(tmp_path: Path, model: Path) -> None:
    """A pool for one and a half of three prompts: vLLM preempts, and what leaves is right."""
    with vllm_prefill_stack(
        tmp_path / "s",
        model,
        block=128,
        prefix_cache=False,
        kv_bytes=6 << 20,
        max_context=2048,
        crowds=True,
    ) as stack:
        prompts = [make_prompt(1700 + 32 * index, seed=51) for index in range(3)]
        expected = [local_only(stack, prompt).token_ids for prompt in prompts]
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = list(pool.map(lambda prompt: remote(stack, prompt), prompts))
        assert [answer.token_ids for answer in answers] == expected
        assert {outcome(stack, answer)["status"] for answer in answers} == {"staged"}
        preempted = [
            value
            for name, value in stack.metrics("p-engine").items()
            if name.startswith("vllm:num_preemptions_total")
        ]
        assert sum(preempted) > 0
        assert_nothing_left(stack)


def test_bf16_carries_the_very_bytes_and_agrees_as_far_as_two_kernels_can(
    tmp_path: Path, model: Path
) -> None:
    """The agent compares digests. Tokens part where the two best logits are some steps of bf16
    apart, as those of two engines do without any transfer: their kernels round otherwise.
    """
    gap = top_two_gap(model, torch.bfloat16)
    with vllm_prefill_stack(tmp_path / "s", model, dtype="bfloat16") as stack:
        for length in (33, 65, 129, 500, 900):
            prompt = make_prompt(length, seed=50)
            expected = local_only(stack, prompt).token_ids
            got = remote(stack, prompt)
            assert outcome(stack, got)["status"] == "staged"
            for at, (want, have) in enumerate(zip(expected, got.token_ids, strict=True)):
                if want != have:
                    assert gap([*prompt, *expected[:at]]) < BF16_TIE
                    break
        assert "read back other bytes" not in stack.log("d-agent")
        assert_nothing_left(stack)


def test_two_ranks_are_exact_and_an_engine_left_behind_leaves_its_agent(
    tmp_path: Path, model: Path
) -> None:
    with vllm_prefill_stack(tmp_path / "s", model, block=64, core="0|1", ranks=2) as stack:
        for length in (2, 65, 130, 777):
            prompt = make_prompt(length, seed=60)
            got = remote(stack, prompt)
            assert got.token_ids == local_only(stack, prompt).token_ids
            assert outcome(stack, got)["status"] == "staged"
        assert_nothing_left(stack)

        engine = kill_server_only(stack, "p-engine")
        wait_until(lambda: "is gone and has left" in stack.log("p-engine"), 10, "vLLM to notice")
        assert engine.is_running()
        cluster = f"{stack.stack.gateway_url}/prfaas/cluster"
        gone = lambda: not any(each["ready"] for each in stack.get(cluster)["remotes"])  # noqa: E731
        wait_until(gone, 10, "the gateway to hear of it")
        stack.kill("p-engine")
        wait_until(lambda: not engine.is_running(), 10, "the test site to end what is left")


def test_a_compiled_vllm_is_exact_too(tmp_path: Path, model: Path) -> None:
    with vllm_prefill_stack(tmp_path / "s", model, block=64, eager=False) as stack:
        for length in (2, 65, 130, 777):
            prompt = make_prompt(length, seed=60)
            got = remote(stack, prompt)
            assert got.token_ids == local_only(stack, prompt).token_ids
            assert outcome(stack, got)["status"] == "staged"
        assert_nothing_left(stack)


def kill_server_only(stack: RunningStack, name: str) -> psutil.Process:
    """SIGKILL vLLM's server; its engine, which nobody else ends as long as ours sleeps."""
    stack.signal(name, SIGSTOP)
    below = psutil.Process(stack.pids[name]).children()
    (server,) = (each for each in below if each.name() != "sh")
    (engine,) = (each for each in server.children() if "EngineCor" in each.name())
    server.kill()
    return engine
