"""What a policy sees and says: request facts, snapshot of all candidates, decision, outcome."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from prfaas.values import Value


class Target(enum.StrEnum):
    """Where a request's prefill runs."""

    LOCAL = "local"
    REMOTE = "remote"


class LinkClass(enum.StrEnum):
    """`lan`: inside the cluster. `wan`: between clusters."""

    LAN = "lan"
    WAN = "wan"


class Reason(enum.StrEnum):
    """Why a decision went the way it did; one counter label each, never one lump."""

    OFFLOAD_OFF = "offload_off"
    FEATURE = "feature"
    TOO_SHORT = "too_short"
    MOSTLY_CACHED = "mostly_cached"
    NO_CACHE_INFO = "no_cache_info"
    NO_PEER = "no_peer"
    STALE = "stale"
    UNMEASURED = "unmeasured"
    NO_SPACE = "no_space"
    LOCAL_FASTER = "local_faster"
    REMOTE_FASTER = "remote_faster"
    LOCAL_CHEAPER = "local_cheaper"
    REMOTE_CHEAPER = "remote_cheaper"
    BELOW_THRESHOLD = "below_threshold"
    ABOVE_THRESHOLD = "above_threshold"
    BALANCED = "balanced"
    LOCAL_BUSY = "local_busy"
    NO_BUDGET = "no_budget"
    FORCED_LOCAL = "forced_local"
    FORCED_REMOTE = "forced_remote"


@dataclass(frozen=True, slots=True)
class PrefillCurve:
    """Seconds to prefill u uncached tokens after c cached ones: base + u*token + u*(c +
    u/2)*token_context.

    `base_s` is paid once for each chunk of `chunk_tokens`.
    """

    base_s: float
    token_s: float
    token_context_s: float
    chunk_tokens: int

    @property
    def known(self) -> bool:
        # Any one of them may be zero: a fit gives the time to the terms that explain it.
        return self.base_s > 0 or self.token_s > 0 or self.token_context_s > 0

    def seconds(self, uncached: int, cached: int = 0) -> float:
        """Estimated compute time, without queueing."""
        if uncached <= 0:
            return 0.0
        chunks = -(-uncached // self.chunk_tokens)
        return (
            self.base_s * chunks
            + self.token_s * uncached
            + self.token_context_s * uncached * (cached + uncached / 2)
        )


UNKNOWN_CURVE = PrefillCurve(0.0, 0.0, 0.0, 256)


class EngineLoad(Value, frozen=True):
    """Load of one engine; `age_s` since it was true. What the gateway sent since is in
    `sent_tokens`.
    """

    queue_tokens: int = 0
    waiting: int = 0
    running: int = 0
    context_tokens: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    decode_step_s: float = 0.0
    sent_tokens: int = 0
    """Uncached tokens this gateway dispatched that the feed has not shown yet."""
    sent_requests: int = 0
    draining: bool = False
    age_s: float = 0.0


class LinkState(Value, frozen=True):
    """The measured path to a peer, as D's side sees it. Zero goodput: not measured yet."""

    goodput_bytes_per_s: float = 0.0
    rtt_s: float = 0.0
    loss: float = 0.0
    in_flight_bytes: int = 0
    """Wire bytes still to come on this link for sessions under way."""
    wire_ratio: float = 1.0
    """Raw over wire bytes lately seen (1.5: the codec saves a third)."""
    age_s: float = 0.0


class LocalEngine(Value, frozen=True):
    """D itself: engine, its prefix match for this prompt, and its agent's staging."""

    name: str
    load: EngineLoad
    curve: PrefillCurve
    matched_tokens: int
    free_staging_bytes: int = 0
    offload_ready: bool = True
    """Its agent is connected and the engine speaks KvPort."""
    instances: int = 1
    """Engines behind the one queue that `load` is a share of, what was sent since included."""


class RemoteInstance(Value, frozen=True):
    """One prefill instance of a peer."""

    peer: str
    instance: str
    link_class: LinkClass
    load: EngineLoad
    curve: PrefillCurve
    matched_tokens: int
    link: LinkState
    free_retention_bytes: int = 0
    ready: bool = True
    instances: int = 1
    """Engines behind the one queue that `load` is a share of, what was sent since included."""


class Snapshot(Value, frozen=True):
    """Everything one decision may look at, frozen."""

    local: LocalEngine
    remotes: tuple[RemoteInstance, ...]
    token_bytes: int
    """Raw KV bytes a token."""
    max_age_s: float
    """Telemetry older than this counts as unknown."""
    fallback_free_tokens: int = 0
    """What is left of the fallback budget."""
    state_bytes: int = 0
    """Recurrent and window state that every transfer carries, whatever its length."""


class RequestFacts(Value, frozen=True):
    """What a policy knows of a request."""

    request_id: str
    prompt_tokens: int
    """Estimated by the gateway's tokenizer, or from the byte length where the body is short."""
    max_tokens: int = 0
    features: frozenset[str] = frozenset()
    """Things that forbid offload (`echo`, `prompt_logprobs`, `multimodal`, ...)."""
    quality: str = "exact"
    cache_known: bool = True
    short: bool = False
    """The body is too short to be worth offloading; it was not tokenised, estimates only."""


class Estimate(Value, frozen=True):
    """Estimated TTFT of one candidate and its parts, in seconds."""

    where: str
    """`local`, or `peer/instance`."""
    ttft_s: float
    queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    rtt_s: float = 0.0
    decode_s: float = 0.0
    uncached_tokens: int = 0


class Decision(Value, frozen=True):
    """Where to prefill, in which order to try instances, and why.

    Remote with an empty plan: the policy insists on remote and no instance can take the request,
    so `on_failure` decides.
    """

    target: Target
    reason: Reason
    plan: tuple[tuple[str, str], ...] = ()
    """(peer, instance) in order of preference; empty for local."""
    estimates: tuple[Estimate, ...] = ()
    uncached_tokens: int = 0

    def estimate(self, where: str) -> Estimate | None:
        return next((e for e in self.estimates if e.where == where), None)


PREFIX_AT_D = "prefix_at_d"
"""Reason of a `local` outcome that is no failure: D had all of the prompt, nothing was brought."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one transfer, reported by D's agent under its transfer id."""

    transfer_id: str
    status: str
    """`staged`, `partial`, `local`, `refused`, `aborted`, `failed`."""
    reason: str = ""
    peer: str = ""
    instance: str = ""
    have_tokens: int = 0
    want_tokens: int = 0
    received_tokens: int = 0
    remote_cached_tokens: int = 0
    raw_bytes: int = 0
    wire_bytes: int = 0
    hidden_wire_bytes: int = 0
    """Wire bytes at D before P's last layer was computed."""
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds: connect, queue, first_frame, transfer, remote_compute, import, total."""
    tried: tuple[str, ...] = ()
    quality: str = ""
    """Class of the KV that came, the worst of its codecs'; empty: none came."""
    codecs: dict[str, int] = field(default_factory=dict)
    """Raw bytes by codec."""
    tried_reasons: tuple[str, ...] = ()
    """Why each of `tried` failed, empty where it did not; none: its agent does not say."""
