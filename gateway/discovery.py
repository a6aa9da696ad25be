"""Which engines and peers belong: listed ones, those of a file that changes, of DNS names."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from gateway.dns_members import find_engines, find_peers
from gateway.member_file import read_members
from gateway.members import Members, merged, require_key
from prfaas.dns_names import Names
from prfaas.errors import ConfigError
from prfaas.following import FollowEvents, Following
from prfaas.limits import Limits
from prfaas.settings import GatewaySettings

Apply = Callable[[Members], Awaitable[None]]
Find = Callable[[], Awaitable[tuple[Members, float]]]


class Discovery:
    """Owns what is known of engines and peers. `run` follows their sources until it is cancelled.

    A change that leaves no engine is refused.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        limits: Limits,
        apply: Apply,
        events: FollowEvents[Members],
        kept: Path | None = None,
    ) -> None:
        """`kept`: where the file's last good text is for who comes after this process. Raises
        ConfigError for a file that is no good at the start and was not before, and a DNS server
        that is no address.
        """
        chosen = settings.discovery
        self._settings = settings
        self._apply = apply
        finds: dict[str, Find] = {}
        if chosen.engines or chosen.peers:
            names = Names(chosen.dns_server, limits.control_timeout_s)
            tls = settings.tls is not None
            for engines in chosen.engines:
                finds[engines.name] = partial(find_engines, names, engines, tls)
            for peers in chosen.peers:
                finds[peers.name] = partial(find_peers, names, peers, tls)
        self._following: Following[Members] = Following(
            Members(settings.engines, settings.peers),
            chosen.file,
            read_members,
            finds,
            chosen.interval_s,
            self._take,
            events,
            kept,
            self._check,
        )
        self.members = merged(self._following.parts)

    @property
    def follows(self) -> bool:
        """There is something that may change."""
        return self._following.follows

    async def run(self) -> None:
        """Follow all sources until cancelled."""
        await self._following.run()

    def _check(self, parts: tuple[Members, ...]) -> None:
        """Raises ConfigError for what `_take` would refuse, so far as it is known at the start."""
        members = merged(parts)
        if not members.engines and not self._settings.discovery.engines:
            raise ConfigError("no engine would be left")
        require_key(self._settings, bool(members.peers))

    async def _take(self, parts: tuple[Members, ...]) -> None:
        members = merged(parts)
        if not members.engines:
            raise ConfigError("no engine would be left")
        require_key(self._settings, bool(members.peers))
        await self._apply(members)
        self.members = members
