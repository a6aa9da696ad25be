"""SmolLM2-135M over HTTP: the embedded engine reads the GGUF at P, vLLM safetensors at D."""

from __future__ import annotations

import pydoc_data.topics
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from local_engine.demo_safetensors import demo_model_directory
from prfaas.testing.stack import RunningStack
from prfaas.testing.vllm_decode_stack import vllm_decode_stack
from prfaas.testing.vllm_server import vllm_is_here
from prfaas.tokens import Tokenizer
from prfaas.up.paths import default_cache_dir

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not vllm_is_here(), reason="no vLLM here: scripts/vllm_env.sh builds it"),
]

OUTPUT = 16


@pytest.fixture(scope="module")
def safetensors_dir() -> Path:
    """The demo model's weights as fp32 safetensors, made once for each cache directory."""
    return demo_model_directory(default_cache_dir(), print)


@pytest.fixture(scope="module")
def stack(
    tmp_path_factory: pytest.TempPathFactory, demo_model_path: Path, safetensors_dir: Path
) -> Iterator[RunningStack]:
    with vllm_decode_stack(
        tmp_path_factory.mktemp("smollm2") / "s",
        demo_model_path,
        safetensors_dir,
        block=32,
        kv_bytes=256 << 20,
        # The two engines and this machine's other work share its cores.
        limits={"first_frame_timeout_s": 60.0, "progress_timeout_s": 30.0},
        p_engine={"kv_memory_bytes": 256 << 20, "chunk_tokens": 128},
    ) as running:
        yield running
        assert "read back other bytes" not in running.log("d-agent")


@pytest.fixture(scope="module")
def text_tokens(demo_model_path: Path) -> list[int]:
    text = "\n".join(pydoc_data.topics.topics.values())[:60_000]
    return Tokenizer.load(demo_model_path).encode(text)


@pytest.mark.parametrize("length", [2, 33, 129, 487, 1000])
def test_natural_text_gives_the_tokens_of_a_local_run(
    stack: RunningStack, text_tokens: list[int], length: int
) -> None:
    start = random.Random(length).randrange(len(text_tokens) - length)
    prompt = text_tokens[start : start + length]
    local = stack.complete(
        prompt,
        url=stack.stack.d_engine_url,
        max_tokens=OUTPUT,
        timeout_s=110,
        cache_salt=f"oracle-{length}",
    )
    got = stack.complete(prompt, max_tokens=OUTPUT, timeout_s=110, cache_salt="remote")
    assert (local.status, got.status) == (200, 200), (local.body, got.body)
    assert got.token_ids == local.token_ids
    found = stack.record(got.request_id)["outcome"]
    assert (found["status"], found["received_tokens"]) == ("staged", length - 1)


def test_a_chat_knows_the_capital_of_france(stack: RunningStack) -> None:
    body = {
        "model": "test-model",
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 12,
        "temperature": 0,
    }
    got = stack.post(f"{stack.stack.gateway_url}/v1/chat/completions", body)
    assert got.status == 200, got.body
    assert "Paris" in got.body["choices"][0]["message"]["content"]
    assert stack.record(got.request_id)["outcome"]["status"] == "staged"
