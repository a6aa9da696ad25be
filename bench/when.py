"""The figures of docs/when.md, planned and simulated: `python -m bench.when [SECTION]...`.

Sections: rates, lengths, sites, instances, traces, moves, short, harm; those with traces need the
public ones (`python -m scripts.fetch_traces`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from policies.design_questions import answers
from policies.mix import RequestMix, mix_of_lengths, mix_of_requests
from policies.plan_command import with_gbit
from policies.planner import Infeasible, Plan, Queues, best_plan, with_link
from policies.prefix_cache import CacheSpec
from policies.profiles import find_profile, shipped_names
from policies.registry import make_policy
from policies.scenario import Objectives, load_scenario
from policies.simulator.run import simulate
from policies.site_shape import with_prefill
from policies.throughput import Fleet, Split, remote_s
from policies.workload.generate import Generator, Lengths, Sessions
from policies.workload.request import Request, scaled
from policies.workload.source import open_source, traces_folder
from prfaas.errors import PrfaasError
from prfaas.settings import PolicySettings

LONGEST_TOKENS = 131_072
OUTPUT_TOKENS = 1024
LOOSE = Objectives(ttft_p90_s=1e6)
"""Holds at any rate that queues hold."""
SHORT = Lengths(mu=6.8, sigma=1.0, low_tokens=128, high_tokens=16_384)
SHORT_OUTPUT_TOKENS = 256
UNFIT_REQUESTS = 4000
TABLE6 = Split(19_400, 3, 5)
"""The paper's threshold and split of D's nodes."""
AZURE = Objectives(ttft_p90_s=2.0, ttft_p99_s=4.0)
MODELS = (
    ("the paper's 1T hybrid", "paper-h20", "paper-h200"),
    ("Qwen3.5-397B", "8xh20:qwen3.5-397b", "8xh200:qwen3.5-397b"),
    ("Kimi Linear 48B", "8xh20:kimi-linear-48b", "8xh200:kimi-linear-48b"),
    ("Qwen3-235B", "8xh20:qwen3-235b", "8xh200:qwen3-235b"),
    ("Qwen3-235B, Rubin CPX", "8xh20:qwen3-235b", "8xrubin-cpx:qwen3-235b"),
    ("Qwen3-235B, D 8 x H200 too", "8xh200:qwen3-235b", "8xh200:qwen3-235b"),
)
TRACES = (
    ("conversation", "mooncake_conversation_trace.jsonl.gz", None),
    ("Azure conversation", "AzureLLMInferenceTrace_conv.csv.gz", AZURE),
    ("Azure code", "AzureLLMInferenceTrace_code.csv.gz", AZURE),
)


def rates() -> None:
    """Gbit/s of KV that one instance of P makes while it prefills, by prompt length."""
    tokens = (1024, 8192, 32768, 131072)
    _row("tokens", tokens)
    for name in (*(n for n in shipped_names() if "h200" in n), "8xh200:qwen3-235b"):
        profile = find_profile(name)
        made = [profile.model.wire_bytes(n) * 8e-9 / profile.prefill_s(n) for n in tokens]
        _row(name, [f"{gbit:.1f}" for gbit in made])


def lengths() -> None:
    """The shortest prompt that an idle P serves faster than an idle D, over a round trip of 30 ms;
    and how long one of 32K takes.
    """
    tokens = np.unique(np.geomspace(16, LONGEST_TOKENS, 4000).astype(int)).astype(float)
    weight, none = np.full(len(tokens), 1 / len(tokens)), np.zeros(len(tokens))
    mix = RequestMix(tokens, none, none + OUTPUT_TOKENS, weight)
    at_32k = int(np.argmin(np.abs(tokens - 32768)))
    _row("tokens", (100, 10, 2.5, 1))
    for name, d, p in MODELS:
        fleet = Fleet(find_profile(d), find_profile(d), 8, find_profile(p), 4, 0.0, 0.030)
        local = mix.prefill_s(fleet.local)
        cells, seconds = [], []
        for gbit in (100, 10, 2.5, 1):
            away = remote_s(with_link(fleet, gbit), mix, 1.0)
            faster = np.flatnonzero(away < local)
            cells.append(_shown(tokens[faster[0]]) if len(faster) else "-")
            seconds.append(f"{away[at_32k]:.2f}")
        _row(name, cells)
        _row(f"  32K: {local[at_32k]:.2f} s at D, through P", seconds)


def sites() -> None:
    """What the paper's sites hold without P, over several links and round trips, with codecs."""
    fleet, mix, objectives = _paper()
    equal = replace(fleet, remote=None, remote_instances=0, local_instances=12)
    alone = replace(equal, local_instances=8)
    _row("", ("requests/s", "offloaded", "binds"))
    _row("12 nodes of H20", _held(equal, mix, objectives))
    _row("8 nodes of H20", _held(alone, mix, objectives))
    for gbit in (100, 50, 25, 10, 5, 2.5, 1):
        _row(f"with P, {gbit:g} Gbit/s", _held(with_link(fleet, gbit), mix, objectives))
    for rtt_s in (0.005, 0.080):
        rates = [
            _rate(replace(with_link(fleet, gbit), rtt_s=rtt_s), mix, objectives)
            for gbit in (100, 10, 5, 2.5)
        ]
        _row(f"RTT {rtt_s * 1e3:.0f} ms: 100, 10, 5, 2.5", [f"{rate:.3f}" for rate in rates])
    for ratio in (1.0, 1.88, 2.65):
        rates = [
            _rate(replace(with_link(fleet, gbit), wire_ratio=ratio), mix, objectives)
            for gbit in (5, 2.5)
        ]
        _row(f"ratio {ratio}: 5, 2.5", [f"{rate:.2f}" for rate in rates])
    idle = _planned(equal, mix, LOOSE).load.idle_ttft_s[0.9]
    _row("idle P90 of 12 nodes, s", [f"{idle:.2f}"])
    table6 = Queues(fleet, mix, TABLE6, fleet.decode.decode.max_batch)
    means = [f"{table6.load(rate).mean_ttft_s:.2f}" for rate in (2.5, 3.0)]
    _row("mean TTFT of Table 6's split: 2.5, 3.0/s", means)
    bounds = [_rate(with_link(fleet, gbit), mix, LOOSE) for gbit in (100, 10, 5, 2.5)]
    most = _rate(equal, mix, LOOSE)
    _row("no objective, over 12 nodes", [f"{rate / most:.2f}" for rate in bounds])


