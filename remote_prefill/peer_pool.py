"""All prefill instances an agent may dial, found by the names of its own configuration."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator

from prfaas.errors import ConfigError, InvalidRequest
from prfaas.settings import AgentPeer
from prfaas.telemetry import LinkInfo
from prfaas.transfer import PlanStep
from remote_prefill.link_options import LinkOptions, LocalEngine
from remote_prefill.peer_link import PeerLink


class PeerPool:
    """Owns a link to every configured instance; `close` ends them. Needs a running loop."""

    def __init__(self, peers: Iterable[AgentPeer], options: LinkOptions) -> None:
        pairs = [(peer, instance) for peer in peers for instance in peer.instances]
        names = [(peer.name, instance.name) for peer, instance in pairs]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ConfigError(f"agent.peers: {twice[0]}/{twice[1]} is there twice")
        self._options = options
        self._links = {
            name: PeerLink(peer, instance, options)
            for name, (peer, instance) in zip(names, pairs, strict=True)
        }

    def __iter__(self) -> Iterator[PeerLink]:
        return iter(self._links.values())

    def find(self, plan: Iterable[PlanStep]) -> list[PeerLink]:
        """Links of a plan in its order, each once. Raises InvalidRequest naming an unknown one."""
        found: dict[tuple[str, str], PeerLink] = {}
        for step in plan:
            key = (step.peer, step.instance)
            link = self._links.get(key)
            if link is None:
                raise InvalidRequest(
                    f"{step.peer}/{step.instance} is not one of this agent's instances",
                    param="kv_transfer_params.plan",
                )
            found[key] = link
        return list(found.values())

    @property
    def ready_count(self) -> int:
        return sum(link.ready for link in self._links.values())

    def links(self) -> tuple[LinkInfo, ...]:
        """All links as the Watch feed shows them."""
        return tuple(link.info() for link in self._links.values())

    def look(self) -> None:
        """Called each LOOK_S: let every link take note of how things stand."""
        options = self._options
        if options.load is not None:
            options.load.look()
        decoding = {link: link.sessions.decoding for link in self._links.values()}
        full = sum(decoding.values()) > options.settings.codec_threads
        for link, count in decoding.items():
            link.sessions.look(backlog=full and count > 0)

    def set_local(self, local: LocalEngine | None) -> None:
        """The engine beside this agent has changed."""
        for link in self._links.values():
            link.set_local(local)

    async def close(self) -> None:
        await asyncio.gather(*(link.close() for link in self._links.values()))
