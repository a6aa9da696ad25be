"""What the other gateways have said of themselves: decisions read it, and it gets old."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from gateway.sent import Unshown
from prfaas.cluster_state import LinkSample, Load, Member, Sent
from prfaas.snapshot import LinkState


class Neighbours:
    """Owns the last word of each; synchronous, nothing to close. Empty where a gateway is alone."""

    def __init__(self) -> None:
        self.members: tuple[Member, ...] = ()
        self._told: dict[str, tuple[int, Mapping[str, Load]]] = {}
        """What each has under way, and the number under which it said so."""
        self._sums: dict[str, Unshown] = {}
        """Of it, by place."""
        self._links: dict[tuple[str, str], LinkSample] = {}
        self._heard_at = 0.0

    def take(self, members: Iterable[Member], own_id: str, now: float) -> None:
        """All that are there now."""
        self.members = tuple(member for member in members if member.id != own_id)
        self._heard_at = now
        before, self._told = self._told, {}
        self._sums = {}
        self._links = {}
        for member in self.members:
            told: tuple[int, Mapping[str, Load]] = (member.sent_seq, member.sent)
            if (known := before.get(member.id)) is not None and known[0] > member.sent_seq:
                told = known  # told since it last wrote what we have read
            self._told[member.id] = told
            self._add(told[1], 1)
            for link in member.links:
                better = self._links.get((link.peer, link.instance))
                if better is None or link.age_s < better.age_s:
                    self._links[link.peer, link.instance] = link

    def take_sent(self, sent: Sent) -> bool:
        """What one of them has told meanwhile; False where it is nothing new."""
        known = self._told.get(sent.member)
        if known is None or known[0] >= sent.seq:
            return False
        self._add(known[1], -1)
        self._add(sent.loads, 1)
        self._told[sent.member] = sent.seq, sent.loads
        return True

    def forget(self) -> None:
        """Too old to be true."""
        self.take((), "", self._heard_at)

    def unshown(self, place: str, own: Unshown) -> Unshown:
        """What this gateway has sent there, and with it what the others have."""
        others = self._sums.get(place)
        if others is None:
            return own
        return Unshown(
            own.tokens + others.tokens,
            own.requests + others.requests,
            own.raw_bytes + others.raw_bytes,
            own.wire_bytes + others.wire_bytes,
            own.transfers + others.transfers,
            own.staged_bytes + others.staged_bytes,
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

    def _add(self, loads: Mapping[str, Load], sign: int) -> None:
        for place, load in loads.items():
            sums = self._sums.setdefault(place, Unshown())
            sums.tokens += sign * load.tokens
            sums.requests += sign * load.requests
            sums.raw_bytes += sign * load.raw_bytes
            sums.wire_bytes += sign * load.wire_bytes
            sums.transfers += sign * load.transfers
            sums.staged_bytes += sign * load.staged_bytes
