"""All prefill instances an agent may dial, found by the names it knows them by."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prfaas.errors import ConfigError, InvalidRequest
from prfaas.settings import AgentPeer, InstanceAddress
from prfaas.telemetry import LinkInfo
from prfaas.transfer import PlanStep
from remote_prefill.link_options import LinkOptions, LocalEngine
from remote_prefill.peer_link import PeerLink, endpoint_of

log = logging.getLogger(__name__)

LEAVE_LOOK_S = 0.1
"""Between two looks whether the sessions of an instance that leaves have ended."""

_Name = tuple[str, str]
"""Peer and instance."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """All that is known of one instance; `peer` without its instances."""

    peer: AgentPeer
    instance: InstanceAddress


class PeerPool:
    """Owns a link to every known instance, and to those that are leaving; `close` ends them. Needs
    a running loop.
    """

    def __init__(self, peers: Iterable[AgentPeer], options: LinkOptions) -> None:
        """Raises ConfigError for an instance that is there twice or must not be dialled."""
        self._options = options
        self._local: LocalEngine | None = None
        self._known: dict[_Name, _Entry] = {}
        self._links: dict[_Name, PeerLink] = {}
        self._leaving: dict[asyncio.Task[None], PeerLink] = {}
        self._take(_entries(peers, options))

    async def change(self, peers: Iterable[AgentPeer]) -> None:
        """These from now on. Who is gone, or is dialled otherwise, gets no new fetch and is left
        when its last session has ended. Raises ConfigError, and changes nothing, as at the start.
        """
        self._take(_entries(peers, self._options))

    def _take(self, entries: dict[_Name, _Entry]) -> None:
        before = self._links
        self._links = {}
        for name, entry in entries.items():
            link = before.pop(name) if self._known.get(name) == entry else None
            if link is None:
                link = PeerLink(entry.peer, entry.instance, self._options)
                if self._local is not None:
                    link.set_local(self._local)
            self._links[name] = link
        self._known = entries
        for link in before.values():
            task = asyncio.create_task(self._leave(link), name=f"leave {link.name}")
            self._leaving[task] = link
            task.add_done_callback(self._leaving.pop)

    async def _leave(self, link: PeerLink) -> None:
        """Let its sessions end, each of which has a deadline."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._options.limits.transfer_timeout_s):
                while link.ready and len(link.sessions):  # noqa: ASYNC110 - they tell nobody
                    await asyncio.sleep(LEAVE_LOOK_S)
        log.info("left %r", link)
        await link.close()

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
        decoding = {link: link.sessions.decoding for link in self._all()}
        full = sum(decoding.values()) > options.settings.codec_threads
        for link, count in decoding.items():
            link.sessions.look(backlog=full and count > 0)

    def set_local(self, local: LocalEngine | None) -> None:
        """The engine beside this agent has changed."""
        self._local = local
        for link in self._all():
            link.set_local(local)

    async def close(self) -> None:
        links, tasks = self._all(), list(self._leaving)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(link.close() for link in links))

    def _all(self) -> list[PeerLink]:
        return [*self._links.values(), *self._leaving.values()]


def _entries(peers: Iterable[AgentPeer], options: LinkOptions) -> dict[_Name, _Entry]:
    """Every instance by its name. Raises ConfigError."""
    found: dict[_Name, _Entry] = {}
    for peer in peers:
        alone = peer.model_copy(update={"instances": ()})
        for instance in peer.instances:
            name = (peer.name, instance.name)
            if name in found:
                raise ConfigError(f"agent.peers: {name[0]}/{name[1]} is there twice")
            endpoint_of(peer, instance, options)
            found[name] = _Entry(alone, instance)
    return found
