"""Small sites for simulator tests: one millisecond a token, 1000 B of KV a token."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from policies.registry import make_policy
from policies.scenario import Profiles, Scenario
from policies.simulator.result import Result
from policies.simulator.run import simulate
from policies.workload.request import Request
from prfaas.profile import Profile
from prfaas.settings import PolicySettings

MODEL = {"layers": 10, "kv_heads": 1, "head_dim": 25, "dtype": "bfloat16", "max_context": 10**7}


def made_profile(**changes: Any) -> Profile:
    """`prefill`, `decode` and `model` update the sections of that name."""
    data: dict[str, Any] = {
        "name": "linear",
        "source": "made up",
        "model": MODEL,
        "prefill": {"base_s": 0.0, "token_s": 1e-3, "chunk_tokens": 10**7},
        "decode": {"step_s": 0.01, "max_batch": 64},
    }
    for section, values in changes.items():
        data[section] = {**data[section], **values}
    return Profile.model_validate(data)


class Site:
    """Builds scenarios and runs them."""

    def __init__(self) -> None:
        self.profile = made_profile()
        self.local: dict[str, Any] = {"instances": 2, "prefill_instances": 1}
        self.peer: dict[str, Any] | None = {"instances": 1}
        self.link: dict[str, Any] = {"gbit_per_s": 8.0}
        self.rest: dict[str, Any] = {"telemetry": {"interval_s": 0.0}}

    def scenario(self) -> tuple[Scenario, Profiles]:
        peers = ()
        if self.peer is not None:
            peers = ({"profile": "paper-h20", "link": self.link, **self.peer},)
        scenario = Scenario.model_validate(
            {"local": {"prefill": "paper-h20", **self.local}, "peers": peers, **self.rest}
        )
        profiles = Profiles(scenario)
        profiles.prefill = profiles.decode = self.profile
        profiles.peers = dict.fromkeys(profiles.peers, self.profile)
        return scenario, profiles

    def run(self, requests: Iterable[Request], policy: str = "always_local", **made: Any) -> Result:
        settings = PolicySettings(name=policy, **made)
        return simulate(*self.scenario(), requests, make_policy(settings))


@pytest.fixture
def site() -> Site:
    return Site()


@pytest.fixture
def profile() -> Callable[..., Profile]:
    return made_profile
