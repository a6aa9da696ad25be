"""The scenarios that policies are compared in: workloads, links, two kinds of KV, two peers."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from policies.mix import mix_of_requests
from policies.planner import Plan, best_plan
from policies.prefix_cache import CacheSpec
from policies.scenario import Profiles, Scenario, load_scenario
from policies.simulator.run import with_rate
from policies.throughput import Fleet
from policies.workload.request import Request, scaled
from policies.workload.source import open_source, traces_folder
from prfaas.errors import ConfigError

DROPS = {"every_s": 150.0, "for_s": 30.0, "to_share": 0.1}
TRACES = {
    "conversation": "mooncake_conversation_trace.jsonl.gz",
    "azure_code": "AzureLLMInferenceTrace_code.csv.gz",
    "azure_conv": "AzureLLMInferenceTrace_conv.csv.gz",
}
WORKLOADS = ("paper", "conversation", "bursty", *(name for name in TRACES if "azure" in name))
HYBRID, DENSE = ("paper-h20", "paper-h200"), ("8xh20:qwen3-235b", "8xh200:qwen3-235b")
CACHE_TOKENS = 4_000_000


@dataclass(frozen=True, slots=True)
class Case:
    """One scenario."""

    workload: str
    gbit_per_s: float
    dense: bool = False
    drops: bool = False
    rtt_ms: float = 5.0
    peers: int = 1
    quality: str = "exact"

    @property
    def name(self) -> str:
        """As figures of one scenario are named."""
        parts = [self.workload, "dense" if self.dense else "hybrid", f"{self.gbit_per_s:g}G"]
        parts += ["drops"] if self.drops else []
        parts.append(f"{self.rtt_ms:g}ms")
        parts += ["two_peers"] if self.peers > 1 else []
        parts += [self.quality] if self.quality != "exact" else []
        return ".".join(parts)


def cases() -> Iterator[Case]:
    """All of them, those that say most first."""
    for dense in (False, True):
        # A link that dense KV is worth sending over.
        usual = 100.0 if dense else 10.0
        for workload in WORKLOADS:
            for gbit_per_s in (100.0, 10.0, 5.0, 2.5):
                yield Case(workload, gbit_per_s, dense)
            yield Case(workload, usual, dense, drops=True)
            yield Case(workload, usual, dense, rtt_ms=80.0)
            yield Case(workload, usual, dense, peers=2)


@dataclass(frozen=True, slots=True)
class Site:
    """A case ready to run: sites, what the planner says of them, and its requests."""

    case: Case
    scenario: Scenario
    profiles: Profiles
    start_rate_per_s: float
    """What the planner holds possible."""
    threshold_tokens: float
    """The planner's: where the paper's policy starts."""
    requests: int

    def training(self, rate_per_s: float) -> Sequence[Request]:
        """What tunes policies: the first part of a trace, or a seed that tests nothing."""
        return self._at(-1, rate_per_s)

    def testing(self, seed: int, rate_per_s: float) -> Sequence[Request]:
        """What compares them: a window of a trace's second part, or another seed."""
        return self._at(seed, rate_per_s)

    def _at(self, seed: int, rate_per_s: float) -> Sequence[Request]:
        if self.case.workload not in TRACES:
            return _generated(self.scenario, seed, rate_per_s)
        rows = _window(self.case.workload, seed, self.requests)
        usual = (len(rows) - 1) / rows[-1].arrival_s
        return list(scaled(rows, rate_per_s / usual))


def ready(case: Case, requests: int) -> Site:
    """Read profiles and trace, and let the planner split D's nodes.

    Raises ConfigError where a trace is not there, or the planner finds no split.
    """
    scenario, profiles = _scenario(case, requests)
    site = Site(case, scenario, profiles, 1.0, 0.0, requests)
    plan = _plan(site)
    local = scenario.local.model_copy(
        update={"prefill_instances": plan.load.split.prefill_instances}
    )
    return replace(
        site,
        scenario=scenario.model_copy(update={"local": local}),
        start_rate_per_s=plan.load.rate,
        threshold_tokens=plan.load.split.threshold_tokens,
    )


def _scenario(case: Case, requests: int) -> tuple[Scenario, Profiles]:
    near, far = DENSE if case.dense else HYBRID
    link: dict[str, Any] = {"gbit_per_s": case.gbit_per_s, "rtt_ms": case.rtt_ms}
    if case.drops:
        link["dips"] = DROPS
    short = case.workload.startswith("azure")
    data = {
        "name": case.name,
        "quality": case.quality,
        "local": {"prefill": near, "instances": 8, "cache_tokens": CACHE_TOKENS},
        "peers": [
            {"name": f"peer{i}", "profile": far, "instances": 4 // case.peers, "link": link,
             "cache_tokens": CACHE_TOKENS}
            for i in range(case.peers)
        ],
        "objectives": {"ttft_p90_s": 2.0 if short else 10.0, "ttft_p99_s": 4.0 if short else 20.0},
        "workload": {
            "requests": requests,
            "arrivals": {"kind": "bursty" if case.workload == "bursty" else "poisson"},
        },
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "scenario.yaml"
        path.write_text(yaml.safe_dump(data))
        return load_scenario(str(path))


def _plan(site: Site) -> Plan:
    scenario = site.scenario
    cache = CacheSpec.of(site.profiles.prefill.model, scenario.local.cache_tokens)
    mix = mix_of_requests(site.training(1.0), cache)
    return best_plan(Fleet.of(scenario, site.profiles), mix, scenario.objectives)


def _generated(scenario: Scenario, seed: int, rate_per_s: float) -> Sequence[Request]:
    workload = scenario.workload.model_copy(update={"seed": 101 + seed})
    seeded = scenario.model_copy(update={"workload": workload})
    return list(with_rate(seeded, rate_per_s).workload.stream())


def _window(workload: str, seed: int, requests: int) -> Sequence[Request]:
    rows = _rows(workload)
    half = len(rows) // 2
    room = max(0, half - requests)
    # Three windows spread over the second part; training ends where that begins.
    first = max(0, half - requests) if seed < 0 else half + room * (seed % 3) // 2
    picked = rows[first : first + requests]
    start = picked[0].arrival_s
    return [replace(row, arrival_s=row.arrival_s - start) for row in picked]


@lru_cache(maxsize=1)
def _rows(workload: str) -> Sequence[Request]:
    path = traces_folder() / TRACES[workload]
    if not path.is_file():
        raise ConfigError(f"trace {path.name} is not there")
    scenario, _ = load_scenario("paper")
    return list(open_source(path, None, scenario.workload))
