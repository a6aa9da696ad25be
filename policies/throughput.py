"""The paper's throughput model (arXiv 2604.15039, section on the deployment): no queues, by
exhaustive search."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from policies.mix import RequestMix, Vector
from policies.scenario import Profiles, Scenario
from prfaas.errors import ConfigError
from prfaas.profile import Profile


class Stage(enum.StrEnum):
    """What can be the narrowest place."""

    REMOTE_PREFILL = "remote_prefill"
    LINK = "link"
    LOCAL_PREFILL = "local_prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Fleet:
    """What is to be planned: one peer or none, D's nodes, and the link between them."""

    local: Profile
    decode: Profile
    local_instances: int
    remote: Profile | None = None
    remote_instances: int = 0
    link_bytes_per_s: float = 0.0
    rtt_s: float = 0.0
    wire_ratio: float = 1.0

    @classmethod
    def of(cls, scenario: Scenario, profiles: Profiles) -> Fleet:
        """The fleet of a scenario. Several peers of one kind are taken as one that has all their
        instances and links, as far away as the farthest.

        Raises ConfigError for what the equations do not describe.
        """
        peers, local = scenario.peers, scenario.local
        if local.colocated:
            raise ConfigError(
                "the planner's equations hold for separate prefill and decode nodes; "
                "simulate colocated ones"
            )
        if not peers:
            return cls(profiles.prefill, profiles.decode, local.instances)
        remote = profiles.peers[peers[0].name]
        for peer in peers[1:]:
            other = profiles.peers[peer.name]
            if other != remote:
                raise ConfigError(
                    f"the planner's equations hold for peers of one kind, and {peers[0].name} "
                    f"({remote.name}) and {peer.name} ({other.name}) differ; simulate them, with "
                    "a number of D's nodes that prefill (--prefill-nodes, local.prefill_instances)"
                )
        return cls(
            profiles.prefill,
            profiles.decode,
            local.instances,
            remote,
            sum(peer.instances for peer in peers),
            sum(peer.link.bytes_per_s for peer in peers),
            max(peer.link.rtt_ms for peer in peers) / 1e3,
            remote.wire_ratio(scenario.quality),
        )


@dataclass(frozen=True, slots=True)
class Split:
    """How D's nodes are used, and which requests leave it: those with more uncached tokens."""

    threshold_tokens: float
    prefill_instances: int
    decode_instances: int


@dataclass(frozen=True, slots=True)
class Capacity:
    """One point of the paper's model; rates in requests a second."""

    split: Split
    rate: float
    """Lambda_max: what all stages carry together."""
    remote_rate: float
    """Theta_prfaas, of offloaded requests."""
    local_rate: float
    """Theta_pd-p, of local prefills."""
    decode_rate: float
    """Theta_pd-d, of all requests."""
    remote_share: float
    """p."""
    long_tokens: float
    """l_long."""
    short_tokens: float
    """l_short."""
    egress_bytes_per_s: float
    """KV that leaves the peer at `rate`."""
    binds: Stage


def best_capacity(
    fleet: Fleet, mix: RequestMix, splits: Sequence[int] | None = None, batch: int | None = None
) -> Capacity:
    """The split and threshold with the highest rate, of all there are.

    `splits`: numbers of prefilling nodes to try; default all. Raises ConfigError where none works.
    """
    require_covered(fleet, mix)
    counts = range(fleet.local_instances) if splits is None else splits
    best: Capacity | None = None
    for count in counts:
        for capacity in capacities(fleet, mix, count, batch):
            if best is None or capacity.rate > best.rate:
                best = capacity
    if best is None or best.rate <= 0:
        raise ConfigError(
            f"infeasible: no split of D's nodes (local.instances: {fleet.local_instances}) leaves "
            "one to prefill and one to decode"
        )
    return best


def capacities(
    fleet: Fleet, mix: RequestMix, prefill_instances: int, batch: int | None = None
) -> Iterator[Capacity]:
    """One split at every threshold that tells two points of the workload apart."""
    decode_instances = fleet.local_instances - prefill_instances
    lengths = mix.uncached
    cut = np.concatenate(([0.0], (lengths[1:] + lengths[:-1]) / 2, [lengths[-1]]))
    if fleet.remote is None:
        cut = cut[-1:]
    elif prefill_instances == 0:
        cut = cut[:1]
    share = np.concatenate(([0.0], np.cumsum(mix.weight)))
    local_sum = np.concatenate(([0.0], np.cumsum(mix.weight * lengths)))
    cached_sum = np.concatenate(([0.0], np.cumsum(mix.weight * mix.cached)))
    at = np.searchsorted(lengths, cut, side="right")
    decode_rate = decode_capacity(fleet, mix, decode_instances, batch)
    for threshold, index in zip(cut.tolist(), at.tolist(), strict=True):
        below = float(share[index])
        above = max(0.0, 1 - below)
        above = above if above > 1e-12 else 0.0
        short = _mean(local_sum, cached_sum, index, below)
        long = _rest_mean(local_sum, cached_sum, index, above)
        local_rate = (
            prefill_instances / fleet.local.prefill_s(*short) if below and short[0] else np.inf
        )
        remote_rate, by_link = _remote_rate(fleet, long) if above else (np.inf, False)
        rates = {
            Stage.LINK if by_link else Stage.REMOTE_PREFILL: remote_rate / above
            if above
            else np.inf,
            Stage.LOCAL_PREFILL: local_rate / below if below else np.inf,
            Stage.DECODE: decode_rate,
        }
        binds = min(rates, key=rates.__getitem__)
        rate = float(rates[binds])
        egress = rate * above * _wire_bytes(fleet, long[0]) if above else 0.0
        yield Capacity(
            Split(threshold, prefill_instances, decode_instances),
            rate,
            float(remote_rate) if above else 0.0,
            float(local_rate) if below else 0.0,
            decode_rate,
            above,
            long[0],
            short[0],
            egress,
            binds,
        )


