"""The embedded engine as P, a real vLLM as D, over HTTP: exact by the oracle, and whole again after
every fault.
"""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from signal import SIGSTOP
from typing import Any

import pytest

from prfaas.testing import asking
from prfaas.testing.asking import make_prompt
from prfaas.testing.link import LinkShape
from prfaas.testing.stack import Answer, RunningStack, wait_until
from prfaas.testing.tinygguf import write_tiny_gguf
from prfaas.testing.tinymodel import make_tiny_model
from prfaas.testing.vllm_decode_stack import vllm_decode_stack
from prfaas.testing.vllm_server import vllm_is_here

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not vllm_is_here(), reason="no vLLM here: scripts/vllm_env.sh builds it"),
]

OUTPUT = 12
local_only = partial(asking.local_only, max_tokens=OUTPUT)
SLOW_LINK = LinkShape(16e6, 0.01)
"""A prompt of 2,000 tokens takes two seconds."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with heads of a size that vLLM's CPU attention takes."""
    directory = tmp_path_factory.mktemp("model") / "tiny"
    return make_tiny_model(directory, hidden=128, heads=4, kv_heads=2, head_dim=32)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[RunningStack]:
    """P reads the weights from GGUF, D from safetensors; slow enough to break things midway."""
    directory = tmp_path_factory.mktemp("vllm-d")
    gguf = write_tiny_gguf(model, directory / "tiny.gguf")
    with vllm_decode_stack(
        directory / "s",
        gguf,
        model,
        link=SLOW_LINK,
        options={"import_bytes_per_step": 65536},
    ) as running:
        yield running
        assert "read back other bytes" not in running.log("d-agent")


def remote(stack: RunningStack, prompt: list[int], salt: str = "remote", **more: Any) -> Answer:
    return stack.complete(prompt, max_tokens=OUTPUT, cache_salt=salt, **more)


def outcome(stack: RunningStack, answer: Answer) -> dict[str, Any]:
    """Empty for a request that was not offloaded."""
    found: dict[str, Any] | None = stack.record(answer.request_id)["outcome"]
    return found or {}


def assert_exact(stack: RunningStack, prompt: list[int], **fields: Any) -> dict[str, Any]:
    """Ask for it through the gateway; its outcome."""
    expected = local_only(stack, prompt)
    got = remote(stack, prompt, **fields)
    assert got.status == 200, got.body
    assert got.token_ids == expected.token_ids
    return outcome(stack, got)


def assert_recovers(stack: RunningStack, seed: str) -> None:
    """KV comes from P again, once everybody has heard of everybody."""
    stack.wait_link_ready()
    turns = iter(range(1000))

    def staged() -> bool:
        found = assert_exact(stack, make_prompt(150, f"{seed}/{next(turns)}"))
        return bool(found) and found["status"] == "staged"

    wait_until(staged, 20, "KV to come from P again")
    assert_nothing_left(stack)


def assert_nothing_left(stack: RunningStack) -> None:
    """vLLM runs nothing and uses no block; the agents have no session and no staging."""

    def free() -> bool:
        vllm, agent = stack.metrics("d-engine"), stack.metrics("d-agent")
        names = (
            "vllm:kv_cache_usage_perc",
            "vllm:num_requests_running",
            "vllm:num_requests_waiting",
        )
        busy = [v for k, v in vllm.items() if k.split("{")[0] in names]
        held = [v for k, v in agent.items() if k.endswith("_sessions") or "staging_used" in k]
        return len(busy) >= 3 and not any(busy) and not any(held)

    wait_until(free, 20, "D to be idle")


@pytest.mark.parametrize("length", [2, 31, 32, 33, 64, 65, 66, 129, 300, 1000])
def test_fp32_gives_the_tokens_of_a_local_run(stack: RunningStack, length: int) -> None:
    found = assert_exact(stack, make_prompt(length))
    assert (found["status"], found["reason"]) == ("staged", "")
    assert found["received_tokens"] == length - 1
    assert_nothing_left(stack)


def test_a_shared_prefix_crosses_once(stack: RunningStack) -> None:
    shared = make_prompt(320, "shared")
    first = assert_exact(stack, [*shared, *make_prompt(40, "a")], salt="shared")
    second = assert_exact(stack, [*shared, *make_prompt(50, "b")], salt="shared")
    assert (first["have_tokens"], second["have_tokens"]) == (0, 320)
    other = assert_exact(stack, [*shared, *make_prompt(50, "b")], salt="other")
    assert other["have_tokens"] == 0


def test_many_at_once_are_all_exact_and_leave_nothing(stack: RunningStack) -> None:
    prompts = [make_prompt(60 + 41 * index, "many") for index in range(8)]
    expected = [local_only(stack, prompt).token_ids for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: remote(stack, prompt), prompts))
    assert [answer.token_ids for answer in answers] == expected
    assert {outcome(stack, answer)["status"] for answer in answers} == {"staged"}
    assert_nothing_left(stack)


@pytest.mark.parametrize("stream", [False, True])
def test_usage_says_what_was_not_computed_here(stack: RunningStack, stream: bool) -> None:
    prompt = make_prompt(200, f"usage/{stream}")
    got = remote(stack, prompt)
    assert got.body["usage"]["prompt_tokens"] == 200
    metrics = stack.metrics("d-engine")
    remote_tokens = [
        value
        for name, value in metrics.items()
        if name.startswith("vllm:prompt_tokens_by_source_total") and "external_kv_transfer" in name
    ]
    assert sum(remote_tokens) > 0


