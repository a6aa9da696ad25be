"""The planner: the highest rate that holds objectives when requests queue, and what limits it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from policies.mix import RequestMix, Vector
from policies.queueing import (
    FOREVER,
    NO_WAIT,
    Wait,
    late_share,
    mgc_wait,
    shared_link_stretch,
)
from policies.scenario import Objectives
from policies.throughput import (
    Fleet,
    Split,
    Stage,
    decode_capacity,
    idle_ttft_s,
    quantile,
    remote_s,
)
from prfaas.errors import ConfigError

THRESHOLDS = 40
"""Thresholds tried: so many quantiles of uncached length."""
RATE_STEPS = 24
"""Halvings of a rate: to a 16-millionth of its bound."""
EASED = 1.05
"""A stage binds if making it this much faster raises the rate most."""


class Infeasible(ConfigError):
    """No configuration meets the objectives; the message names objective and stage."""

    kind = "infeasible"

    def __init__(self, message: str, stage: Stage) -> None:
        super().__init__(message)
        self.stage = stage


@dataclass(frozen=True, slots=True)
class Load:
    """A fleet with its queues at one rate."""

    split: Split
    rate: float
    batch: int
    utilisation: Mapping[Stage, float]
    """Busy share of each stage; 1 or more: it cannot keep up."""
    remote_share: float
    mean_ttft_s: float
    """Infinite where a stage cannot keep up."""
    ttft_s: Mapping[float, float]
    """TTFT at shares 0.5, 0.9 and 0.99."""
    idle_ttft_s: Mapping[float, float]
    """The same with no queue anywhere."""
    itl_s: float
    egress_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Plan:
    """The best rate there is, how to reach it, and what would raise it."""

    load: Load
    binds: Stage
    gain: Mapping[Stage, float]
    """Relative gain in rate from each stage being 5% faster."""


@dataclass(frozen=True, slots=True)
class _Ease:
    """How much faster than its profile each stage is taken to be."""

    remote: float = 1.0
    link: float = 1.0
    local: float = 1.0
    decode: float = 1.0


_NO_EASE = _Ease()
_EASES: Mapping[Stage, _Ease] = {
    Stage.REMOTE_PREFILL: _Ease(remote=EASED),
    Stage.LINK: _Ease(link=EASED),
    Stage.LOCAL_PREFILL: _Ease(local=EASED),
    Stage.DECODE: _Ease(decode=EASED),
}


class Queues:
    """One fleet, workload and split with its queues; computes what it needs once."""

    def __init__(self, fleet: Fleet, mix: RequestMix, split: Split, batch: int) -> None:
        self.fleet, self.mix, self.split, self.batch = fleet, mix, split, batch
        self._away = (
            mix.uncached > split.threshold_tokens
            if fleet.remote is not None
            else np.zeros(len(mix.uncached), dtype=bool)
        )
        self.remote_share = float(mix.weight[self._away].sum())
        self._local_s = mix.prefill_s(fleet.local)
        self._step_s = fleet.decode.step_s(batch, batch * mix.mean_context)
        if fleet.remote is not None:
            self._remote_s = mix.prefill_s(fleet.remote)
            self._wire = fleet.remote.model.wire_bytes(0) + (
                fleet.remote.model.token_bytes * mix.uncached / fleet.wire_ratio
            )

    def utilisation(self, rate: float, ease: _Ease = _NO_EASE) -> dict[Stage, float]:
        """Busy share of every stage that is used."""
        fleet, mix, away = self.fleet, self.mix, self._away
        found: dict[Stage, float] = {}
        if self.remote_share > 0:
            work = float(mix.weight[away] @ self._remote_s[away]) / ease.remote
            found[Stage.REMOTE_PREFILL] = _share(rate * work, fleet.remote_instances)
            sent = float(mix.weight[away] @ self._wire[away]) / ease.link
            found[Stage.LINK] = _share(rate * sent, fleet.link_bytes_per_s)
        if self.remote_share < 1:
            work = float(mix.weight[~away] @ self._local_s[~away]) / ease.local
            found[Stage.LOCAL_PREFILL] = _share(rate * work, self.split.prefill_instances)
        slots = self.split.decode_instances * self.batch
        busy = rate * mix.mean_output * self._step_s / ease.decode
        found[Stage.DECODE] = _share(busy, slots)
        return found

    def stable_rate(self, ease: _Ease = _NO_EASE) -> float:
        """The rate at which the first stage cannot keep up; 0 where one never can."""
        busiest = max(self.utilisation(1.0, ease).values())
        return 1 / busiest if 0 < busiest < float("inf") else 0.0

    def holds(self, rate: float, objectives: Objectives, ease: _Ease = _NO_EASE) -> bool:
        """Whether all objectives hold at a rate."""
        parts = self._parts(rate, ease)
        if parts is None:
            return False
        return all(
            self._late(parts, seconds) <= 1 - share + 1e-12 for share, seconds in objectives.ttft
        )

    def best_rate(self, objectives: Objectives, ease: _Ease = _NO_EASE) -> float:
        """The highest rate at which they hold; 0 where none does."""
        low, high = 0.0, self.stable_rate(ease)
        if high <= 0 or not self.holds(high * 1e-6, objectives, ease):
            return 0.0
        for _ in range(RATE_STEPS):
            middle = (low + high) / 2
            if self.holds(middle, objectives, ease):
                low = middle
            else:
                high = middle
        return low

    def load(self, rate: float) -> Load:
        """Everything there is to say at one rate."""
        parts = self._parts(rate, _NO_EASE)
        idle = idle_ttft_s(self.fleet, self.mix, self.split.threshold_tokens)
        shares = (0.5, 0.9, 0.99)
        if parts is None:
            mean, tails = float("inf"), dict.fromkeys(shares, float("inf"))
        else:
            base, remote, local, decode = parts
            waits = self.remote_share * remote.overall_mean_s + (
                (1 - self.remote_share) * local.overall_mean_s
            )
            mean = self.mix.mean(base) + waits + decode.overall_mean_s
            tails = {share: self._quantile(parts, share) for share in shares}
        sent = float(self.mix.weight[self._away] @ self._wire[self._away]) if self._any else 0.0
        return Load(
            self.split,
            rate,
            self.batch,
            self.utilisation(rate),
            self.remote_share,
            mean,
            tails,
            {share: quantile(idle, self.mix.weight, share) for share in shares},
            self._step_s,
            rate * sent,
        )

    @property
    def _any(self) -> bool:
        return self.remote_share > 0

    def _parts(self, rate: float, ease: _Ease) -> tuple[Vector, Wait, Wait, Wait] | None:
        """TTFT without waiting of each point, and the waits of remote, local and decode; None where
        a stage cannot keep up."""
        used = self.utilisation(rate, ease)
        if max(used.values()) >= 1:
            return None
        fleet, mix, away = self.fleet, self.mix, self._away
        step_s = self._step_s / ease.decode
        base = self._local_s / ease.local
        remote = local = NO_WAIT
        if self._any:
            stretch = shared_link_stretch(used[Stage.LINK]) / ease.link
            arrived = remote_s(fleet, mix, stretch)
            arrived = arrived - self._remote_s * (1 - 1 / ease.remote)
            base = np.where(away, arrived, base)
            remote = _pool_wait(
                rate, mix.weight[away], self._remote_s[away] / ease.remote, fleet.remote_instances
            )
        if self.remote_share < 1:
            local = _pool_wait(
                rate,
                mix.weight[~away],
                self._local_s[~away] / ease.local,
                self.split.prefill_instances,
            )
        answer_s = mix.output * step_s
        slots = self.split.decode_instances * self.batch
        decode = _pool_wait(rate, mix.weight, answer_s, slots)
        if not (remote.stable and local.stable and decode.stable):
            return None
        return base + step_s, remote, local, decode

    def _late(self, parts: tuple[Vector, Wait, Wait, Wait], seconds: float) -> float:
        """Share of requests whose TTFT is over `seconds`."""
        base, remote, local, decode = parts
        slack, weight, away = seconds - base, self.mix.weight, self._away
        late = late_share(slack[~away], weight[~away], local, decode)
        if self._any:
            late += late_share(slack[away], weight[away], remote, decode)
        return late

    def _quantile(self, parts: tuple[Vector, Wait, Wait, Wait], share: float) -> float:
        low, high = 0.0, float(parts[0].max()) + 1.0
        while self._late(parts, high) > 1 - share:
            high *= 2
        for _ in range(40):
            middle = (low + high) / 2
            if self._late(parts, middle) > 1 - share:
                low = middle
            else:
                high = middle
        return high


def best_plan(
    fleet: Fleet,
    mix: RequestMix,
    objectives: Objectives,
    prefill_instances: int | None = None,
) -> Plan:
    """The split and threshold with the highest rate that holds the objectives.

    `prefill_instances`: of D's nodes, if fixed. Raises Infeasible where no rate does.
    """
    batch = largest_batch(fleet, mix, objectives)
    best: tuple[float, Queues] | None = None
    candidates = [
        (queues.stable_rate(), queues)
        for split in _splits(fleet, mix, prefill_instances)
        for queues in (Queues(fleet, mix, split, batch),)
    ]
    candidates.sort(key=lambda candidate: -candidate[0])
    for bound, queues in candidates:
        if best is not None and bound <= best[0]:
            break  # not even without any objective
        rate = queues.best_rate(objectives)
        if rate > 0 and (best is None or rate > best[0]):
            best = rate, queues
    if best is None:
        raise _infeasible(fleet, mix, objectives, prefill_instances, batch)
    rate, queues = best
    used = queues.utilisation(rate)
    gain = {
        stage: queues.best_rate(objectives, ease) / rate - 1
        for stage, ease in _EASES.items()
        if stage in used
    }
    return Plan(queues.load(rate), max(gain, key=gain.__getitem__), gain)


def largest_batch(fleet: Fleet, mix: RequestMix, objectives: Objectives) -> int:
    """Sequences in a step that still holds the ITL objective. Raises Infeasible."""
    context, most = mix.mean_context, fleet.decode.decode.max_batch
    limit = objectives.itl_s
    if limit is None:
        return most
    fits = [b for b in range(1, most + 1) if fleet.decode.step_s(b, b * context) <= limit + 1e-12]
    if not fits:
        raise Infeasible(
            f"infeasible: an ITL of {limit:g} s cannot be held, one step of {fleet.decode.name} "
            f"takes {fleet.decode.step_s(1, context):.3g} s with a single sequence: decode binds",
            Stage.DECODE,
        )
    return max(fits)


def with_link(fleet: Fleet, gbit_per_s: float) -> Fleet:
    """The same fleet over another link."""
    return replace(fleet, link_bytes_per_s=gbit_per_s * 1e9 / 8)


def _splits(fleet: Fleet, mix: RequestMix, prefill_instances: int | None) -> Iterator[Split]:
    counts = range(fleet.local_instances) if prefill_instances is None else (prefill_instances,)
    longest = float(mix.uncached.max())
    at = np.linspace(0, len(mix.uncached) - 1, THRESHOLDS + 1)[1:-1].astype(int)
    between = sorted({float(x) for x in mix.uncached[at]})
    for count in counts:
        if fleet.remote is None:
            thresholds = [longest] if count else []
        elif count == 0:
            thresholds = [0.0]
        else:
            thresholds = [0.0, *between, longest]
        for threshold in thresholds:
            yield Split(threshold, count, fleet.local_instances - count)


def _infeasible(
    fleet: Fleet,
    mix: RequestMix,
    objectives: Objectives,
    prefill_instances: int | None,
    batch: int,
) -> Infeasible:
    """Which objective no configuration meets even when idle, by how much, and where it is spent."""
    splits = list(_splits(fleet, mix, prefill_instances))
    for share, seconds in objectives.ttft:
        best: tuple[float, Split] | None = None
        for split in splits:
            idle = idle_ttft_s(fleet, mix, split.threshold_tokens)
            reached = quantile(idle, mix.weight, share)
            if best is None or reached < best[0]:
                best = reached, split
        if best is not None and best[0] > seconds:
            reached, split = best
            idle = idle_ttft_s(fleet, mix, split.threshold_tokens)
            at = int(np.argmin(np.abs(idle - reached)))
            stage = _slowest(fleet, mix, split, at)
            return Infeasible(
                f"infeasible: TTFT P{share * 100:.0f} of {seconds:g} s cannot be held at any rate: "
                f"the best configuration takes {reached:.3g} s without any queue, and "
                f"{stage.value} takes most of it (a prompt of {mix.uncached[at]:.0f} uncached "
                f"tokens): {stage.value} binds",
                stage,
            )
    used = decode_capacity(fleet, mix, fleet.local_instances, batch)
    return Infeasible(
        "infeasible: no split of the nodes leaves one to prefill and one to decode"
        if used > 0
        else "infeasible: decode cannot serve any rate",
        Stage.DECODE,
    )


def _slowest(fleet: Fleet, mix: RequestMix, split: Split, at: int) -> Stage:
    step_s = fleet.decode.step_s(1, mix.mean_context)
    if fleet.remote is None or mix.uncached[at] <= split.threshold_tokens:
        return Stage.LOCAL_PREFILL if mix.prefill_s(fleet.local)[at] >= step_s else Stage.DECODE
    compute = float(mix.prefill_s(fleet.remote)[at])
    carried = float(remote_s(fleet, mix, 1.0)[at]) - compute
    parts = {Stage.REMOTE_PREFILL: compute, Stage.LINK: carried, Stage.DECODE: step_s}
    return max(parts, key=parts.__getitem__)


def _pool_wait(rate: float, weight: Vector, service_s: Vector, servers: int) -> Wait:
    """M/G/c with the services of some of the points, which come at their share of the rate."""
    share = float(weight.sum())
    if share <= 0:
        return NO_WAIT
    if servers < 1:
        return FOREVER
    mean = float(weight @ service_s) / share
    second = float(weight @ service_s**2) / share
    return mgc_wait(rate * share, servers, mean, second)


def _share(work: float, servers: float) -> float:
    if work <= 0:
        return 0.0
    return work / servers if servers > 0 else float("inf")
