"""What the gateway knows of all engines: feeds with their ages, the index, what was just sent."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

import msgspec

from gateway.breakers import Breakers
from gateway.neighbours import Neighbours
from gateway.prefix_index import ExactPrefixIndex
from gateway.sent import SentLedger, Unshown
from gateway.tokenise import Chains
from prfaas.clock import SYSTEM_CLOCK, Clock
from prfaas.limits import Limits
from prfaas.settings import EngineEndpoint, GatewaySettings, PeerEndpoint
from prfaas.snapshot import (
    UNKNOWN_CURVE,
    EngineLoad,
    LinkClass,
    LinkState,
    LocalEngine,
    Outcome,
    PrefillCurve,
    RemoteInstance,
    Snapshot,
)
from prfaas.telemetry import EngineInfo, LinkInfo, WatchUpdate

logger = logging.getLogger(__name__)

NEVER = 1e9
"""Age in seconds of what was never heard: decades, and a number that JSON can carry."""

MAX_UNFED = 256
"""Snapshots without any telemetry that are kept to be used again."""

UNCONNECTED = EngineInfo(name="")
UNKNOWN_LOAD = EngineLoad()
_NO_LINK = LinkState(age_s=NEVER)


@dataclass(slots=True)
class Feed:
    """The last word of one agent. `place` is our own name for its engine."""

    place: str
    address: str
    connected: bool = False
    heard_at: float | None = None
    engine: EngineInfo = UNCONNECTED
    load: EngineLoad = UNKNOWN_LOAD
    """As the engine tells it; decisions need it with what was sent since, and its age."""
    curve: PrefillCurve = UNKNOWN_CURVE
    prefills: bool = False
    decodes: bool = False
    """It is ready to."""
    agent: str = ""
    """As the agent calls itself."""
    links: dict[tuple[str, str], LinkInfo] = field(default_factory=dict)
    """D's view, by peer and instance."""
    link_states: dict[tuple[str, str], LinkState] = field(default_factory=dict)
    """The same as decisions need it, but for what changes from one to the next."""
    served_links: dict[str, LinkInfo] = field(default_factory=dict)
    """P's view, by the D agent at the other end."""
    reconnects: int = 0
    silent_since: float | None = None
    warned_silent: bool = False
    warned_model: str = ""

    def age_s(self, now: float) -> float:
        return NEVER if self.heard_at is None else now - self.heard_at

    def tells(self, info: EngineInfo) -> None:
        """Its engine is so now."""
        self.engine = info
        self.load = EngineLoad(
            queue_tokens=info.queue_tokens,
            # Who waits for KV alone is ahead of nobody who waits for an engine to compute.
            waiting=max(0, info.waiting - info.waiting_kv),
            running=info.running,
            context_tokens=info.context_tokens,
            free_blocks=info.free_blocks,
            total_blocks=info.total_blocks,
            decode_step_s=info.decode_step_s,
            draining=info.draining,
        )
        # A chunk size of 0, which a broken agent may send, is no curve.
        self.curve = info.curve if info.curve.chunk_tokens > 0 else UNKNOWN_CURVE
        self.prefills = info.ready and "prefill" in info.roles
        self.decodes = info.ready and "decode" in info.roles

    def tells_links(self, links: Sequence[LinkInfo]) -> None:
        """All its links are so now."""
        self.links = {(k.peer, k.instance): k for k in links if not k.agent}
        self.link_states = {name: _link_state(link) for name, link in self.links.items()}
        self.served_links = {k.agent: k for k in links if k.agent}


class _Peer(msgspec.Struct, frozen=True):
    """One instance of a peer as decisions need it, each time."""

    name: tuple[str, str]
    """Of the peer, and its own."""
    place: str
    link_class: LinkClass


