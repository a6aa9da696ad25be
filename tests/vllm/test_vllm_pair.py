"""A real vLLM on both sides, over HTTP: exact, with other block sizes, dtypes and ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from prfaas.testing import asking
from prfaas.testing.asking import make_prompt
from prfaas.testing.oracle import Comparison
from prfaas.testing.stack import Answer, RunningStack
from prfaas.testing.tinymodel import make_tiny_model
from prfaas.testing.vllm_prefill_stack import vllm_prefill_stack
from prfaas.testing.vllm_server import vllm_is_here

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not vllm_is_here(), reason="no vLLM here: scripts/vllm_env.sh builds it"),
]

OUTPUT = 12
local_only = partial(asking.local_only, max_tokens=OUTPUT)
TWO_RANKS_ON_ONE_CORE = {"core": "1|1", "pin": 1, "ranks": 2}
"""Workers wait for each other by spinning: one on each of two cores leaves none to P's agent."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with heads of a size that vLLM's CPU attention takes."""
    directory = tmp_path_factory.mktemp("model") / "tiny"
    return make_tiny_model(directory, hidden=128, heads=4, kv_heads=2, head_dim=32)


def remote(stack: RunningStack, prompt: list[int]) -> Answer:
    answer = stack.complete(prompt, max_tokens=OUTPUT, cache_salt="remote")
    assert answer.status == 200, answer.body
    return answer


@pytest.mark.parametrize(
    ("p", "d"),
    [
        ({"block": 128, "core": "0"}, {"block": 32, "core": "1", "eager": False}),
        ({"block": 32, "core": "0"}, {"block": 64, **TWO_RANKS_ON_ONE_CORE}),
    ],
    ids=["other blocks, compiled at D", "one rank to two"],
)
def test_a_pair_of_vllms_is_exact(
    tmp_path: Path, model: Path, p: Mapping[str, Any], d: Mapping[str, Any]
) -> None:
    d_vllm = dict(d)
    ranks = d_vllm.pop("ranks", 1)
    d_vllm["extra"] = ("--tensor-parallel-size", str(ranks))
    with vllm_prefill_stack(tmp_path / "s", model, d_vllm=d_vllm, **p) as stack:
        for length in (2, 33, 64, 65, 129, 500, 1000):
            prompt = make_prompt(length)
            expected = local_only(stack, prompt).token_ids
            # Three servers on two cores: telemetry may be late for a moment.
            stack.wait_link_ready()
            got = remote(stack, prompt)
            assert got.token_ids == expected
            record = stack.record(got.request_id)
            assert record["outcome"], record
            assert (record["outcome"]["status"], record["outcome"]["reason"]) == ("staged", "")
        prompts = [make_prompt(200 + 97 * index, seed=2) for index in range(6)]
        wanted = [local_only(stack, prompt).token_ids for prompt in prompts]
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = list(pool.map(lambda prompt: remote(stack, prompt), prompts))
        assert [answer.token_ids for answer in answers] == wanted
        assert "read back other bytes" not in stack.log("d-agent")


def test_a_pair_in_bf16_agrees_up_to_near_ties(tmp_path: Path, model: Path) -> None:
    """The very KV arrives; tokens agree as the oracle wants it of two runs on one chunk grid.

    D without prefix caching, in other blocks; both compute prompts by 256 tokens.
    """
    d_vllm = {
        "block": 64,
        "core": "1",
        "extra": ("--max-num-batched-tokens", "256", "--no-enable-prefix-caching"),
    }
    with vllm_prefill_stack(
        tmp_path / "s", model, dtype="bfloat16", block=32, core="0", d_vllm=d_vllm
    ) as stack:
        compared = Comparison(top_two_gap_of(stack))
        for seed in range(3):
            for length in (2, 33, 65, 129, 257, 500, 900):
                prompt = make_prompt(length, seed=70 + seed)
                expected = local_only(stack, prompt).token_ids
                stack.wait_link_ready()
                got = remote(stack, prompt)
                record = stack.record(got.request_id)
                assert record["outcome"], record
                assert record["outcome"]["status"] == "staged"
                compared.add(f"{length}/{seed}", prompt, expected, got.token_ids)
        print(f"{len(compared.near_ties)} near ties in {compared.positions}: {compared.near_ties}")
        compared.verdict()
        assert "read back other bytes" not in stack.log("d-agent")


def top_two_gap_of(stack: RunningStack) -> Callable[[Sequence[int]], float]:
    """As D's vLLM says it, of log probabilities, whose differences are those of the logits."""

    def gap(tokens: Sequence[int]) -> float:
        answer = stack.complete(
            list(tokens),
            url=stack.stack.d_engine_url,
            max_tokens=1,
            logprobs=2,
            return_tokens_as_token_ids=True,
            cache_salt="gap",
        )
        assert answer.status == 200, answer.body
        (found,) = answer.body["choices"][0]["logprobs"]["top_logprobs"]
        first, second = sorted(found.values(), reverse=True)[:2]
        return float(first - second)

    return gap
