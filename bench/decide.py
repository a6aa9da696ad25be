"""CPU microseconds of one decision, best of several runs: `python -m bench.decide`."""

from __future__ import annotations

import time
from dataclasses import replace

from policies.registry import POLICIES, make_policy
from prfaas.settings import PolicySettings
from prfaas.snapshot import Snapshot
from prfaas.testing.contracts import busy_snapshot, long_request

FLEETS = ((1, 1), (4, 1), (8, 2), (8, 16))
"""Peers, and instances of each: the goals are 10 us with one of one, and 50 us with 16 of 8."""
CALLS = 2000
RUNS = 15


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


def decide_us(name: str, peers: int, instances: int) -> float:
    """Microseconds of CPU for one decision."""
    policy = make_policy(PolicySettings(name=name))
    request, snapshot = long_request(), snapshot_of(peers, instances)
    state = policy.initial_state()
    best = float("inf")
    for _ in range(RUNS):
        start = time.process_time()
        for _ in range(CALLS):
            policy.decide(request, snapshot, state)
        best = min(best, time.process_time() - start)
    return best / CALLS * 1e6


def main() -> None:
    print(f"{'policy':<18}" + "".join(f"{f'{p} x {i}':>12}   " for p, i in FLEETS))
    for name in sorted(POLICIES):
        print(f"{name:<18}" + "".join(f"{decide_us(name, p, i):>12.2f} us" for p, i in FLEETS))


if __name__ == "__main__":
    main()
