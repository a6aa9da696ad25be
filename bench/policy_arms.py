"""One policy in one scenario: tuned on the training part, measured on the others."""

from __future__ import annotations

import hashlib
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench.policy_cases import Site
from policies.parameters import SPANS, parameters_of
from policies.registry import make_policy
from policies.scenario import Objectives
from policies.simulator.capacity import capacity
from policies.simulator.result import Summary
from policies.simulator.run import simulate
from policies.study import Part, Problem, StudySpec, open_study, run_trials
from prfaas.errors import ConfigError
from prfaas.settings import PolicySettings

SLOWDOWN = Objectives(slowdown_p90=8.0, slowdown_p99=16.0)
LOADS = (0.80, 0.95)
TRAINING = 600
"""Requests that tune; more trials are worth more than more requests."""
NEAR = 1.15
"""First step from a rate that another policy held."""
WARM_UP_SHARE = 0.1
"""Of each run: queues fill, caches fill, policies learn."""
FOUND = Path(__file__).parents[1] / "build" / "bench-policies"
"""What a run that was stopped had found: the next one goes on there."""


@dataclass(frozen=True, slots=True)
class Arm:
    """A policy with its parameters and queue order."""

    policy: str
    order: str = "fcfs"
    parameters: tuple[tuple[str, float], ...] = ()

    def settings(self) -> PolicySettings:
        return PolicySettings.model_validate({"name": self.policy, **dict(self.parameters)})


@dataclass(frozen=True, slots=True)
class Figures:
    """TTFT in seconds at one rate."""

    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float
    longest_decile_p99_s: float

    @classmethod
    def of(cls, summary: Summary) -> Figures:
        return cls(
            summary.ttft_mean_s,
            summary.ttft_p50_s,
            summary.ttft_p90_s,
            summary.ttft_p99_s,
            summary.longest_decile_p99_s,
        )


@dataclass(frozen=True, slots=True)
class Deadline:
    """When no more work begins, in seconds of the wall clock: processes share it."""

    at_s: float = math.inf

    def over(self) -> bool:
        return time.time() > self.at_s


class OutOfTime(Exception):
    """A figure is not known, and the time to find figures is over."""


OWN = (
    "policies.parameters",
    "policies.priced",
    "policies.simulator.late_binding",
    "prfaas.late_binding",
    "prfaas.queue_settings",
)
NEEDED = ("bench.policy_arms", "bench.policy_cases", "prfaas.profile", "prfaas.snapshot")


class Memo:
    """Figures by what gave them, in files under FOUND; nothing to close.

    The code that is loaded is part of the key; what only `priced` runs, and queue orders, for
    arms with those alone.
    """

    def __init__(self, folder: Path = FOUND, limit: Deadline = Deadline()) -> None:
        self._folder, self._limit = folder, limit
        loaded = {
            name: Path(str(module.__file__))
            for name, module in sorted(sys.modules.items())
            if name.split(".")[0] == "policies" or name in (*NEEDED, *OWN)
        }
        self._code = _digest(*(p.read_bytes() for n, p in loaded.items() if n not in OWN))
        self._own = _digest(*(loaded[name].read_bytes() for name in OWN))

    def get(self, arm: Arm, what: tuple[Any, ...], compute: Callable[[], Any]) -> Any:
        """JSON data: as it was found before, or as `compute` finds it now. Raises OutOfTime."""
        own = "" if arm.policy != "priced" and arm.order == "fcfs" else self._own
        settings = arm.settings()
        read = {name: getattr(settings, name) for name in parameters_of(arm.policy)}
        key = _digest(repr((self._code, own, arm, read, what)).encode())
        path = self._folder / f"{key}.json"
        if path.is_file():
            return json.loads(path.read_text())
        if self._limit.over():
            raise OutOfTime
        found = compute()
        self._folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(found))
        part.replace(path)
        return found


class Measured:
    """Arms on one site, each figure computed once; nothing to close.

    Methods give None where an arm holds its objectives at no rate.
    """

    def __init__(self, site: Site, memo: Memo) -> None:
        self.site = site
        self._memo = memo

    def capacity(self, arm: Arm, seed: int, near_rate: float, *, slowdown: bool) -> float | None:
        """Requests a second within the scenario's objectives, or within those on slowdown."""
        site, settings = self.site, arm.settings()
        scenario = ordered(site, arm.order).scenario

        def compute() -> float | None:
            try:
                found = capacity(
                    scenario,
                    site.profiles,
                    lambda rate: site.testing(seed, rate),
                    lambda: make_policy(settings),
                    SLOWDOWN if slowdown else scenario.objectives,
                    start_rate_per_s=near_rate,
                    warm_up_s=WARM_UP_SHARE * site.requests / near_rate,
                    growth=NEAR,
                )
            except ConfigError as error:
                if not error.message.startswith("infeasible"):
                    raise
                return None
            return found.rate_per_s

        key = ("capacity", site.case, site.requests, seed, near_rate, slowdown)
        return self._memo.get(arm, key, compute)  # type: ignore[no-any-return]

    def at(self, arm: Arm, seed: int, rate: float) -> Figures:
        """Figures at a rate that may be too much for the arm."""
        site = ordered(self.site, arm.order)

        def compute() -> Mapping[str, float]:
            result = simulate(
                site.scenario, site.profiles, site.testing(seed, rate), make_policy(arm.settings())
            )
            return asdict(Figures.of(result.summary(WARM_UP_SHARE * site.requests / rate)))

        return Figures(**self._memo.get(arm, ("at", site.case, site.requests, seed, rate), compute))

    def tuned(self, arm: Arm, trials: int) -> Arm:
        """The arm with the parameters of the highest rate on the training part; its own are tried
        first."""
        site = self.site

        def compute() -> Mapping[str, float]:
            requests = tuple(site.training(site.start_rate_per_s)[:TRAINING])
            part = Part(requests)
            spec = StudySpec(site.case.name, arm.policy, "rate", queue_order=arm.order)
            problem = Problem(spec, site.scenario, site.profiles, part, part)
            with tempfile.TemporaryDirectory() as folder:
                study = open_study(
                    spec, str(Path(folder) / "journal"), arm.policy, dict(arm.parameters)
                )
                run_trials(problem, study, trials, 0)
                return study.best_params

        found = self._memo.get(
            arm, ("tuned", site.case, site.requests, trials, SPANS[arm.policy]), compute
        )
        return replace(arm, parameters=tuple(sorted(found.items())))


def ordered(site: Site, order: str) -> Site:
    """The site with that order in all prefill queues."""
    changed = site.scenario.queue_order.model_copy(update={"name": order})
    return replace(site, scenario=site.scenario.model_copy(update={"queue_order": changed}))


def _digest(*parts: bytes) -> str:
    return hashlib.blake2b(b"".join(parts), digest_size=12).hexdigest()
