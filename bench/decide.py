"""CPU microseconds of one decision, best of several runs: `python -m bench.decide`."""

from __future__ import annotations

import time
from dataclasses import replace

from policies.registry import POLICIES, make_policy
from prfaas.settings import PolicySettings
from prfaas.snapshot import Snapshot
from prfaas.testing.contracts import busy_snapshot, long_request

CANDIDATES = (1, 4, 16)
CALLS = 2000
RUNS = 15


def snapshot_of(candidates: int) -> Snapshot:
    """A busy D and so many idle instances."""
    one = busy_snapshot()
    remotes = tuple(replace(one.remotes[0], instance=f"prefill-{i}") for i in range(candidates))
    return replace(one, remotes=remotes)


def decide_us(name: str, candidates: int) -> float:
    """Microseconds of CPU for one decision."""
    policy = make_policy(PolicySettings(name=name))
    request, snapshot, state = long_request(), snapshot_of(candidates), policy.initial_state()
    best = float("inf")
    for _ in range(RUNS):
        start = time.process_time()
        for _ in range(CALLS):
            policy.decide(request, snapshot, state)
        best = min(best, time.process_time() - start)
    return best / CALLS * 1e6


def main() -> None:
    print(f"{'policy':<18}" + "".join(f"{n:>4} candidates" for n in CANDIDATES))
    for name in sorted(POLICIES):
        row = "".join(f"{decide_us(name, n):>12.2f} us" for n in CANDIDATES)
        print(f"{name:<18}{row}")


if __name__ == "__main__":
    main()
