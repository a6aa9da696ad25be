"""A calibrated model's requests get their KV in the fewer bytes that their class allows, and no
other request ever meets it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from local_engine.kv_calibration import texts
from local_engine.kv_calibration.run import Sizes, calibrate
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
SIZES = Sizes((512,) * 2, (256,) * 2, (64,) * 10, 200, 1, 64, 32)
LOSSLESS = {"planes-zstd", "raw"}
CODECS = ["compact-basis", "near-basis", "int8", *sorted(LOSSLESS)]
NEAR, COMPACT = ({"x-prfaas-kv-quality": quality} for quality in ("near", "compact"))


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Path:
    """What `prfaas calibrate-kv` writes, of little text: int8 misses its class on this model."""
    folder = tmp_path_factory.mktemp("calibration")
    learn, other = folder / "learn.txt", folder / "other.txt"
    learn.write_text(texts.calibration_text()[:200_000])
    other.write_text("\n".join(texts.evaluation_texts())[:200_000])
    torch.set_num_threads(1)
    file = folder / "tiny.npz"
    calibrate(tiny_model_dir, file, print, learn_text=learn, evaluation_text=other, sizes=SIZES)
    return file


@pytest.fixture(scope="module")
def stack(
    tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path, calibration: Path
) -> Iterator[RunningStack]:
    codecs = {"codecs": CODECS, "codec_calibration": calibration}
    with running_stack(
        tmp_path_factory.mktemp("lossy") / "stack",
        tiny_model_dir,
        gateway={"policy": {"name": "always_remote"}, "short_body_bytes": 0},
        agent={"verify_import": True, **codecs},
        prefill=codecs,
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
        assert outcome["codecs"]["near-basis"] > 0.9 * outcome["raw_bytes"]
        assert "int8" not in outcome["codecs"]
        assert outcome["wire_bytes"] < 0.7 * outcome["raw_bytes"]
        assert got.body["usage"]["prompt_tokens_details"]["kv_quality"] == "near"
        right = local_only(stack, prompt).token_ids
        same += sum(a == b for a, b in zip(got.token_ids, right, strict=True))
    assert same > 0.75 * 3 * OUTPUT
    for name in ("d-agent", "p-agent"):
        side = "agent" if name == "d-agent" else "prefill"
        found = stack.metrics(name)
        raw = found[f'prfaas_{side}_codec_raw_bytes_total{{codec="near-basis"}}']
        assert raw > 1.4 * found[f'prfaas_{side}_codec_wire_bytes_total{{codec="near-basis"}}']
    assert [now - then for now, then in zip(counted(stack), before, strict=True)] == [3, 3]


def test_compact_brings_fewer_still(stack: RunningStack) -> None:
    prompt = make_prompt(TOKENS, "compact")
    outcomes = []
    for headers in (NEAR, COMPACT):
        got = stack.complete(prompt, max_tokens=OUTPUT, headers=headers)
        outcomes.append(stack.record(got.request_id)["outcome"])
        assert got.status == 200, got.body
    near, compact = outcomes
    assert (compact["status"], compact["quality"], compact["have_tokens"]) == (
        "staged",
        "compact",
        0,
    )
    assert compact["codecs"]["compact-basis"] > 0.9 * compact["raw_bytes"]
    assert compact["wire_bytes"] < 0.9 * near["wire_bytes"]
    assert got.body["usage"]["prompt_tokens_details"]["kv_quality"] == "compact"
    right = local_only(stack, prompt).token_ids
    assert sum(a == b for a, b in zip(got.token_ids, right, strict=True)) > OUTPUT / 2


def test_an_exact_request_never_meets_kv_that_came_with_a_loss(stack: RunningStack) -> None:
    prompt = make_prompt(TOKENS, "both")
    stack.complete(prompt, max_tokens=OUTPUT, headers=NEAR)
    got = stack.complete(prompt, max_tokens=OUTPUT)
    outcome = stack.record(got.request_id)["outcome"]
    assert (outcome["have_tokens"], outcome["quality"]) == (0, "exact")
    assert set(outcome["codecs"]) <= LOSSLESS
    assert "kv_quality" not in got.body["usage"]["prompt_tokens_details"]
    assert got.token_ids == local_only(stack, prompt).token_ids
    again = stack.complete(prompt, max_tokens=OUTPUT, headers=NEAR)
    assert stack.record(again.request_id)["outcome"]["have_tokens"] > 0


def test_a_class_that_the_gateway_does_not_allow_is_a_400(stack: RunningStack) -> None:
    got = stack.complete(make_prompt(99, "no"), headers={"x-prfaas-kv-quality": "tight"})
    assert got.status == 400
    assert "'tight' is not one of exact, near, compact" in got.body["error"]["message"]
