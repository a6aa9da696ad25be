"""Scenarios: the sites, links, prices and objectives that planner and simulator are asked about."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Self

from pydantic import ConfigDict, Field, model_validator

from policies.profiles import find_profile
from policies.roofline import SHIPPED
from policies.workload.generate import Generator
from prfaas.errors import ConfigError
from prfaas.profile import Part, Profile, Quality, parse_as, read_yaml
from prfaas.queue_settings import QueueSettings

SCENARIOS = SHIPPED / "scenarios"


class LinkChange(Part):
    """From a time on, another rate."""

    at_s: float = Field(ge=0, description="Seconds from the start.")
    gbit_per_s: float = Field(ge=0, description="Rate from then on; 0: down.")


class LinkDips(Part):
    """A rate that drops again and again."""

    every_s: float = Field(gt=0, description="From one drop to the next.")
    for_s: float = Field(gt=0, description="Length of a drop, at the end of each period.")
    to_share: float = Field(0.1, ge=0, lt=1, description="Share of the rate that is left.")

    @model_validator(mode="after")
    def _shorter_than_the_period(self) -> Self:
        if self.for_s >= self.every_s:
            raise ValueError("for_s must be less than every_s")
        return self


class Link(Part):
    """The path to a peer; transfers under way share it equally."""

    gbit_per_s: float = Field(gt=0, description="What KV can get of it.")
    rtt_ms: float = Field(0.0, ge=0, description="Round trip.")
    opening_ms: float = Field(
        0.0, ge=0, description="What opening and handing over each transfer takes besides."
    )
    cross_traffic_share: float = Field(
        0.0, ge=0, lt=1, description="Share of the rate that other traffic takes."
    )
    changes: tuple[LinkChange, ...] = Field((), strict=False, description="Rates that follow.")
    dips: LinkDips | None = Field(None, description="Regular drops.")

    @property
    def bytes_per_s(self) -> float:
        """What is left for KV at first."""
        return self.gbit_per_s * 1e9 / 8 * (1 - self.cross_traffic_share)


class LocalSite(Part):
    """Site D: nodes that prefill and nodes that decode, or nodes that do both."""

    prefill: str = Field(description="Profile of a prefilling node.")
    decode: str | None = Field(None, description="Profile of a decoding node; none: the same.")
    instances: int = Field(ge=1, description="Nodes in all.")
    prefill_instances: int | None = Field(
        None, ge=0, description="Of these, how many prefill; none: for the planner to find."
    )
    colocated: bool = Field(False, description="Every node does both, chunk by chunk.")
    cache_tokens: int | None = Field(
        None, ge=0, description="Tokens the site's prefix cache holds; none: without bound."
    )
    kv_tokens: int | None = Field(
        None, ge=1, description="KV tokens of one decoding node; none: without bound."
    )
    staging_gb: float | None = Field(
        None, gt=0, description="Memory for KV that arrives; none: without bound."
    )
    import_gb_per_s: float | None = Field(
        None, gt=0, description="Rate of copying arrived KV into the pool; none: no time."
    )

    @model_validator(mode="after")
    def _split_fits(self) -> Self:
        prefill = self.prefill_instances
        if self.colocated and prefill is not None:
            raise ValueError("prefill_instances: colocated nodes are not split")
        if not self.colocated and prefill is not None and prefill >= self.instances:
            raise ValueError("prefill_instances: no instance is left to decode")
        return self


class Peer(Part):
    """A prefill cluster elsewhere, or a local pool on a fast link."""

    name: str = Field("peer", min_length=1, pattern=r"^[A-Za-z0-9._-]+$", description="Its name.")
    profile: str = Field(description="Profile of an instance.")
    instances: int = Field(ge=1, description="Prefill instances.")
    central_queue: bool = Field(
        True, description="One queue for all instances; false: the policy picks the instance."
    )
    cache_tokens: int | None = Field(
        None, ge=0, description="Tokens the peer's prefix cache holds; none: without bound."
    )
    retention_gb: float | None = Field(
        None, gt=0, description="Memory of an instance for KV not yet acknowledged; none: any."
    )
    link: Link = Field(description="The path to it.")


class Objectives(Part):
    """What a rate must hold to count."""

    ttft_p90_s: float | None = Field(None, gt=0, description="TTFT of nine in ten.")
    ttft_p99_s: float | None = Field(None, gt=0, description="TTFT of 99 in a hundred.")
    itl_s: float | None = Field(
        None,
        gt=0,
        description="Time between two tokens of an answer: planned, of any step; simulated, in the "
        "mean of an answer, of nine in ten.",
    )
    slowdown_p90: float | None = Field(
        None,
        ge=1,
        description="TTFT over that of the same request alone on the fastest site, of nine in ten; "
        "simulated, not planned.",
    )
    slowdown_p99: float | None = Field(
        None, ge=1, description="The same of 99 in a hundred; simulated, not planned."
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for what, unit, p90, p99 in (
            ("TTFT", " s", self.ttft_p90_s, self.ttft_p99_s),
            ("slowdown", "", self.slowdown_p90, self.slowdown_p99),
        ):
            if p90 is not None and p99 is not None and p99 < p90:
                raise ValueError(
                    f"contradicts itself: P99 of {what} ({p99:g}{unit}) cannot be below P90 "
                    f"({p90:g}{unit})"
                )
        return self

    @property
    def on_slowdown(self) -> bool:
        """Whether one of them is."""
        return self.slowdown_p90 is not None or self.slowdown_p99 is not None

    @property
    def bound_rates(self) -> bool:
        """Whether no rate is so high that it would still hold them."""
        return bool(self.ttft) or self.on_slowdown

    @property
    def ttft(self) -> tuple[tuple[float, float], ...]:
        """(share, seconds) of each TTFT objective."""
        pairs = ((0.90, self.ttft_p90_s), (0.99, self.ttft_p99_s))
        return tuple((share, seconds) for share, seconds in pairs if seconds is not None)


class Prices(Part):
    """In any one currency."""

    local_instance_per_hour: float = Field(ge=0, description="A node of D.")
    remote_instance_per_hour: float = Field(ge=0, description="An instance of the peer.")
    egress_per_gb: float = Field(0.0, ge=0, description="KV that leaves the peer.")


class QueueOrder(QueueSettings):
    """Who is prefilled next; as a scenario's other parts, strict."""

    model_config = ConfigDict(strict=True)