def instances() -> None:
    """The fewest instances of P that hold a rate, and what they hold."""
    fleet, mix, objectives = _paper()
    _row("requests/s", ("100", "10", "5"))
    held = {}
    for gbit in (100, 10, 5):
        for count in range(9):
            one = replace(with_link(fleet, gbit), remote_instances=count)
            held[gbit, count] = _rate(
                replace(one, remote=None) if not count else one, mix, objectives
            )
    for rate in (0.7, 1.0, 1.5, 2.0, 2.5, 3.0):
        cells = []
        for gbit in (100, 10, 5):
            fits = [n for n in range(9) if held[gbit, n] >= rate]
            most = max(held[gbit, n] for n in range(9))
            cells.append(f"{fits[0]} ({held[gbit, fits[0]]:.2f})" if fits else f"none: {most:.2f}")
        _row(f"{rate}", cells)


def traces() -> None:
    """Real traces over several links: what D holds alone, with P, and the share that leaves."""
    _row("trace", ("D alone", "100", "10", "5", "2.5", "1"))
    for name, objectives, mix in _traces():
        fleet, _, theirs = _paper()
        wanted = theirs if objectives is None else objectives
        cells = [f"{_rate(replace(fleet, remote=None, remote_instances=0), mix, wanted):.2f}"]
        for gbit in (100, 10, 5, 2.5, 1):
            load = _planned(with_link(fleet, gbit), mix, wanted).load
            cells.append(f"{load.rate:.2f}, {load.remote_share:.0%}")
        _row(name, cells)
        for gbit in (100, 10):
            load = _planned(with_link(fleet, gbit), mix, wanted).load
            away = mix.uncached > load.split.threshold_tokens
            mean = mix.mean(np.where(away, mix.uncached, 0)) / float(mix.weight[away].sum())
            _row(f"  of those that leave over {gbit}", [f"{mean:.0f} uncached tokens"])


def moves() -> None:
    """How KV should move: the planner's answers."""
    fleet, mix, objectives = _paper()
    cases = [(f"paper, {gbit:g}", mix, objectives, gbit) for gbit in (100, 10, 2.5)]
    cases += [
        (f"{name}, 10", its, objectives if own is None else own, 10) for name, own, its in _traces()
    ]
    for name, its, wanted, gbit in cases:
        linked = with_link(fleet, gbit)
        load = _planned(linked, its, wanted).load
        for answer in answers(linked, its, load.split.threshold_tokens, load.rate):
            _row(f"{name}: {answer.choice}", [f"{k} {v:.3g}" for k, v in answer.numbers.items()])


def short() -> None:
    """Short prompts, nothing cached: 12 equal nodes, the paper's sites, and over 1 Gbit/s."""
    fleet, _, _ = _paper()
    mix = mix_of_lengths(SHORT, SHORT_OUTPUT_TOKENS)
    equal = replace(fleet, remote=None, remote_instances=0, local_instances=12)
    _row("mean prompt, tokens", [f"{mix.mean(mix.uncached):.0f}"])
    _row("12 nodes of H20", _held(equal, mix, AZURE))
    _row("8 nodes of H20", _held(replace(equal, local_instances=8), mix, AZURE))
    for gbit in (100, 10, 1):
        _row(f"with P, {gbit} Gbit/s", _held(with_link(fleet, gbit), mix, AZURE))


