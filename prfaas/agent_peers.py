"""Prefill instances as an agent's file lists them and as DNS names stand for them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import Field, ValidationError

from prfaas.discovery_settings import DnsAgentPeers
from prfaas.dns_names import Names, authority, told_apart
from prfaas.errors import ConfigError
from prfaas.following import read_mapping
from prfaas.section import Section
from prfaas.settings import AgentPeer, InstanceAddress, validation_message


@dataclass(frozen=True, slots=True)
class Peers:
    """What one source lists."""

    peers: tuple[AgentPeer, ...] = ()

    def __str__(self) -> str:
        return f"{self.instances} prefill instances"

    @property
    def instances(self) -> int:
        return sum(len(peer.instances) for peer in self.peers)


class _File(Section):
    """The list as in the configuration."""

    peers: tuple[AgentPeer, ...] = Field(())


def read_peers(file: Path) -> Peers:
    """YAML or JSON with `peers`. Raises ConfigError naming file and key."""
    try:
        return Peers(_File.model_validate(read_mapping(file, "peers")).peers)
    except ValidationError as exc:
        raise ConfigError(f"{file}: {validation_message(exc)}") from exc


async def find_peers(names: Names, asked: DnsAgentPeers, tls: bool) -> tuple[Peers, float]:
    """The instances that the name of a service stands for, and for how long. Raises
    PeerUnavailable.
    """
    hosts, ttl_s = await names.services(asked.name)
    instances = tuple(
        InstanceAddress(
            name=label,
            address=authority(host.address, host.port),
            tls_name=(asked.tls_name or host.name) if tls else None,
        )
        for label, host in told_apart(hosts)
    )
    peer = AgentPeer(
        name=asked.peer,
        link_class=asked.link_class,
        channels=asked.channels,
        instances=instances,
    )
    return Peers((peer,)), ttl_s
