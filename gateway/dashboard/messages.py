"""What the dashboard's page is sent; times in seconds, sizes in bytes, `at` in Unix seconds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from prfaas.snapshot import Estimate


class Place(msgspec.Struct):
    """One engine, at D or at a peer, as its agent tells and this gateway finds it."""

    name: str
    """The engine's, or `peer/instance`."""
    status: str
    """`up`, `draining`, `down`, or `silent` where only the agent is not heard."""
    detail: str = ""
    peer: str = ""
    link_class: str = ""
    model: str = ""
    paced: bool = False
    waiting: int = 0
    running: int = 0
    queue_tokens: int = 0
    in_flight: int | None = None
    """Requests of this gateway there; None at peers."""
    kv_used: float | None = None
    """Share of its KV blocks that are taken; None where nobody tells."""
    decode_step_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    """At 4096 uncached tokens; 0: not measured."""
    breaker: str = "closed"
    openings: int = 0
    age_s: float | None = None
    """Since its agent was heard; None: never, or it has none."""


class Link(msgspec.Struct):
    """The path from one decode engine to one instance."""

    engine: str
    peer: str
    instance: str
    ready: bool = False
    detail: str = ""
    goodput_bytes_per_s: float = 0.0
    rate_bytes_per_s: float = 0.0
    rtt_s: float = 0.0
    queueing_s: float = 0.0
    in_flight_bytes: int = 0
    sessions: int = 0
    wire_ratio: float = 1.0
    limit: str = ""
    stalled_s: float = 0.0
    breaker: str = "closed"
    openings: int = 0


class Latency(msgspec.Struct):
    """Percentiles of the latest requests of one target; None where there were none."""

    requests: int = 0
    ttft_s: tuple[float, float, float] | None = None
    """p50, p90, p99."""
    itl_s: tuple[float, float, float] | None = None


class Samples(msgspec.Struct):
    """What percentiles are made of, by target."""

    requests: dict[str, int]
    ttft_s: dict[str, list[float]]
    itl_s: dict[str, list[float]]

    @staticmethod
    def of(parts: Iterable[Samples]) -> Samples:
        """All of them together."""
        whole = Samples({}, {}, {})
        for part in parts:
            for target, count in part.requests.items():
                whole.requests[target] = whole.requests.get(target, 0) + count
            for mine, others in ((whole.ttft_s, part.ttft_s), (whole.itl_s, part.itl_s)):
                for target, values in others.items():
                    mine.setdefault(target, []).extend(values)
        return whole


class Share(msgspec.Struct):
    """Of the latest requests."""

    requests: int = 0
    remote_requests: int = 0
    tokens: int = 0
    """Uncached."""
    remote_tokens: int = 0


class Saved(msgspec.Struct):
    """KV that did not have to cross a link, since the start."""

    raw_bytes: int = 0
    wire_bytes: int = 0
    prefix_bytes: int = 0
    """D had it already."""


class Policy(msgspec.Struct):
    """One policy that runs: `active`, `canary` or `shadow`."""

    role: str
    name: str
    version: int
    state: dict[str, Any]
    share: float | None = None
    """Of the requests, that a canary decides for."""


class Shadowing(msgspec.Struct):
    """What the shadow policy said, since the start."""

    agreed: int = 0
    differed: int = 0
    saved_s: float = 0.0
    lost_s: float = 0.0


class Together(msgspec.Struct):
    """How it stands with the other gateways."""

    up: bool
    """The store where they meet answers."""
    gateways: int
    """Among whom budgets are divided, this one too."""
    age_s: float
    """Since they were last heard."""


class State(msgspec.Struct):
    """Everything but the requests, as of now."""

    at: float
    up_s: float
    status: str
    """`ready`, `draining`, or `no engine`."""
    in_flight: int
    decided: int
    """Decisions since the start."""
    window_s: float
    """What `latency` and `share` look back to at most."""
    engines: list[Place]
    instances: list[Place]
    links: list[Link]
    latency: dict[str, Latency]
    share: Share
    saved: Saved
    reasons: list[tuple[str, str, int]]
    """Target, reason, decisions since the start."""
    policies: list[Policy]
    shadow: Shadowing | None
    together: Together | None = None
    """None: this gateway is alone."""


class Shadowed(msgspec.Struct):
    """What the shadow policy would have done."""

    policy: str
    agrees: bool
    target: str
    saved_s: float | None


class Request(msgspec.Struct):
    """One request as it stands; it comes again when it goes on. Nothing of its prompt."""

    id: str
    at: float
    engine: str
    target: str
    reason: str
    places: list[str]
    """Instances in the order of the plan."""
    prompt_tokens: int
    uncached_tokens: int
    local: Estimate | None
    remote: Estimate | None
    """The planned one, or else the best."""
    policy: str
    policy_role: str
    tried: list[str]
    """Engines."""
    shadow: Shadowed | None = None
    status: str = ""
    error: str = ""
    ttft_s: float | None = None
    e2e_s: float | None = None
    outcome: str = ""
    outcome_reason: str = ""
    wire_bytes: int = 0
    quality: str = ""


class Requests(msgspec.Struct):
    """Requests that are new or went on since the last such message, oldest first."""

    requests: list[Request]
    left_out: int = 0
    """Too many to show: so many more changed."""


class Hello(msgspec.Struct):
    """What does not change while the page is open."""

    model: str
    version: str
    offload: bool