def test_a_client_that_leaves_while_kv_is_on_its_way_leaves_nothing(stack: RunningStack) -> None:
    for wait_s in (0.1, 0.4, 0.8):
        with pytest.raises(TimeoutError):
            remote(stack, make_prompt(2000, f"leave/{wait_s}"), timeout_s=wait_s)
    assert_nothing_left(stack)
    assert_exact(stack, make_prompt(100, "after leaving"))


def test_a_flipped_bit_on_the_wire_is_found_and_the_answer_exact(stack: RunningStack) -> None:
    name = 'prfaas_agent_dropped_frames_total{why="corrupt"}'
    for turn in range(12):
        before = stack.metrics("d-agent").get(name, 0.0)
        prompt = make_prompt(1000, f"flip/{turn}")
        expected = local_only(stack, prompt)
        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(remote, stack, prompt)
            threading.Event().wait(0.3)
            stack.bend(lambda link: link.corrupt_down(1))
            got = asking.result()
        assert got.status == 200, got.body
        assert got.token_ids == expected.token_ids
        if stack.metrics("d-agent").get(name, 0.0) > before:
            return
    raise AssertionError("no flipped bit was found in a frame")


def test_p_killed_in_the_middle_of_a_layer_leaves_the_answer_right(stack: RunningStack) -> None:
    prompt = make_prompt(3500, "killed")
    expected = local_only(stack, prompt)
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(remote, stack, prompt)
        threading.Event().wait(0.8)
        stack.kill("p-engine")
        stack.kill("p-agent")
        got = asking.result()
    stack.restart("p-engine")
    stack.restart("p-agent")
    assert got.status == 200, got.body
    assert got.token_ids == expected.token_ids
    found = outcome(stack, got)
    assert found["status"] in ("partial", "local")
    assert_recovers(stack, "after P")


def test_d_s_agent_killed_while_kv_is_on_its_way_leaves_the_answer_right(
    stack: RunningStack,
) -> None:
    prompt = make_prompt(1500, "agent killed")
    expected = local_only(stack, prompt)
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(remote, stack, prompt)
        threading.Event().wait(0.6)
        stack.kill("d-agent")
        got = asking.result()
    assert got.status == 200, got.body
    assert got.token_ids == expected.token_ids
    stack.restart("d-agent")
    assert_recovers(stack, "after the agent")


def chat(stack: RunningStack, words: int, stream: bool) -> tuple[int, str, str | None]:
    """Status, body and Retry-After of a chat with a long prompt."""
    import json

    body = {
        "model": "test-model",
        "messages": [{"role": "user", "content": "import sys " * words}],
        "max_tokens": 4,
        "stream": stream,
    }
    request = urllib.request.Request(
        f"{stack.stack.gateway_url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, reply.read().decode(), None
    except urllib.error.HTTPError as exc:
        with exc:
            return exc.code, exc.read().decode(), exc.headers["retry-after"]


@pytest.fixture
def no_local_budget(tmp_path: Path, model: Path) -> Iterator[RunningStack]:
    """Nothing may fall back on D: what P cannot bring is refused. Two loads and a half pool."""
    with vllm_decode_stack(
        tmp_path / "s",
        model,
        model,
        link=LinkShape(16e6, 0.01),
        limits={"fallback_budget_tokens": 0},
        block=64,
        dtype="bfloat16",
        kv_bytes=int(1.5 * 1500 / 64) * 64 * 4 * 2 * 2 * 32 * 2,
        max_context=2048,
        options={"import_bytes_per_step": 16384},
        extra=("--no-enable-prefix-caching",),
    ) as running:
        yield running


def test_refusals_are_typed_and_a_small_pool_serves_one_after_the_other(
    no_local_budget: RunningStack,
) -> None:
    stack = no_local_budget
    prompts = [make_prompt(1400, f"small/{index}") for index in range(2)]
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda prompt: remote(stack, prompt), prompts))
    assert [answer.status for answer in answers] == [200, 200]
    # bf16 promises the very KV rather than the tokens: the agent compares digests.
    assert {outcome(stack, answer)["status"] for answer in answers} == {"staged"}
    assert "read back other bytes" not in stack.log("d-agent")
    assert_nothing_left(stack)

    stack.signal("p-engine", SIGSTOP)  # so that none of them is done when it dies
    with ThreadPoolExecutor(3) as pool:
        asking = pool.submit(remote, stack, make_prompt(1500, "refused"))
        chats = [pool.submit(chat, stack, 100, stream) for stream in (False, True)]
        threading.Event().wait(0.5)
        stack.kill("p-agent")
        stack.kill("p-engine")
        got = asking.result()
        results = [each.result() for each in chats]
    assert (got.status, got.body["error"]["type"]) == (503, "prefill_unavailable")
    assert got.retry_after == "1"
    for status, text, retry_after in results:
        assert (status, retry_after) == (503, "1"), text
        assert "prefill_unavailable" in text
    assert_nothing_left(stack)