def harm() -> None:
    """Loads that remote prefill is not for, simulated: TTFT at P50, P90 and P99 over that of
    `always_local`, at a fifth and at half of what D alone holds, with D split as it would be alone.
    """
    scenario, profiles = load_scenario("paper")
    fleet, _, _ = _paper()
    alone = replace(fleet, remote=None, remote_instances=0)
    cache = CacheSpec.of(profiles.prefill.model, scenario.local.cache_tokens)
    _row("", ("local P90, s", "least_ttft", "offloaded", "priced", "offloaded"))
    for name, requests in _unfit():
        plan = _planned(alone, mix_of_requests(requests, cache), AZURE).load
        site = with_prefill(scenario, plan.split.prefill_instances)
        own = len(requests) / (requests[-1].arrival_s - requests[0].arrival_s)
        for share, gbit in ((0.2, 10), (0.5, 10), (0.2, 1), (0.5, 1)):
            rows = list(scaled(requests, share * plan.rate / own))
            local, *others = (
                simulate(with_gbit(site, gbit), profiles, rows, make_policy(PolicySettings(name=p)))
                for p in ("always_local", "least_ttft", "priced")
            )
            cells = [f"{local.summary().ttft_p90_s:.2f}"]
            for other in (each.summary() for each in others):
                ratios = [
                    f"{getattr(other, each) / getattr(local.summary(), each):.2f}"
                    for each in ("ttft_p50_s", "ttft_p90_s", "ttft_p99_s")
                ]
                cells += [", ".join(ratios), f"{other.offload_share:.0%}"]
            _row(f"{name}, {share * plan.rate:.2f}/s, {gbit} Gbit/s", cells)


def _unfit() -> Iterable[tuple[str, list[Request]]]:
    workload = load_scenario("paper")[0].workload
    for name, file, objectives in TRACES:
        if objectives is not None:
            rows = open_source(traces_folder() / file, None, workload)
            yield name, list(islice(rows, UNFIT_REQUESTS))
    single = Generator(requests=UNFIT_REQUESTS, prompt=SHORT, output_tokens=SHORT_OUTPUT_TOKENS)
    yield "short", list(single.stream())
    added = Lengths(mu=5.5, sigma=1.0, low_tokens=16, high_tokens=4096)
    talks = Sessions(turns=8.0, turn_tokens=added, max_tokens=32_768)
    cached = Generator(
        kind="sessions", requests=UNFIT_REQUESTS, output_tokens=SHORT_OUTPUT_TOKENS, sessions=talks
    )
    yield "cached", list(cached.stream())


SECTIONS: Mapping[str, Callable[[], None]] = {
    section.__name__: section
    for section in (rates, lengths, sites, instances, traces, moves, short, harm)
}


def _paper() -> tuple[Fleet, RequestMix, Objectives]:
    scenario, profiles = load_scenario("paper")
    mix = mix_of_lengths(scenario.workload.prompt, scenario.workload.output_tokens)
    return Fleet.of(scenario, profiles), mix, scenario.objectives


def _traces() -> Iterable[tuple[str, Objectives | None, RequestMix]]:
    scenario, profiles = load_scenario("paper")
    cache = CacheSpec.of(profiles.prefill.model, scenario.local.cache_tokens)
    for name, file, objectives in TRACES:
        source = open_source(traces_folder() / file, None, scenario.workload)
        yield name, objectives, mix_of_requests(source, cache)


def _planned(fleet: Fleet, mix: RequestMix, objectives: Objectives) -> Plan:
    return best_plan(fleet, mix, objectives)


def _rate(fleet: Fleet, mix: RequestMix, objectives: Objectives) -> float:
    try:
        return _planned(fleet, mix, objectives).load.rate
    except Infeasible:
        return 0.0


def _held(fleet: Fleet, mix: RequestMix, objectives: Objectives) -> list[str]:
    plan = _planned(fleet, mix, objectives)
    load = plan.load
    return [f"{load.rate:.2f}", f"{load.remote_share:.0%}", plan.binds.value]


def _shown(tokens: float) -> str:
    """Three digits, which the lengths that are tried are good for."""
    return "any" if tokens <= 16 else f"{float(f'{tokens:.3g}'):,.0f}"


def _row(name: str, cells: Sequence[object]) -> None:
    print(f"{name:<42}" + "".join(f"{cell!s:>24}" for cell in cells))


def main() -> None:
    for name in sys.argv[1:] or SECTIONS:
        if name not in SECTIONS:
            raise SystemExit(f"no section {name!r}; there are {', '.join(SECTIONS)}")
        print(f"\n# {name}")
        try:
            SECTIONS[name]()
        except PrfaasError as exc:
            raise SystemExit(f"when: {exc.message}") from exc


if __name__ == "__main__":
    main()