def require_covered(fleet: Fleet, mix: RequestMix) -> None:
    """Raise ConfigError where a profile says nothing of the longest prompts."""
    for profile in (fleet.local, fleet.remote):
        if profile is not None:
            profile.require_covers(mix.longest_prompt)


def balanced_capacity(fleet: Fleet, mix: RequestMix) -> Capacity:
    """The best that a split blind to length can do: every request is equally likely to leave."""
    best: Capacity | None = None
    lengths = (mix.mean(mix.uncached), mix.mean(mix.cached))
    remote_rate, by_link = _remote_rate(fleet, lengths)
    for count in range(fleet.local_instances):
        local_rate = count / fleet.local.prefill_s(*lengths)
        decode_rate = decode_capacity(fleet, mix, fleet.local_instances - count)
        prefill_rate = remote_rate + local_rate
        share = remote_rate / prefill_rate if prefill_rate else 0.0
        rate = min(prefill_rate, decode_rate)
        if best is None or rate > best.rate:
            stage = Stage.LINK if by_link else Stage.REMOTE_PREFILL
            best = Capacity(
                Split(0.0, count, fleet.local_instances - count),
                rate,
                remote_rate,
                local_rate,
                decode_rate,
                share,
                lengths[0],
                lengths[0],
                rate * share * _wire_bytes(fleet, lengths[0]),
                stage if prefill_rate <= decode_rate else Stage.DECODE,
            )
    assert best is not None
    return best


def decode_capacity(
    fleet: Fleet, mix: RequestMix, instances: int, batch: int | None = None
) -> float:
    """Requests a second that the decoding nodes finish with full batches."""
    size = fleet.decode.decode.max_batch if batch is None else batch
    step_s = fleet.decode.step_s(size, size * mix.mean_context)
    return instances * size / (step_s * mix.mean_output)


def idle_ttft_s(fleet: Fleet, mix: RequestMix, threshold_tokens: float) -> Vector:
    """TTFT of each point with no other request anywhere: the paper's TTFT, with the steps it
    leaves out (the end of the transfer, and D's decode step for the last prompt token)."""
    local = mix.prefill_s(fleet.local)
    if fleet.remote is None:
        prefill = local
    else:
        away = remote_s(fleet, mix, stretch=1.0)
        prefill = np.where(mix.uncached > threshold_tokens, away, local)
    return prefill + fleet.decode.step_s(1, mix.mean_context)


def remote_s(fleet: Fleet, mix: RequestMix, stretch: float) -> Vector:
    """Seconds from request to imported KV for each point, the peer being idle and the link so many
    times slower than alone. The wire works while the peer computes; the state follows at the end.
    """
    assert fleet.remote is not None
    compute = mix.prefill_s(fleet.remote)
    bytes_per_s = fleet.link_bytes_per_s / stretch
    model = fleet.remote.model
    tokens_s = model.token_bytes * mix.uncached / fleet.wire_ratio / bytes_per_s
    state_s = model.state_bytes / bytes_per_s
    last_layer_s = tokens_s / model.layers
    return fleet.rtt_s + np.maximum(compute + last_layer_s, tokens_s) + state_s


def quantile(values: Vector, weight: Vector, share: float) -> float:
    """The smallest value that `share` of the weight does not exceed."""
    order = np.argsort(values, kind="stable")
    at = int(np.searchsorted(np.cumsum(weight[order]), share - 1e-12))
    return float(values[order][min(at, len(values) - 1)])


def _remote_rate(fleet: Fleet, lengths: tuple[float, float]) -> tuple[float, bool]:
    """Offloaded requests a second of a mean length, and whether the link is what limits them."""
    if fleet.remote is None or not fleet.remote_instances:
        return 0.0, False
    compute = fleet.remote_instances / fleet.remote.prefill_s(*lengths)
    link = fleet.link_bytes_per_s / _wire_bytes(fleet, lengths[0])
    return min(compute, link), link < compute


def _wire_bytes(fleet: Fleet, tokens: float) -> float:
    assert fleet.remote is not None
    return fleet.remote.model.wire_bytes(tokens, fleet.wire_ratio)


def _mean(lengths: Vector, cached: Vector, index: int, share: float) -> tuple[float, float]:
    if share <= 0:
        return 0.0, 0.0
    return float(lengths[index]) / share, float(cached[index]) / share


def _rest_mean(lengths: Vector, cached: Vector, index: int, share: float) -> tuple[float, float]:
    if share <= 0:
        return 0.0, 0.0
    return (
        float(lengths[-1] - lengths[index]) / share,
        float(cached[-1] - cached[index]) / share,
    )
