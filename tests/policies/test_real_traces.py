"""On the public traces, where they are there: PRFAAS_TRACES names their folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from policies.prefix_cache import CacheSpec
from policies.registry import make_policy
from policies.scenario import Scenario, load_scenario
from policies.simulator.result import Summary
from policies.simulator.run import simulate
from policies.workload.describe import describe, read_columns
from policies.workload.generate import Generator
from policies.workload.request import Request
from policies.workload.source import open_source, traces_folder
from prfaas.settings import PolicySettings
from scripts.fetch_traces import TRACES, digest

AZURE = ("AzureLLMInferenceTrace_code.csv.gz", "AzureLLMInferenceTrace_conv.csv.gz")
CONVERSATION = "mooncake_conversation_trace.jsonl.gz"


def requests(name: str) -> list[Request]:
    path = traces_folder() / name
    if not path.is_file():
        pytest.skip(f"{path} is not there: `python -m scripts.fetch_traces`, or set PRFAAS_TRACES")
    return list(open_source(path, None, Generator()))


def paper_site() -> Scenario:
    scenario, _ = load_scenario("paper")
    local = scenario.local.model_copy(update={"prefill_instances": 3})
    return scenario.model_copy(update={"local": local})


def run(rows: list[Request], policy: str) -> Summary:
    _, profiles = load_scenario("paper")
    made = make_policy(PolicySettings(name=policy, threshold_tokens=8192))
    return simulate(paper_site(), profiles, rows, made).summary()


@pytest.mark.parametrize("trace", TRACES, ids=lambda trace: trace.file)
def test_the_files_hold_the_rows_they_should(trace: object) -> None:
    from scripts.fetch_traces import Trace

    assert isinstance(trace, Trace)
    path: Path = traces_folder() / trace.file
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    assert digest(path) == trace.sha256


def test_the_conversation_trace_is_what_its_readme_says() -> None:
    rows = requests(CONVERSATION)
    found = describe(read_columns(rows, CacheSpec(4_000_000)))
    assert found.requests == 12_031
    assert found.rate_per_s == pytest.approx(3.4, rel=0.02)
    assert found.prompt.mean == pytest.approx(12_035, rel=0.001)
    assert found.output.mean == pytest.approx(343, rel=0.01)
    assert found.reuse_share_unbounded == pytest.approx(0.37, abs=0.015)
    assert found.reuse_share == pytest.approx(0.18, abs=0.02)
    unbounded = describe(read_columns(rows, CacheSpec()))
    assert unbounded.uncached_above[8192] == pytest.approx(0.27, abs=0.01)
    assert unbounded.uncached_above[16384] == pytest.approx(0.127, abs=0.01)


def test_offloading_pays_on_conversations() -> None:
    rows = requests(CONVERSATION)[:3000]
    ours, threshold = run(rows, "least_ttft"), run(rows, "length_threshold")
    assert ours.ttft_mean_s < threshold.ttft_mean_s
    assert 0.2 < ours.offload_share < 0.8


@pytest.mark.parametrize("name", AZURE)
def test_no_long_prompts_no_loss(name: str) -> None:
    """Case 48: never worse than local only at P50, P90 and P99."""
    rows = requests(name)[:4000]
    local = run(rows, "always_local")
    for policy in ("least_ttft", "priced"):
        ours = run(rows, policy)
        for share in ("ttft_p50_s", "ttft_p90_s", "ttft_p99_s"):
            assert getattr(ours, share) <= getattr(local, share) * 1.001, (policy, share)