class ClusterView:
    """Owns feeds, prefix index and the ledger of what was sent; synchronous, nothing to close.

    Watch clients push updates in; a decision takes a frozen Snapshot out.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        limits: Limits,
        clock: Clock = SYSTEM_CLOCK,
        index: ExactPrefixIndex | None = None,
    ) -> None:
        self._limits = limits
        self._clock = clock
        self._model = settings.model
        self.offloads = settings.offload
        self._engines: tuple[EngineEndpoint, ...] = settings.engines
        self._peers: tuple[PeerEndpoint, ...] = settings.peers
        self.index = index or ExactPrefixIndex()
        self.breakers = Breakers(clock)
        self.sent = SentLedger(settle_s=limits.watch_interval_s)
        self.neighbours = Neighbours()
        self.feeds: dict[str, Feed] = {}
        self._unfed_known: dict[tuple[str, int, int, int], Snapshot] = {}
        self._watched: frozenset[str] = frozenset()
        self._remotes: tuple[_Peer, ...] = ()
        self._block_sizes: frozenset[int] = frozenset()
        self.members(settings.engines, settings.peers)

    @property
    def engines(self) -> tuple[EngineEndpoint, ...]:
        return self._engines

    @property
    def peers(self) -> tuple[PeerEndpoint, ...]:
        return self._peers

    @property
    def has_agents(self) -> bool:
        """A request could be offloaded from some engine."""
        return bool(self._watched)

    def members(
        self,
        engines: tuple[EngineEndpoint, ...],
        peers: tuple[PeerEndpoint, ...],
        leaving: tuple[EngineEndpoint, ...] = (),
    ) -> None:
        """Who belongs from now on; nothing is known any more of who does not. `leaving`: engines
        that get nothing new, and whose agents still have something to tell.
        """
        addresses = {e.name: e.agent for e in (*leaving, *engines) if e.agent is not None}
        addresses.update({place_of(peer): peer.watch for peer in peers})
        for place in [p for p, feed in self.feeds.items() if addresses.get(p) != feed.address]:
            del self.feeds[place]
            self.index.drop(place)
        kept = {engine.name for engine in (*leaving, *engines)} | set(addresses)
        self.breakers.keep(kept)
        for place, address in addresses.items():
            if place not in self.feeds:
                self.feeds[place] = Feed(place, address)
        self._engines, self._peers = engines, peers
        self._remotes = tuple(
            _Peer((peer.peer, peer.instance), place_of(peer), LinkClass(peer.link_class))
            for peer in peers
        )
        self._watched = frozenset(e.name for e in (*leaving, *engines) if e.agent is not None)
        self._unfed_known.clear()
        self._note_block_sizes()

    def update(self, place: str, update: WatchUpdate, age_s: float = 0.0) -> tuple[Outcome, ...]:
        """Take in one Watch event of the agent at `place`, heard so long ago; returns the outcomes
        it reports.
        """
        feed, now = self.feeds.get(place), self._clock.now() - age_s
        if feed is None:  # it has just left
            return ()
        feed.connected, feed.heard_at = True, now
        feed.agent = update.agent or feed.agent
        if update.full:
            feed.tells(UNCONNECTED)
        if update.full or update.links:
            paired_before = _paired(feed)
            feed.tells_links(update.links)
            for peer, instance in _paired(feed) - paired_before:
                # The pair has just been probed, with KV that came whole.
                self.breakers.works(place, f"{peer}/{instance}")
        before = feed.engine
        for info in update.engines:
            feed.tells(info)
        self._note_block_sizes()
        self.index.update(place, update)
        is_d = place in self._watched
        if is_d and _load_changed(before, feed.engine):
            self.sent.load_reported(place, now)
        for transfer_id in update.started:
            (self.sent.shown_by_d if is_d else self.sent.shown_by_p)(transfer_id)
        if is_d:
            self._warn_once(feed, now)
        return update.outcomes

    def disconnected(self, place: str) -> None:
        """The stream ended: its data age from here on, and its index cannot be kept up."""
        feed = self.feeds.get(place)
        if feed is None:
            return
        if feed.connected:
            feed.reconnects += 1
        feed.connected = False
        self.index.drop(place)

    def block_sizes(self) -> frozenset[int]:
        """Block sizes of all engines heard of, for which a prompt needs a hash chain."""
        return self._block_sizes

    def served_link(self, engine: str, peer: PeerEndpoint) -> LinkInfo | None:
        """P's view of its link to the agent of `engine`; None while it has not told any."""
        d_feed = self.feeds.get(engine)
        return None if d_feed is None else self.feeds[place_of(peer)].served_links.get(d_feed.agent)

    def cache_known(self, place: str) -> bool:
        feed = self.feeds.get(place)
        return feed is not None and self.index.known(place, feed.engine.epoch)

    def snapshot(self, engine: str, chains: Chains, fallback_free_tokens: int = 0) -> Snapshot:
        """Everything one decision for a request at `engine` may look at, with ages as of now."""
        if not self.feeds:
            return self._unfed(engine, fallback_free_tokens)
        now = self._clock.now()
        d_feed = self.feeds.get(engine)
        return Snapshot(
            local=self._local(engine, chains, now),
            remotes=tuple(
                [self._remote(peer, engine, d_feed, chains, now) for peer in self._remotes]
            ),
            token_bytes=d_feed.engine.token_bytes if d_feed is not None else 0,
            max_age_s=self._limits.watch_stale_s,
            fallback_free_tokens=fallback_free_tokens,
        )

    def local(self, engine: str, chains: Chains) -> LocalEngine:
        """What a snapshot says of `engine` itself, with ages as of now."""
        return self._local(engine, chains, self._clock.now())

    def transfers(self, engine: str) -> int:
        """Requests at `engine`, or on their way there, that wait for KV from a peer."""
        feed = self.feeds.get(engine)
        if feed is None:
            return 0
        return feed.engine.waiting_kv + self._unshown(engine).transfers

    def _note_block_sizes(self) -> None:
        self._block_sizes = frozenset([f.engine.block_tokens for f in self.feeds.values()]) - {0}

    def _unshown(self, place: str) -> Unshown:
        own = self.sent.unshown(place)
        return self.neighbours.unshown(place, own) if self.neighbours.members else own

    def _unfed(self, engine: str, fallback_free_tokens: int) -> Snapshot:
        """Where no agent tells anything, snapshots repeat, and one is made once."""
        unshown = self._unshown(engine)
        key = (engine, unshown.tokens, unshown.requests, fallback_free_tokens)
        known = self._unfed_known.get(key)
        if known is None:
            if len(self._unfed_known) >= MAX_UNFED:
                self._unfed_known.clear()
            local = self._local(engine, {}, 0.0)
            known = Snapshot(
                local, (), 0, self._limits.watch_stale_s, fallback_free_tokens=fallback_free_tokens
            )
            self._unfed_known[key] = known
        return known

    def _local(self, name: str, chains: Chains, now: float) -> LocalEngine:
        feed, unshown = self.feeds.get(name), self._unshown(name)
        if feed is None:  # an OpenAI server without our connector: it is never offloaded from
            load = EngineLoad(sent_tokens=unshown.tokens, sent_requests=unshown.requests)
            return LocalEngine(name, load, UNKNOWN_CURVE, 0, offload_ready=False)
        # Beside us, so where it is not connected its agent is gone: what would be sent to it now,
        # nobody fetches.
        age_s = feed.age_s(now) if feed.connected else NEVER
        free_bytes = feed.engine.free_staging_bytes - unshown.staged_bytes
        return LocalEngine(
            name,
            _load(feed, unshown, age_s),
            feed.curve,
            self._matched(feed, chains),
            free_staging_bytes=free_bytes if free_bytes > 0 else 0,
            offload_ready=feed.decodes,
        )

    def _remote(
        self, peer: _Peer, engine: str, d_feed: Feed | None, chains: Chains, now: float
    ) -> RemoteInstance:
        feed, unshown = self.feeds[peer.place], self._unshown(peer.place)
        link, state = None, _NO_LINK
        if d_feed is not None and (link := d_feed.links.get(peer.name)) is not None:
            state = msgspec.structs.replace(
                d_feed.link_states[peer.name],
                in_flight_bytes=link.in_flight_bytes + unshown.wire_bytes,
                age_s=d_feed.age_s(now) + link.age_s,
            )
        if self.neighbours.members:
            state = self.neighbours.measured(*peer.name, state, now)
        free_bytes = feed.engine.free_retention_bytes - unshown.raw_bytes
        return RemoteInstance(
            *peer.name,
            peer.link_class,
            _load(feed, unshown, feed.age_s(now)),
            feed.curve,
            self._matched(feed, chains),
            state,
            free_retention_bytes=free_bytes if free_bytes > 0 else 0,
            ready=feed.prefills
            and link is not None
            and link.ready
            and self.breakers.allows_remote(engine, peer.place),
        )

    def _matched(self, feed: Feed, chains: Chains) -> int:
        info = feed.engine
        chain = chains.get(info.block_tokens)
        if not chain or not self.index.known(feed.place, info.epoch):
            return 0
        return self.index.match(feed.place, chain) * info.block_tokens

    def _warn_once(self, feed: Feed, now: float) -> None:
        """Say what keeps D's requests from being offloaded, once for each start of the engine."""
        info = feed.engine
        if info.ready and info.model and info.model != self._model != feed.warned_model:
            feed.warned_model = self._model
            logger.warning(
                "engine %s serves model %r, the gateway %r", feed.place, info.model, self._model
            )
        if not info.ready or self.index.known(feed.place, info.epoch):
            feed.silent_since = None
        elif feed.silent_since is None:
            feed.silent_since = now
        elif now - feed.silent_since > self._limits.watch_stale_s and not feed.warned_silent:
            feed.warned_silent = True
            logger.warning(
                "engine %s publishes no cache events: what it has cached is unknown, so nothing "
                "is offloaded (reason no_cache_info)",
                feed.place,
            )


