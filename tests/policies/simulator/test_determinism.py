"""Another process, with other hashes of strings, simulates the same to the byte."""

from __future__ import annotations

import os
import subprocess
import sys

_RUN = """
from policies.registry import make_policy
from policies.scenario import Scenario, load_scenario
from policies.simulator.run import simulate
from prfaas.settings import PolicySettings

scenario, profiles = load_scenario("paper")
data = scenario.model_dump()
data["local"]["prefill_instances"] = 3
data["workload"].update(requests=300, kind="sessions")
data["queue_order"]["name"] = "srpt"
data["peers"][0]["central_queue"] = False
data["faults"] = [{"kind": "peer_down", "at_s": 40.0, "for_s": 20.0}]
scenario = Scenario.model_validate(data)
for name in ("paper", "balanced_random", "least_ttft"):
    policy = make_policy(PolicySettings(name=name))
    print(simulate(scenario, profiles, scenario.workload.stream(), policy).digest())
"""


def test_other_hash_seeds_change_nothing() -> None:
    found = []
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", _RUN],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        found.append(done.stdout.split())
    assert found[0] == found[1]
    assert len(set(found[0])) == 3
