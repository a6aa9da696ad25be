"""Three questions of design, answered for one workload, fleet and threshold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from policies.mix import RequestMix, Vector
from policies.throughput import Fleet, remote_s

SHORTEST_TOKENS = 16
"""Of prefixes that are looked at."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One question with its answer and the numbers it rests on (units in their names)."""

    question: str
    choice: str
    why: str
    numbers: Mapping[str, float]


def answers(fleet: Fleet, mix: RequestMix, threshold_tokens: float, rate: float) -> list[Answer]:
    """All three for requests above a threshold at a rate; none without a peer."""
    if fleet.remote is None:
        return []
    return [
        direct_or_shared(fleet, mix, threshold_tokens),
        at_once_or_lazily(fleet, mix, threshold_tokens, rate),
        reuse_local_or_remote(fleet, mix),
    ]


def direct_or_shared(fleet: Fleet, mix: RequestMix, threshold_tokens: float) -> Answer:
    """Does KV go from P to D directly, or through a cache layer that both sites share?

    The layer lets P read what only D has cached, instead of computing it again; for that all KV
    crosses one more hop, here one as fast as the link, whose last chunk nothing hides.
    """
    assert fleet.remote is not None
    remote, away = fleet.remote, mix.uncached > threshold_tokens
    weight = np.where(away, mix.weight, 0.0)
    share = float(weight.sum())
    again = remote.prefill.seconds_of(mix.uncached + mix.cached, np.zeros_like(mix.cached))
    compute = mix.prefill_s(remote)
    read = _carried_s(fleet, mix.cached) + fleet.rtt_s
    saved = np.maximum(0.0, remote.time_scale * again - np.maximum(compute, read))
    saved = np.where(mix.cached > 0, saved, 0.0)
    last = np.minimum(mix.uncached, remote.prefill.chunk_tokens) / remote.model.layers
    hop = _carried_s(fleet, last) + fleet.rtt_s
    gain, cost = _mean(weight, saved), _mean(weight, hop)
    choice = "shared" if share > 0 and gain > cost else "direct"
    length = break_even_tokens(fleet)
    return Answer(
        "Pull directly, or through a shared cache layer?",
        choice,
        f"an offloaded request would save {gain:.3f} s of computing what only D has cached, and "
        f"wait {cost:.3f} s for one more hop" + _read_or_computed(length),
        {"saved_s": gain, "hop_s": cost, "break_even_tokens": float(length or 0)},
    )


def at_once_or_lazily(
    fleet: Fleet, mix: RequestMix, threshold_tokens: float, rate: float
) -> Answer:
    """Does KV move layer by layer while it is computed, or when D asks for all of it?"""
    assert fleet.remote is not None
    away = mix.uncached > threshold_tokens
    weight = np.where(away, mix.weight, 0.0)
    compute = mix.prefill_s(fleet.remote)
    eager = remote_s(fleet, mix, stretch=1.0)
    lazy = fleet.rtt_s + compute + _carried_s(fleet, mix.uncached) + _state_s(fleet)
    raw = fleet.remote.model.token_bytes * mix.uncached + fleet.remote.model.state_bytes
    # Little's law: bytes come evenly over the computation, so on average half of them are there.
    staged = rate * float(weight @ (raw * compute / 2))
    late = _mean(weight, lazy - eager)
    choice = "at once" if late > 0 else "no difference"
    return Answer(
        "Move KV at once, or lazily?",
        choice,
        f"lazily an offloaded request starts {late:.3f} s later; at once D holds "
        f"{staged / 1e9:.2f} GB on average that it cannot use yet",
        {"later_s": late, "staging_gb": staged / 1e9},
    )


def reuse_local_or_remote(fleet: Fleet, mix: RequestMix) -> Answer:
    """Where P has a prefix and D has not: fetch it and go on at D, compute it all at D, or prefill
    at P and fetch everything? Shares by which is fastest, with no queue anywhere."""
    assert fleet.remote is not None
    total = mix.uncached + mix.cached
    local = fleet.local.time_scale * fleet.local.prefill.seconds_of(total, np.zeros_like(total))
    fetch = (
        fleet.rtt_s + _carried_s(fleet, mix.cached) + _state_s(fleet) + mix.prefill_s(fleet.local)
    )
    fetch = np.where(mix.cached > 0, fetch, np.inf)
    carried = _carried_s(fleet, total)
    away = fleet.rtt_s + np.maximum(mix.prefill_s(fleet.remote), carried) + _state_s(fleet)
    table = np.stack((fetch, local, away))
    fastest = table.argmin(axis=0)
    names = ("reuse", "local", "remote")
    shares = {
        f"{name}_share": float(mix.weight[fastest == at].sum()) for at, name in enumerate(names)
    }
    best = float(mix.weight @ table.min(axis=0))
    means = {"best_s": best, "local_s": mix.mean(local), "remote_s": mix.mean(away)}
    choice = max(names, key=lambda name: shares[f"{name}_share"])
    return Answer(
        "Reuse what P has, compute at D, or prefill at P?",
        choice,
        "with no queue anywhere, "
        + ", ".join(f"{name} is fastest for {shares[f'{name}_share']:.0%}" for name in names)
        + f"; mean {best:.2f} s against {means['local_s']:.2f} s all at D",
        {**shares, **means},
    )


def break_even_tokens(fleet: Fleet) -> int | None:
    """The shortest prefix that is faster to fetch over the link than to compute at D; None where
    there is none."""
    longest = fleet.local.covers_tokens
    lengths = np.unique(np.geomspace(SHORTEST_TOKENS, longest, 200).astype(int)).astype(float)
    computed = fleet.local.time_scale * fleet.local.prefill.seconds_of(
        lengths, np.zeros_like(lengths)
    )
    fetched = fleet.rtt_s + _carried_s(fleet, lengths) + _state_s(fleet)
    faster = np.flatnonzero(fetched < computed)
    return int(lengths[faster[0]]) if len(faster) else None


def _read_or_computed(length: int | None) -> str:
    if length is None:
        return "; reading a prefix is slower than computing it at every length"
    if length <= SHORTEST_TOKENS:
        return "; reading a prefix is faster than computing it at every length"
    return f"; reading a prefix is faster than computing it from {length} tokens on"


def _carried_s(fleet: Fleet, tokens: Vector) -> Vector:
    """Seconds of token KV on the link, alone."""
    assert fleet.remote is not None
    return fleet.remote.model.token_bytes * tokens / fleet.wire_ratio / fleet.link_bytes_per_s


def _state_s(fleet: Fleet) -> float:
    assert fleet.remote is not None
    return fleet.remote.model.state_bytes / fleet.link_bytes_per_s


def _mean(weight: Vector, values: Vector) -> float:
    total = float(weight.sum())
    return float(weight @ values) / total if total > 0 else 0.0
