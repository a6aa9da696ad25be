"""Late binding: a request that waits at one site moves to another that stands idle."""

from __future__ import annotations

from collections.abc import Callable

from policies.simulator.events import EventLoop
from policies.simulator.job import Job
from policies.simulator.local import Local
from policies.simulator.peer import PeerSite
from policies.simulator.pool import PrefillPool
from prfaas.late_binding import FLOW_PRICE, LINK_PRICE, LOOKED_AT, MOST_MOVES


class LateBinding:
    """Watches the queues of D and its peers; owns nothing, nothing to close.

    What D and a peer know of each other is half a round trip old, and so is a request to move: one
    that an idle peer takes from D reaches it a round trip after it became idle, one that idle D
    takes back from a peer comes a round trip after D asked. A request that has begun stays.
    """

    def __init__(
        self,
        loop: EventLoop,
        local: Local,
        peers: dict[str, PeerSite],
        gain_s: float,
        to_peer: Callable[[Job, str, str], bool],
        to_local: Callable[[Job], None],
    ) -> None:
        self._loop, self._local, self._peers = loop, local, peers
        self._gain_s = gain_s
        self._to_peer, self._to_local = to_peer, to_local
        self._asked = dict.fromkeys(peers, 0)
        """What was asked of each peer and not answered: D's idle nodes are promised once."""
        self._offers: set[tuple[str, str]] = set()
        """Places that have an offer to take something under way."""
        local.watch(self._local_changed)
        for name, site in peers.items():
            for instance in site.places:
                site.places[instance].pool.watcher = self._peer_watcher(name, instance)

    def _peer_watcher(self, peer: str, instance: str) -> Callable[[], None]:
        return lambda: self._peer_changed(peer, instance)

    def _local_changed(self) -> None:
        """D became idle, or something has to wait there."""
        if self._local.free():
            for name in self._peers:
                self._ask(name, 0.0)
        else:
            for name, site in self._peers.items():
                for instance, place in site.places.items():
                    if place.pool.free:
                        self._offer(name, instance, 0.0)

    def _peer_changed(self, peer: str, instance: str) -> None:
        """An instance became idle, or something has to wait there; D hears of it a little later."""
        half_s = self._half_s(peer)
        if self._peers[peer].places[instance].pool.free:
            self._offer(peer, instance, half_s)
        else:
            self._ask(peer, half_s)

    # --- an idle peer takes from D ----------------------------------------------------------------

    def _offer(self, peer: str, instance: str, after_s: float) -> None:
        if (peer, instance) not in self._offers:
            self._offers.add((peer, instance))
            self._loop.at(self._loop.now + after_s, self._take_from_local, (peer, instance))

    def _take_from_local(self, what: tuple[str, str]) -> None:
        self._offers.discard(what)
        peer, instance = what
        site = self._peers[peer]
        pool = site.places[instance].pool
        free = pool.free
        if not free or not site.up or not site.heard or site.link.bytes_per_s <= 0:
            return
        waiting = self._may_move(self._local.waiting(LOOKED_AT))
        while waiting and free > 0:
            best = self._best_to_peer(waiting, site)
            if best is None or not self._to_peer(best, peer, instance):
                return
            waiting.remove(best)
            free -= 1

    @staticmethod
    def _may_move(waiting: list[Job]) -> list[Job]:
        """Neither tried in vain already, nor sent to and fro."""
        return [job for job in waiting if job.moves < MOST_MOVES and not job.fallback]

    def _best_to_peer(self, waiting: list[Job], site: PeerSite) -> Job | None:
        best: Job | None = None
        best_gain_s = self._gain_s
        waits = waits_s(waiting, self._local.ahead_s(), self._local_s, self._nodes())
        price = LINK_PRICE + self._flow_price(site)
        for job, wait_s in zip(waiting, waits, strict=True):
            here_s = wait_s + self._local_s(job)
            there_s = self._remote_s(job, site, 0.0) + price * self._link_s(job, site)
            if here_s - there_s > best_gain_s:
                best, best_gain_s = job, here_s - there_s
        return best

    # --- idle D takes back from a peer ------------------------------------------------------------

    def _ask(self, peer: str, after_s: float) -> None:
        site = self._peers[peer]
        promised = sum(self._asked.values())
        if self._local.free() <= promised or not any(p.pool.queued for p in site.places.values()):
            return
        self._asked[peer] += 1
        self._loop.at(self._loop.now + after_s + self._half_s(peer), self._take_from_peer, peer)

    def _take_from_peer(self, peer: str) -> None:
        self._asked[peer] -= 1
        site = self._peers[peer]
        if not site.up or self._local.free() <= 0:
            return
        half_s = self._half_s(peer)
        best: tuple[Job, PrefillPool] | None = None
        best_gain_s = self._gain_s
        price = self._flow_price(site)
        for place in site.places.values():
            waiting = self._may_move(place.pool.waiting(LOOKED_AT))
            pool = place.pool
            waits = waits_s(waiting, pool.ahead_s(), pool.seconds_of, pool.instances)
            for job, wait_s in zip(waiting, waits, strict=True):
                here_s = self._remote_s(job, site, wait_s) - 2 * half_s
                here_s += price * self._link_s(job, site)
                there_s = half_s + self._local_s(job)
                if here_s - there_s > best_gain_s:
                    best, best_gain_s = (job, pool), here_s - there_s
        if best is None:
            return
        job, pool = best
        pool.take(job)
        site.give_up(job)
        self._asked[peer] += 1  # it is on its way to a node of D
        self._loop.at(self._loop.now + half_s, self._back, (peer, job))

    def _back(self, what: tuple[str, Job]) -> None:
        peer, job = what
        self._asked[peer] -= 1
        self._to_local(job)

    # --- estimates --------------------------------------------------------------------------------

    def _half_s(self, peer: str) -> float:
        return self._peers[peer].spec.link.rtt_ms / 2e3

    def _nodes(self) -> int:
        return max(1, self._local.nodes()[0])

    def _local_s(self, job: Job) -> float:
        uncached = max(1, job.uncached_d)
        return self._local.profile.prefill_s(uncached, max(0, job.want - uncached))

    @staticmethod
    def _flow_price(site: PeerSite) -> float:
        return FLOW_PRICE * len(site.link.flows())

    @staticmethod
    def _link_s(job: Job, site: PeerSite) -> float:
        """Seconds that its KV takes alone on a link that is up."""
        return site.wire_bytes(max(1, job.uncached_d)) / max(site.link.bytes_per_s, 1e-9)

    def _remote_s(self, job: Job, site: PeerSite, wait_s: float) -> float:
        """From now to its KV at D, if it starts at the peer after `wait_s`."""
        link = site.link
        if link.bytes_per_s <= 0:
            return float("inf")
        lacking = max(1, job.uncached_d)
        own_s = self._link_s(job, site)
        compute_s = site.profile.prefill_s(lacking, max(0, job.want - lacking))
        state_s = site.profile.model.state_bytes / link.bytes_per_s
        ahead_s = link.to_come() / link.bytes_per_s
        return 2 * self._half_s(site.spec.name) + max(
            wait_s + compute_s + state_s, max(wait_s, ahead_s) + own_s
        )


def waits_s(
    waiting: list[Job], ahead_s: float, seconds: Callable[[Job], float], instances: int
) -> list[float]:
    """Seconds until each of `waiting` starts, in order, behind `ahead_s` of instance time."""
    found = []
    for job in waiting:
        found.append(ahead_s / instances)
        ahead_s += seconds(job)
    return found
