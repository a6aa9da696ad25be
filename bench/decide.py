"""CPU microseconds of one decision of each policy, in a state that has learnt from requests.

The goals are 10 us with one candidate each, and 50 us with 8 peers and 16 engines: 8 peers of two
instances. A gateway picks D's engine before the policy is asked, so a snapshot has one D.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from bench.harness import Report, Samples
from policies.registry import POLICIES, make_policy
from prfaas.interfaces import LearningPolicy
from prfaas.settings import PolicySettings
from prfaas.snapshot import RequestFacts, Snapshot
from prfaas.testing.contracts import busy_snapshot

FLEETS = {"1x1": (1, 1), "8x2": (8, 2), "8x16": (8, 16)}
"""Peers, and instances of each; the last is eight times what the goal asks for."""
GOALS_US = {"1x1": 10.0, "8x2": 50.0}
NAMES = tuple(sorted(POLICIES))
CALLS = 320
"""Of one run: five times what passes between two solutions of a threshold."""


def run(quick: bool) -> None:
    """Best of several runs: other work on the machine can only make one longer."""
    report = Report("decide", quick=quick)
    for fleet, (peers, instances) in FLEETS.items():
        what = f"{peers} peers of {instances} instances" if peers > 1 else "one candidate each"
        taken = {name: _decisions(report, name, fleet, what, 3 if quick else 20) for name in NAMES}
        worst = max(taken, key=taken.__getitem__)
        goal = f"goal {GOALS_US[fleet]:g} us" if fleet in GOALS_US else "no goal"
        report.add(f"decide_us.worst.{fleet}", taken[worst], "us", f"{worst}; {what}; {goal}")
    report.finish()


def _decisions(report: Report, name: str, fleet: str, what: str, runs: int) -> float:
    """Rows of one policy: its decisions, whose microseconds are returned, and what it takes to
    count each request where it does, its solving now and then included.
    """
    policy = make_policy(PolicySettings(name=name))
    snapshot, state = snapshot_of(*FLEETS[fleet]), policy.initial_state()
    facts = [RequestFacts(f"r{at}", 600 + 977 * at % 16384) for at in range(CALLS)]
    if isinstance(policy, LearningPolicy):
        learning = policy

        def count(request: RequestFacts) -> None:
            nonlocal state
            state = learning.saw(state, request, snapshot)

        counted = _us(count, facts, runs)
        note = f"{what}; counting a decided request; CPU, best of {counted.spread} of {CALLS}"
        report.add(f"saw_us.{name}.{fleet}", min(counted.values), "us", note)
    decided = _us(lambda request: policy.decide(request, snapshot, state), facts, runs)
    note = f"{what}; CPU, best of {decided.spread} of {CALLS} decisions"
    report.add(f"decide_us.{name}.{fleet}", min(decided.values), "us", note)
    return min(decided.values)


def snapshot_of(peers: int, instances: int) -> Snapshot:
    """A busy D and idle peers, each with so many idle instances, that differ in distance."""
    one = busy_snapshot()
    remotes = tuple(
        replace(
            one.remotes[0],
            peer=f"peer-{peer}",
            instance=f"prefill-{instance}",
            link=replace(one.remotes[0].link, rtt_s=0.005 * (1 + peer)),
        )
        for peer in range(peers)
        for instance in range(instances)
    )
    return replace(one, remotes=remotes)


def _us(call: Callable[[RequestFacts], object], facts: list[RequestFacts], runs: int) -> Samples:
    found = []
    for _ in range(runs):
        started = time.process_time()
        for each in facts:
            call(each)
        found.append((time.process_time() - started) / len(facts) * 1e6)
    return Samples(tuple(found))
