"""The file of a fleet: how many of what, over which links, and what is to go wrong when."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from prfaas.errors import ConfigError
from prfaas.yaml_text import parse_yaml

Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,39}$")]
Overrides = dict[str, Any]
"""Settings of one section (docs/configuration.md), over the defaults and what the fleet sets."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FleetLink(_Part):
    """The emulated line to a peer, shared by all its instances and engines."""

    mbit_s: float = Field(0.0, ge=0, description="Megabits a second each way; 0: no limit.")
    rtt_ms: float = Field(0.0, ge=0, description="Round trip in milliseconds.")


class FleetEngines(_Part):
    """Decode engines, each with its agent: `d-0`, `d-1`, ..."""

    count: int = Field(ge=1, le=64, description="How many.")
    engine: Overrides = Field(default_factory=dict, description="Settings of each engine.")
    agent: Overrides = Field(default_factory=dict, description="Settings of each agent.")


class FleetPeer(_Part):
    """A peer with its prefill instances: `NAME/p-0`, `NAME/p-1`, ..."""

    name: Name
    instances: int = Field(1, ge=1, le=64, description="How many.")
    engine: Overrides = Field(default_factory=dict, description="Settings of each engine.")
    prefill: Overrides = Field(default_factory=dict, description="Settings of each agent.")
    link: FleetLink = Field(FleetLink(), description="The line to it.")
    link_class: Literal["lan", "wan"] = Field("wan", description="Class of that line.")


_RUNS, _PAUSED, _ENDED = "runs", "is paused", "has ended"
_AFTER = {
    ("kill", _RUNS): _ENDED,
    ("kill", _PAUSED): _ENDED,
    ("drain", _RUNS): _ENDED,
    ("start", _ENDED): _RUNS,
    ("pause", _RUNS): _PAUSED,
    ("resume", _PAUSED): _RUNS,
}
"""How a process stands after a fault that fits how it stood."""


class FleetFault(_Part):
    """One thing that goes wrong, or is mended, `at_s` after everything is ready."""

    at_s: float = Field(ge=0, description="Seconds after the fleet was ready.")
    do: Literal["kill", "drain", "start", "pause", "resume", "link"]
    what: str = Field(description="A process (`d-0-agent`, `fra-p-1-engine`, ...), or a peer.")
    link: FleetLink | None = Field(None, description="With `do: link`: what its line is from then.")
    drop: bool = Field(False, description="With `do: link`: reset its connections too.")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (self.do == "link") != (self.link is not None or self.drop):
            raise ValueError("`link` or `drop` go with `do: link`, and only with it")
        return self


class Fleet(_Part):
    """`prfaas up --fleet FILE`."""

    fleet_version: Literal[1]
    model: str = Field(description="Name served to clients.")
    gateways: int = Field(1, ge=1, le=16, description="How many.")
    gateway: Overrides = Field(default_factory=dict, description="Settings of each gateway.")
    limits: Overrides = Field(default_factory=dict, description="Limits of all processes.")
    engines: FleetEngines
    peers: tuple[FleetPeer, ...] = ()
    faults: tuple[FleetFault, ...] = ()

    @model_validator(mode="after")
    def _names(self) -> Self:
        names = [peer.name for peer in self.peers]
        if len(set(names)) != len(names):
            raise ValueError("peers: names must be unique")
        processes = set(self.process_names)
        for fault in self.faults:
            known = names if fault.do == "link" else processes
            if fault.what not in known:
                raise ValueError(
                    f"faults: {fault.what!r} is none of {', '.join(sorted(known)) or 'nothing'}"
                )
        return self

    @model_validator(mode="after")
    def _faults_fit(self) -> Self:
        """Each other, so that nobody waits for a fleet to find out."""
        stands: dict[str, str] = {}
        for fault in sorted(self.faults, key=lambda each: each.at_s):
            if fault.do == "link":
                continue
            now = stands.get(fault.what, _RUNS)
            after = _AFTER.get((fault.do, now))
            if after is None:
                raise ValueError(f"faults: {fault.do} {fault.what} at {fault.at_s:g} s: it {now}")
            stands[fault.what] = after
        return self

    @property
    def process_names(self) -> tuple[str, ...]:
        """In the order in which they start."""
        prefill = [
            f"{peer.name}-p-{at}-{part}"
            for peer in self.peers
            for at in range(peer.instances)
            for part in ("engine", "agent")
        ]
        decode = [
            f"d-{at}-{part}" for at in range(self.engines.count) for part in ("agent", "engine")
        ]
        return (*prefill, *decode, *(f"gateway-{at}" for at in range(self.gateways)))


def read_fleet(file: Path) -> Fleet:
    """Raises ConfigError naming the file and the key."""
    try:
        return Fleet.model_validate(parse_yaml(file.read_bytes(), file) or {})
    except OSError as exc:
        raise ConfigError(f"{file}: {exc.strerror}", field=str(file)) from exc
    except ValidationError as exc:
        first = exc.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "fleet"
        raise ConfigError(f"{file}: {key}: {first['msg']}", field=key) from exc
