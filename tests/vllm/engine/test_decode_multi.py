"""The connector inside vLLM's MultiConnector, beside one that keeps KV in files."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from prfaas.testing.vllm_inprocess import InProcessVllm


def beside(directory: Path) -> dict[str, Any]:
    """The other connector."""
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"shared_storage_path": str(directory)},
    }


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length}/{seed}").choices(range(10, 600), k=length)


@pytest.mark.parametrize("length", [33, 100, 300])
def test_what_the_agent_stages_is_loaded(vllm: InProcessVllm, length: int) -> None:
    prompt = prompt_of(length)
    expected = vllm.local_run(prompt)
    one = vllm.add(prompt)
    vllm.finish(one)
    assert one.tokens == expected
    assert one.cached_tokens == length - 1
    (asked,) = vllm.agent.asked
    released = vllm.agent.wait_for(lambda _: asked.released)
    assert (released.result, bool(released.digest)) == ("imported", True)


def test_a_refusal_ends_the_request(vllm: InProcessVllm) -> None:
    vllm.agent.script.status = "refused"
    one = vllm.add(prompt_of(31, 7))
    vllm.finish(one)
    assert one.finish_reason == "error"


def test_requests_without_a_plan_are_the_other_connector_s(vllm: InProcessVllm) -> None:
    prompt = prompt_of(200, 9)
    expected = vllm.local_run(prompt)
    one = vllm.add(prompt, plan=False)
    vllm.finish(one)
    assert one.tokens == expected
    assert one.cached_tokens > 0
    assert vllm.agent.asked == []
