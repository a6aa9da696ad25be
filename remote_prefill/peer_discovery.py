"""Which instances an agent may dial: those listed, in a file that changes, behind DNS names."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

from prfaas.agent_peers import Peers, find_peers, read_peers
from prfaas.dns_names import Names
from prfaas.following import FollowEvents, Following
from prfaas.settings import AgentPeer, AgentSettings

Change = Callable[[tuple[AgentPeer, ...]], Awaitable[None]]


class PeerDiscovery:
    """Owns what is known of peers. `run` follows their sources until it is cancelled."""

    def __init__(
        self, settings: AgentSettings, timeout_s: float, change: Change, events: FollowEvents[Peers]
    ) -> None:
        """`change` takes all peers, or refuses them with ConfigError. Raises ConfigError for a file
        that is no good at the start, and a DNS server that is no address.
        """
        chosen = settings.discovery
        self._change = change
        finds: dict[str, Callable[[], Awaitable[tuple[Peers, float]]]] = {}
        if chosen.peers:
            names = Names(chosen.dns_server, timeout_s, "agent.discovery")
            tls = settings.tls is not None
            for each in chosen.peers:
                finds[each.name] = partial(find_peers, names, each, tls)
        self._following: Following[Peers] = Following(
            Peers(settings.peers),
            chosen.file,
            read_peers,
            finds,
            chosen.interval_s,
            self._take,
            events,
        )

    @property
    def peers(self) -> tuple[AgentPeer, ...]:
        """All that is known now."""
        return _all_of(self._following.parts)

    @property
    def follows(self) -> bool:
        """There is something that may change."""
        return self._following.follows

    async def run(self) -> None:
        """Follow all sources until cancelled."""
        await self._following.run()

    async def _take(self, parts: tuple[Peers, ...]) -> None:
        await self._change(_all_of(parts))


def _all_of(parts: tuple[Peers, ...]) -> tuple[AgentPeer, ...]:
    return tuple(peer for part in parts for peer in part.peers)
