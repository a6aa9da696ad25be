"""What the other gateways have said of themselves: decisions read it, and it gets old."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from gateway.sent import Unshown
from prfaas.cluster_state import LinkSample, Member
from prfaas.snapshot import LinkState


class Neighbours:
    """Owns the last word of each; synchronous, nothing to close. Empty where a gateway is alone."""

    def __init__(self) -> None:
        self.members: tuple[Member, ...] = ()
        self._sent: dict[str, Unshown] = {}
        self._links: dict[tuple[str, str], LinkSample] = {}
        self._heard_at = 0.0

    def take(self, members: Iterable[Member], own_id: str, now: float) -> None:
        """All that are there now."""
        self.members = tuple(member for member in members if member.id != own_id)
        self._heard_at = now
        self._sent = {}
        self._links = {}
        for member in self.members:
            for place, load in member.sent.items():
                known = self._sent.setdefault(place, Unshown())
                known.tokens += load.tokens
                known.requests += load.requests
                known.raw_bytes += load.raw_bytes
                known.wire_bytes += load.wire_bytes
            for link in member.links:
                better = self._links.get((link.peer, link.instance))
                if better is None or link.age_s < better.age_s:
                    self._links[link.peer, link.instance] = link

    def forget(self) -> None:
        """Too old to be true."""
        self.take((), "", self._heard_at)

    def unshown(self, place: str, own: Unshown) -> Unshown:
        """What this gateway has sent there, and with it what the others have."""
        others = self._sent.get(place)
        if others is None:
            return own
        return Unshown(
            own.tokens + others.tokens,
            own.requests + others.requests,
            own.raw_bytes + others.raw_bytes,
            own.wire_bytes + others.wire_bytes,
            own.transfers,
        )

    def measured(self, peer: str, instance: str, state: LinkState, now: float) -> LinkState:
        """A link that nobody has measured for us, as another gateway's engine found it."""
        link = self._links.get((peer, instance))
        if state.goodput_bytes_per_s > 0 or link is None:
            return state
        return replace(
            state,
            goodput_bytes_per_s=link.goodput_bytes_per_s,
            rtt_s=link.rtt_s,
            wire_ratio=link.wire_ratio if link.wire_ratio > 0 else 1.0,
            age_s=link.age_s + now - self._heard_at,
        )
