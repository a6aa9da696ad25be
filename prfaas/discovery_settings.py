"""Settings of what is found while it runs: engines and peers of a gateway, peers of an agent."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr

from prfaas.section import Section

PassedApiName = Literal["responses", "embeddings", "tokenize", "detokenize"]


class DnsEngines(Section):
    """Decode engines behind a DNS name."""

    name: str = Field(description="DNS name.")
    kind: Literal["address", "service"] = Field(
        "address",
        description="`address`: each A or AAAA record is an engine, at `port`; `service`: each SRV "
        "record of the best priority is one, named after its target.",
    )
    port: int = Field(8000, ge=1, le=65535, description="Port of `address` records' servers.")
    agent_port: int | None = Field(
        None, ge=1, le=65535, description="Watch port of their agents; none: they never offload."
    )
    tls_name: str | None = Field(
        None, description="Name their agents' certificates must carry; none: the DNS name."
    )
    api_key: SecretStr | None = Field(
        None,
        description="Sent to them as `Authorization: Bearer ...`; none: they get what the client "
        "sent, or nothing where that is a tenant's key.",
    )
    apis: tuple[PassedApiName, ...] | None = Field(
        None, description="What they have beyond chat and completions; none: they are asked."
    )
    max_running: int | None = Field(
        None,
        ge=1,
        description="Sequences that each decodes at once, where no agent says it; none: 256.",
    )


class DnsPeers(Section):
    """Prefill instances behind the SRV name of their Watch ports."""

    name: str = Field(description="SRV name; an instance is called by the first label of a target.")
    peer: str = Field(description="Peer (prefill cluster) name, as agents know it.")
    tls_name: str | None = Field(
        None, description="Name their certificates must carry; none: the target."
    )
    link_class: Literal["lan", "wan"] = Field("wan", description="Class of the link to them.")


class DiscoverySettings(Section):
    """Engines and peers that are found, besides those that are listed (docs/discovery.md)."""

    file: Path | None = Field(
        None,
        description="YAML file with `engines` and `peers` as in `gateway`, read again when it "
        "changes.",
    )
    engines: tuple[DnsEngines, ...] = Field((), description="DNS names of decode engines.")
    peers: tuple[DnsPeers, ...] = Field((), description="DNS names of prefill instances.")
    interval_s: float = Field(
        10.0, gt=0, description="A name is asked for again after so long, or its TTL if shorter."
    )
    dns_server: str = Field(
        "", description="`host:port` of the DNS server, an IP address; none: the system's."
    )


class DnsAgentPeers(Section):
    """Prefill instances behind the SRV name of their service."""

    name: str = Field(description="SRV name; an instance is called by the first label of a target.")
    peer: str = Field(description="Peer (prefill cluster) name, as gateways know it.")
    tls_name: str | None = Field(
        None, description="Name their certificates must carry; none: the target."
    )
    link_class: Literal["lan", "wan"] = Field("wan", description="Class of the link to them.")
    channels: int = Field(4, ge=1, le=64, description="Warm data channels to each of them.")


class AgentDiscoverySettings(Section):
    """Peers that an agent finds, besides those that are listed (docs/discovery.md)."""

    file: Path | None = Field(
        None, description="YAML file with `peers` as in `agent`, read again when it changes."
    )
    peers: tuple[DnsAgentPeers, ...] = Field((), description="DNS names of prefill instances.")
    interval_s: float = Field(
        10.0, gt=0, description="A name is asked for again after so long, or its TTL if shorter."
    )
    dns_server: str = Field(
        "", description="`host:port` of the DNS server, an IP address; none: the system's."
    )
