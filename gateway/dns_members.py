"""Engines and prefill instances behind DNS names, as the gateway lists them."""

from __future__ import annotations

from gateway.members import Members
from prfaas.discovery_settings import DnsEngines, DnsPeers
from prfaas.dns_names import Names, authority, told_apart
from prfaas.settings import EngineEndpoint, PeerEndpoint


async def find_engines(names: Names, asked: DnsEngines, tls: bool) -> tuple[Members, float]:
    """The engines that a name stands for, and for how long. Raises PeerUnavailable."""
    if asked.kind == "service":
        hosts, ttl_s = await names.services(asked.name)
    else:
        hosts, ttl_s = await names.addresses(asked.name, asked.port)
    engines = tuple(
        EngineEndpoint(
            name=label,
            url=f"http://{authority(host.address, host.port)}",
            agent=authority(host.address, asked.agent_port) if asked.agent_port else None,
            tls_name=(asked.tls_name or host.name) if tls and asked.agent_port else None,
            api_key=asked.api_key,
            apis=asked.apis,
            max_running=asked.max_running,
        )
        for label, host in told_apart(hosts)
    )
    return Members(engines), ttl_s


async def find_peers(names: Names, asked: DnsPeers, tls: bool) -> tuple[Members, float]:
    """The instances that the name of a service stands for. Raises PeerUnavailable."""
    hosts, ttl_s = await names.services(asked.name)
    peers = tuple(
        PeerEndpoint(
            peer=asked.peer,
            instance=label,
            watch=authority(host.address, host.port),
            tls_name=(asked.tls_name or host.name) if tls else None,
            link_class=asked.link_class,
        )
        for label, host in told_apart(hosts)
    )
    return Members((), peers), ttl_s
