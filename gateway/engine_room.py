"""How many requests an engine may have: what is set, or what engines say of themselves."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gateway.cluster_view import ClusterView
from prfaas.clock import Clock
from prfaas.limits import Limits
from prfaas.snapshot import EngineLoad, LinkState, PrefillCurve, Snapshot

UNSAID = 256
"""Sequences that an engine decodes at once where nobody says: what vLLM does by default."""
SPARE_SHARE = 4
"""One more for so many of them, so that none stands empty between two requests."""
LEAST_WAITING = 16
WAITING_SHARE = 2
"""Prompts that may wait in an engine: one for so many sequences, and so many at least."""
KEPT_S = 0.05
"""What was found holds for so long: engines say no more often how they are."""


class EngineRoom:
    """Knows how many requests each engine may have in all; owns what it found last.

    Where nothing is set an engine may have what it decodes at once and a quarter more, and as many
    again that only wait for KV from a peer. It gets no more while many wait in it, whatever for, or
    while a new prompt would wait too long for those ahead of it, at it and at its peers.
    """

    def __init__(self, limits: Limits, view: ClusterView, clock: Clock) -> None:
        self._set = limits.engine_active_requests
        self._queue_s = limits.engine_queue_s
        self._stale_s = limits.watch_stale_s
        self._view = view
        self._now = clock.now
        self._found: dict[str, _Found] = {}

    @property
    def bounds(self) -> bool:
        """False where engines get as many as come."""
        return self._set != 0

    def most(self, engine: str, in_flight: int) -> int:
        """Requests that it may have now, of which `in_flight` are there already."""
        if self._set is not None:
            return self._set
        now = self._now()
        found = self._found.get(engine)
        if found is None or now >= found.until:
            found = self._found[engine] = _Found(self._derived(engine, in_flight), now + KEPT_S)
        return found.most

    def forget(self, engine: str) -> None:
        self._found.pop(engine, None)

    def _derived(self, engine: str, in_flight: int) -> int:
        feed = self._view.feeds.get(engine)
        said = 0 if feed is None else feed.engine.max_running
        slots = said or self._configured(engine) or UNSAID
        most = slots + -(-slots // SPARE_SHARE) + min(slots, self._view.transfers(engine))
        if feed is None or feed.age_s(self._now()) > self._stale_s:
            return most
        snapshot = self._view.snapshot(engine, {})
        if not self._view.offloads:
            snapshot = replace(snapshot, remotes=())
        load = snapshot.local.load
        more = max(LEAST_WAITING, slots // WAITING_SHARE) - load.waiting - load.sent_requests
        if not load.waiting:  # else it cannot use the slots that are free
            more += max(0, slots - load.running)
        if more > 0 and is_full(snapshot, self._queue_s):
            more = 0
        return min(most, in_flight + max(0, more))

    def _configured(self, engine: str) -> int:
        """What its settings say that it decodes at once; 0: nothing."""
        for endpoint in self._view.engines:
            if endpoint.name == engine:
                return endpoint.max_running or 0
        return 0


@dataclass(slots=True)
class _Found:
    most: int
    until: float


def is_full(snapshot: Snapshot, queue_s: float) -> bool:
    """A new prompt would wait for longer than that, at D and at each instance that could take it.

    What is not known is no reason to think so.
    """
    local = snapshot.local
    if _ahead_s(local.load, local.curve) <= queue_s:
        return False
    return not any(
        remote.ready
        and not remote.load.draining
        and remote.load.age_s <= snapshot.max_age_s
        and _ahead_s(remote.load, remote.curve) <= queue_s
        and _link_s(remote.link) <= queue_s
        for remote in snapshot.remotes
    )


def _ahead_s(load: EngineLoad, curve: PrefillCurve) -> float:
    """Until the prompts that wait are computed, with the decode steps between their chunks."""
    tokens = load.queue_tokens + load.sent_tokens
    if not curve.known or tokens <= 0:
        return 0.0
    prompts = max(1, load.waiting + load.sent_requests)
    chunks = -(-tokens // curve.chunk_tokens)
    step_s = load.decode_step_s if load.running else 0.0
    return prompts * curve.seconds(-(-tokens // prompts)) + chunks * step_s


def _link_s(link: LinkState) -> float:
    """Until what is under way has come."""
    if link.goodput_bytes_per_s <= 0:
        return 0.0
    return link.in_flight_bytes / link.goodput_bytes_per_s