class Telemetry(Part):
    """How old what the gateway knows is."""

    interval_s: float = Field(0.5, ge=0, description="Between two reports; 0: always current.")
    delay_s: float = Field(0.0, ge=0, description="From an engine to the gateway.")
    settle_s: float = Field(
        0.0,
        ge=0,
        description="What was sent to D's queue counts besides until a report is so much younger.",
    )
    max_age_s: float = Field(2.0, gt=0, description="Older counts as unknown.")


class Fault(Part):
    """Something that goes wrong for a while."""

    kind: Literal["peer_down", "link_down", "telemetry_lost", "peer_slow"] = Field(
        description="What."
    )
    peer: str = Field("peer", description="Whose.")
    at_s: float = Field(ge=0, description="From when.")
    for_s: float = Field(gt=0, description="How long.")
    factor: float = Field(2.0, gt=0, description="peer_slow: prefill takes so many times as long.")


class Scenario(Part):
    """Everything but the policy; frozen, nothing to close."""

    scenario_version: Literal[1] = Field(1, description="Version of this file's format.")
    name: str = Field("scenario", min_length=1, description="Shown everywhere.")
    local: LocalSite = Field(description="Site D.")
    peers: tuple[Peer, ...] = Field((), strict=False, description="Where else to prefill.")
    quality: Quality = Field("exact", description="Quality class of KV on the wire.")
    objectives: Objectives = Field(
        Objectives(ttft_p90_s=10.0, ttft_p99_s=20.0), description="What a rate must hold."
    )
    prices: Prices | None = Field(None, description="For the cost of a plan.")
    workload: Generator = Field(Generator(), description="Requests where no trace is given.")
    queue_order: QueueOrder = Field(QueueOrder(), description="Order of all prefill queues.")
    telemetry: Telemetry = Field(Telemetry(), description="Age of what the gateway knows.")
    faults: tuple[Fault, ...] = Field((), strict=False, description="What goes wrong.")
    progress_timeout_s: float = Field(
        5.0, gt=0, description="A transfer without a byte for so long falls back to D."
    )

    @model_validator(mode="after")
    def _names(self) -> Self:
        names = [peer.name for peer in self.peers]
        if len(set(names)) != len(names):
            raise ValueError(f"peers: names must differ, not {', '.join(names)}")
        for fault in self.faults:
            if fault.peer not in names:
                raise ValueError(f"faults: no peer {fault.peer!r}: there are {', '.join(names)}")
        return self


class Profiles:
    """The profiles a scenario names, read once; nothing to close."""

    def __init__(self, scenario: Scenario, base: Path | None = None) -> None:
        """`base`: where relative file names start. Raises ConfigError."""
        self.prefill = _profile(scenario.local.prefill, base)
        self.decode = _profile(scenario.local.decode or scenario.local.prefill, base)
        self.peers: Mapping[str, Profile] = {
            peer.name: _profile(peer.profile, base) for peer in scenario.peers
        }
        for name, profile in self.peers.items():
            _require_same_kv(name, profile, self.prefill)
        _require_same_kv("local.decode", self.decode, self.prefill)


def scenario_names() -> list[str]:
    """Shipped scenarios."""
    return sorted(path.stem for path in SCENARIOS.glob("*.yaml"))


def load_scenario(spec: str) -> tuple[Scenario, Profiles]:
    """A shipped scenario by name, or a YAML file. Raises ConfigError naming file and key."""
    path = SCENARIOS / f"{spec}.yaml" if spec in scenario_names() else Path(spec)
    if not path.suffix:
        raise ConfigError(
            f"no scenario {spec!r}: give a YAML file or one of {', '.join(scenario_names())}"
        )
    scenario = parse_as(Scenario, read_yaml(path), str(path), "scenario")
    return scenario, Profiles(scenario, path.parent)


def _profile(spec: str, base: Path | None) -> Profile:
    if base is not None and Path(spec).suffix in (".yaml", ".yml"):
        return find_profile(str(base / spec))
    return find_profile(spec)


def _require_same_kv(what: str, one: Profile, other: Profile) -> None:
    """Two sites exchange KV only if it is the same KV."""
    for field in ("token_bytes", "state_bytes"):
        mine, theirs = getattr(one.model, field), getattr(other.model, field)
        if mine != theirs:
            raise ConfigError(
                f"{what}: profile {one.name} has model.{field} of {mine}, {other.name} of "
                f"{theirs}: they are not the same model"
            )