def place_of(peer: PeerEndpoint) -> str:
    return f"{peer.peer}/{peer.instance}"


def _paired(feed: Feed) -> set[tuple[str, str]]:
    """Instances to which its links are ready."""
    return {name for name, link in feed.links.items() if link.ready}


def _load_changed(before: EngineInfo, after: EngineInfo) -> bool:
    """Whether the engine itself has reported since: other fields also change by its agent's doing,
    and an engine deep in a step repeats what it said before."""
    return (
        before.queue_tokens != after.queue_tokens
        or before.waiting != after.waiting
        or before.waiting_kv != after.waiting_kv
        or before.running != after.running
        or before.context_tokens != after.context_tokens
    )


def _load(feed: Feed, unshown: Unshown, age_s: float) -> EngineLoad:
    return msgspec.structs.replace(
        feed.load, sent_tokens=unshown.tokens, sent_requests=unshown.requests, age_s=age_s
    )


def _link_state(link: LinkInfo) -> LinkState:
    return LinkState(
        goodput_bytes_per_s=link.goodput_bytes_per_s,
        rtt_s=link.rtt_s,
        wire_ratio=link.wire_ratio if link.wire_ratio > 0 else 1.0,
    )


def describe(view: ClusterView, fallback_free_tokens: int) -> Mapping[str, object]:
    """The view as plain data for `/prfaas/cluster`: the snapshot of each engine, the fields of the
    first one's, all feeds, and breakers that ever opened.
    """
    snapshots = [view.snapshot(engine.name, {}, fallback_free_tokens) for engine in view.engines]
    first = snapshots[0] if snapshots else view.snapshot("", {}, fallback_free_tokens)
    return {
        **{f.name: getattr(first, f.name) for f in fields(first)},
        "engines": [{"local": each.local, "remotes": each.remotes} for each in snapshots],
        "breakers": [info for info in view.breakers.infos() if info.opened],
        "feeds": [
            {
                "place": feed.place,
                "address": feed.address,
                "connected": feed.connected,
                "reconnects": feed.reconnects,
                "engine": feed.engine,
                "links": list(feed.links.values()),
                "served_links": list(feed.served_links.values()),
                "index_blocks": view.index.blocks(feed.place),
                "cache_known": view.cache_known(feed.place),
            }
            for feed in view.feeds.values()
        ],
        "unshown_requests": len(view.sent),
        "other_gateways": [member.address or member.id for member in view.neighbours.members],
    }
