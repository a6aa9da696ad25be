"""What a decision looks at, one number at a time: its name, its bounds, and how to change it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from prfaas.snapshot import RemoteInstance, RequestFacts, Snapshot

Put = Callable[[RequestFacts, Snapshot, Any], tuple[RequestFacts, Snapshot]]
"""The same inputs with one of them changed."""

MOST = 1 << 40


def _unmoved(facts: RequestFacts, snapshot: Snapshot, value: Any) -> tuple[RequestFacts, Snapshot]:
    return facts, snapshot


@dataclass(frozen=True, slots=True)
class Input:
    """One number that a decision depends on; yes and no are 1 and 0."""

    name: str
    unit: str
    now: float
    low: float
    high: float
    grain: float
    """Smallest change that matters; 1 for what is counted."""
    _put: Put = _unmoved
    parameter: str | None = None
    """Of the policy, where it is none of the snapshot's."""

    def put(
        self, facts: RequestFacts, snapshot: Snapshot, value: float
    ) -> tuple[RequestFacts, Snapshot]:
        return self._put(facts, snapshot, self.as_is(value))

    def as_is(self, value: float) -> float:
        """Whole where it is counted."""
        return round(value) if self.grain >= 1 else value

    def paths(self, steps_per_doubling: int) -> Iterator[Iterator[float]]:
        """Values from the present one up, and from it down, in steps that grow with distance."""
        if self.now < self.high:
            yield self._path(self.high, steps_per_doubling)
        if self.now > self.low:
            yield self._path(self.low, steps_per_doubling)

    def _path(self, end: float, steps_per_doubling: int) -> Iterator[float]:
        sign = 1 if end > self.now else -1
        growth = 2 ** (1 / steps_per_doubling)
        step = self.grain
        while sign * (self.now + sign * step - end) < 0:
            yield self.as_is(self.now + sign * step)
            step = max(step * growth, step + self.grain)
        yield end


def inputs_of(facts: RequestFacts, snapshot: Snapshot) -> Iterator[Input]:
    """All numbers of one decision: the request's, D's, and each instance's."""
    yield from _of_request(facts)
    yield from _of_local(snapshot, facts.prompt_tokens)
    for at, remote in enumerate(snapshot.remotes):
        yield from _of_remote(at, remote, facts.prompt_tokens)


def _of_request(facts: RequestFacts) -> Iterator[Input]:
    def put(name: str, of: Callable[[Any], Any] = int) -> Put:
        return lambda f, s, value: (replace(f, **{name: of(value)}), s)

    yield Input("prompt", "tokens", facts.prompt_tokens, 2, 1 << 20, 1, put("prompt_tokens"))
    yield Input("cache known", "", facts.cache_known, 0, 1, 1, put("cache_known", bool))
    if facts.features:
        yield Input("features that forbid offload", "", 1, 0, 1, 1, _without_features)


def _without_features(
    facts: RequestFacts, snapshot: Snapshot, value: Any
) -> tuple[RequestFacts, Snapshot]:
    return replace(facts, features=facts.features if value else frozenset()), snapshot


def _of_local(snapshot: Snapshot, prompt_tokens: int) -> Iterator[Input]:
    local = snapshot.local

    def put(name: str, of: Callable[[Any], Any] = int) -> Put:
        return lambda f, s, value: (f, replace(s, local=replace(s.local, **{name: of(value)})))

    def put_load(name: str, of: Callable[[Any], Any] = int) -> Put:
        def changed(f: RequestFacts, s: Snapshot, value: Any) -> tuple[RequestFacts, Snapshot]:
            load = replace(s.local.load, **{name: of(value)})
            return f, replace(s, local=replace(s.local, load=load))

        return changed

    load, most_age_s = local.load, 10 * snapshot.max_age_s
    yield Input("D queue", "tokens", load.queue_tokens, 0, MOST, 1, put_load("queue_tokens"))
    yield Input(
        "D prefix match", "tokens", local.matched_tokens, 0, prompt_tokens - 1, 1,
        put("matched_tokens"),
    )  # fmt: skip
    yield Input(
        "D decode step", "s", load.decode_step_s, 0, 60, 1e-4, put_load("decode_step_s", float)
    )
    yield Input("D load age", "s", load.age_s, 0, most_age_s, 1e-3, put_load("age_s", float))
    yield Input(
        "D free staging", "bytes", local.free_staging_bytes, 0, MOST, 1, put("free_staging_bytes")
    )
    ready = put("offload_ready", bool)
    yield Input("D can import", "", local.offload_ready, 0, 1, 1, ready)


def _of_remote(at: int, remote: RemoteInstance, prompt_tokens: int) -> Iterator[Input]:
    name = f"{remote.peer}/{remote.instance}"

    def changed(s: Snapshot, **fields: Any) -> Snapshot:
        remotes = list(s.remotes)
        remotes[at] = replace(remotes[at], **fields)
        return replace(s, remotes=tuple(remotes))

    def put(field: str, of: Callable[[Any], Any] = int) -> Put:
        return lambda f, s, value: (f, changed(s, **{field: of(value)}))

    def put_load(field: str, of: Callable[[Any], Any] = int) -> Put:
        return lambda f, s, value: (
            f, changed(s, load=replace(s.remotes[at].load, **{field: of(value)})),
        )  # fmt: skip

    def put_link(field: str, of: Callable[[Any], Any] = float) -> Put:
        return lambda f, s, value: (
            f, changed(s, link=replace(s.remotes[at].link, **{field: of(value)})),
        )  # fmt: skip

    load, link = remote.load, remote.link
    yield Input(f"{name} queue", "tokens", load.queue_tokens, 0, MOST, 1, put_load("queue_tokens"))
    yield Input(
        f"{name} prefix match", "tokens", remote.matched_tokens, 0, prompt_tokens - 1, 1,
        put("matched_tokens"),
    )  # fmt: skip
    yield Input(f"{name} load age", "s", load.age_s, 0, 3600, 1e-3, put_load("age_s", float))
    goodput = link.goodput_bytes_per_s
    yield Input(
        f"{name} goodput", "bytes/s", goodput, 0, MOST, 1e3, put_link("goodput_bytes_per_s")
    )
    yield Input(f"{name} round trip", "s", link.rtt_s, 0, 60, 1e-4, put_link("rtt_s"))
    yield Input(
        f"{name} KV under way", "bytes", link.in_flight_bytes, 0, MOST, 1,
        put_link("in_flight_bytes", int),
    )  # fmt: skip
    yield Input(f"{name} wire ratio", "", link.wire_ratio, 0.1, 100, 1e-3, put_link("wire_ratio"))
    yield Input(f"{name} link age", "s", link.age_s, 0, 3600, 1e-3, put_link("age_s"))
    yield Input(
        f"{name} free retention", "bytes", remote.free_retention_bytes, 0, MOST, 1,
        put("free_retention_bytes"),
    )  # fmt: skip
    yield Input(f"{name} ready", "", remote.ready, 0, 1, 1, put("ready", bool))
    yield Input(f"{name} draining", "", load.draining, 0, 1, 1, put_load("draining", bool))
