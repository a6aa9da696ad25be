"""Which engines and peers belong to a gateway, wherever that was learnt, and what must hold."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from prfaas.errors import ConfigError
from prfaas.settings import EngineEndpoint, GatewaySettings, PeerEndpoint

MAX_MEMBERS = 1024
"""Engines and instances; a source that finds more is wrong."""


@dataclass(frozen=True, slots=True)
class Members:
    """Engines and prefill instances."""

    engines: tuple[EngineEndpoint, ...] = ()
    peers: tuple[PeerEndpoint, ...] = ()

    def __len__(self) -> int:
        return len(self.engines) + len(self.peers)

    def __str__(self) -> str:
        return f"{len(self.engines)} engines and {len(self.peers)} prefill instances"


def merged(parts: Iterable[Members]) -> Members:
    """All of them together. Raises ConfigError where names occur twice, or there are too many."""
    listed = list(parts)
    found = Members(
        tuple(engine for part in listed for engine in part.engines),
        tuple(peer for part in listed for peer in part.peers),
    )
    names = [engine.name for engine in found.engines]
    places = [f"{peer.peer}/{peer.instance}" for peer in found.peers]
    for key, taken in (("engines", names), ("peers", names + places)):
        twice = sorted({name for name in taken if taken.count(name) > 1})
        if twice:
            raise ConfigError(
                f"gateway.{key}: names must be unique, not {', '.join(twice[:5])} twice",
                field=f"gateway.{key}",
            )
    if len(found) > MAX_MEMBERS:
        raise ConfigError(f"{len(found)} engines and instances; at most {MAX_MEMBERS}")
    return found


def require_key(settings: GatewaySettings, peers: bool) -> None:
    """Offloading to `peers` needs the key that signs transfers. Raises ConfigError without it."""
    if peers and settings.offload and not settings.transfer_key.get_secret_value():
        raise ConfigError(
            "gateway.transfer_key: offloading to peers needs the key that signs transfers",
            field="gateway.transfer_key",
        )
