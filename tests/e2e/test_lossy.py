"""A request that allows `near` gets its KV in fewer bytes, and no other request ever meets it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from prfaas.codecs.native import native
from prfaas.testing.asking import make_prompt
from prfaas.testing.link import LinkShape
from prfaas.testing.stack import Answer, RunningStack, running_stack

if native is None:
    pytest.skip("the C extension was not built", allow_module_level=True)

CHUNK, OUTPUT, TOKENS = 64, 16, 1500
ENGINE = {
    "chunk_tokens": CHUNK, "block_tokens": 64, "kv_memory_bytes": 16 << 20, "max_context": 4096,
    "kv_dtype": "bfloat16",
}  # fmt: skip
CODECS = {"codecs": ["int8", "planes-zstd", "raw"]}
NEAR = {"x-prfaas-kv-quality": "near"}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Iterator[RunningStack]:
    with running_stack(
        tmp_path_factory.mktemp("lossy") / "stack",
        tiny_model_dir,
        gateway={"policy": {"name": "always_remote"}, "short_body_bytes": 0},
        agent={"verify_import": True, **CODECS},
        prefill=CODECS,
        d_engine=ENGINE,
        p_engine=ENGINE,
        link=LinkShape(20e6, 0.005),
    ) as running:
        yield running


def local_only(stack: RunningStack, prompt: list[int]) -> Answer:
    url = stack.stack.d_engine_url
    return stack.complete(prompt, url=url, max_tokens=OUTPUT, cache_salt="local only")


def counted(stack: RunningStack) -> list[float]:
    """Transfers by class, as the agent and the gateway have counted them."""
    fetches = 'prfaas_agent_quality_fetches_total{asked="near",came="near"}'
    transfers = 'prfaas_gateway_kv_quality_transfers_total{quality="near"}'
    return [
        stack.metrics("d-agent").get(fetches, 0),
        stack.metrics("gateway").get(transfers, 0),
    ]


def test_near_brings_fewer_bytes_and_is_told(stack: RunningStack) -> None:
    same = 0
    before = counted(stack)
    for seed in range(3):
        prompt = make_prompt(TOKENS, f"near/{seed}")
        got = stack.complete(prompt, max_tokens=OUTPUT, headers=NEAR)
        assert got.status == 200, got.body
        record = stack.record(got.request_id)
        outcome = record["outcome"]
        assert (outcome["status"], outcome["reason"]) == ("staged", "")
        assert (record["kv_quality"], outcome["quality"]) == ("near", "near")
        assert outcome["codecs"]["int8"] > 0.9 * outcome["raw_bytes"]
        assert outcome["wire_bytes"] < 0.65 * outcome["raw_bytes"]
        assert got.body["usage"]["prompt_tokens_details"]["kv_quality"] == "near"
        right = local_only(stack, prompt).token_ids
        same += sum(a == b for a, b in zip(got.token_ids, right, strict=True))
    assert same > 0.75 * 3 * OUTPUT
    for name in ("d-agent", "p-agent"):
        side = "agent" if name == "d-agent" else "prefill"
        found = stack.metrics(name)
        raw = found[f'prfaas_{side}_codec_raw_bytes_total{{codec="int8"}}']
        assert raw > 1.5 * found[f'prfaas_{side}_codec_wire_bytes_total{{codec="int8"}}']
    assert [now - then for now, then in zip(counted(stack), before, strict=True)] == [3, 3]


def test_an_exact_request_never_meets_kv_that_came_with_a_loss(stack: RunningStack) -> None:
    prompt = make_prompt(TOKENS, "both")
    stack.complete(prompt, max_tokens=OUTPUT, headers=NEAR)
    got = stack.complete(prompt, max_tokens=OUTPUT)
    outcome = stack.record(got.request_id)["outcome"]
    assert (outcome["have_tokens"], outcome["quality"]) == (0, "exact")
    assert "kv_quality" not in got.body["usage"]["prompt_tokens_details"]
    assert got.token_ids == local_only(stack, prompt).token_ids
    again = stack.complete(prompt, max_tokens=OUTPUT, headers=NEAR)
    assert stack.record(again.request_id)["outcome"]["have_tokens"] > 0


def test_a_class_that_the_gateway_does_not_allow_is_a_400(stack: RunningStack) -> None:
    got = stack.complete(make_prompt(99, "no"), headers={"x-prfaas-kv-quality": "tight"})
    assert got.status == 400
    assert "'tight' is not one of exact, near, compact" in got.body["error"]["message"]
