"""What one Watch event says, in our own types: load, prefix-cache changes, links, outcomes.

An agent speaks for one engine. The first event of a stream is `full` and lists everything; later
ones carry what changed and come at most `watch_interval_s` apart, empty if need be: an event means
that all it does not mention is still as last told. `seq` grows by one from event to event.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from prfaas.hashing import BlockHash
from prfaas.snapshot import UNKNOWN_CURVE, Outcome, PrefillCurve


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """State of the engine beside the agent; `ready` is False while it is not connected."""

    name: str
    ready: bool = False
    draining: bool = False
    queue_tokens: int = 0
    waiting: int = 0
    running: int = 0
    context_tokens: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    decode_step_s: float = 0.0
    curve: PrefillCurve = UNKNOWN_CURVE
    model: str = ""
    block_tokens: int = 0
    token_bytes: int = 0
    epoch: str = ""
    paced: bool = False
    free_staging_bytes: int = 0
    """D's agent: bytes that new sessions may still reserve in staging."""
    free_retention_bytes: int = 0
    """P's agent: bytes that new sessions may still reserve in retention."""
    roles: tuple[str, ...] = ()
    waiting_kv: int = 0
    """Of `waiting`: whose KV is brought to it, which waits for nothing to be computed."""
    max_running: int = 0
    """Sequences that it decodes at once; 0: it does not say."""


@dataclass(frozen=True, slots=True)
class KvDelta:
    """Changes of the engine's prefix cache; `cleared` empties the index before `stored` applies.

    A full event has one (cleared, with all hashes, possibly none) for an engine that publishes
    cache events, and none for an engine that does not: then its cache counts as unknown.
    """

    engine: str
    epoch: str
    cleared: bool = False
    stored: tuple[BlockHash, ...] = ()
    removed: tuple[BlockHash, ...] = ()


class LinkLimit(enum.StrEnum):
    """What keeps KV from moving faster over a link, as one of its ends judges it."""

    IDLE = "idle"
    """No session is open."""
    SENDER = "sender"
    """P has computed or encoded no more yet: the link keeps up with it."""
    RECEIVER = "receiver"
    """D's agent takes and decodes less than could come."""
    LINK = "link"
    """What lies between the two agents, the hosts' kernels included."""


@dataclass(frozen=True, slots=True)
class LinkInfo:
    """One link as one of its ends measures it, `age_s` ago. Zero goodput: not measured yet.

    `peer` and `instance` name P in both views; `agent` is empty in the view of D's agent.
    """

    peer: str
    instance: str
    link_class: str = "wan"
    ready: bool = False
    """Paired, probed and reachable."""
    detail: str = ""
    goodput_bytes_per_s: float = 0.0
    rtt_s: float = 0.0
    in_flight_bytes: int = 0
    wire_ratio: float = 1.0
    age_s: float = 0.0
    sessions: int = 0
    goodput_age_s: float = 0.0
    """Since the goodput was measured; `age_s` says how long ago the other end was last heard."""
    agent: str = ""
    """In P's view: the D agent at the other end."""
    limit: LinkLimit | None = None
    """None: this agent does not say."""
    rate_bytes_per_s: float = 0.0
    """What moves now, whoever is the slow part; goodput is what the link can carry."""
    queueing_s: float = 0.0
    """Of the round trip: what is over the shortest of the last minutes."""
    stalled_s: float = 0.0
    """So long nothing has moved, although bytes are under way; 0 below a second."""
    stalls: int = 0
    """How often that has been so since the agent started."""
    retransmitted_bytes: int | None = None
    """By the sender's kernel since the link began; None: cannot be known here."""
    under_way_bytes: int = 0
    """In P's view: handed to the transport and not verified by D."""
    held_bytes: int = 0
    """At D: received and not verified."""
    free_staging_bytes: int = 0
    """At D, as it told P."""


@dataclass(frozen=True, slots=True)
class WatchUpdate:
    """One Watch event. `started`: transfer ids that are in the load from this event on."""

    seq: int
    full: bool
    agent: str = ""
    engines: tuple[EngineInfo, ...] = ()
    kv: tuple[KvDelta, ...] = ()
    links: tuple[LinkInfo, ...] = ()
    outcomes: tuple[Outcome, ...] = ()
    started: tuple[str, ...] = ()
