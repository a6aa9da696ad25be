"""What several gateways tell each other through a store, and the one method that a store has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

BucketKey = tuple[str, str]
"""Tenant and limit."""


class Load(msgspec.Struct, frozen=True, array_like=True):
    """What a gateway has sent to one place and no feed has shown yet."""

    tokens: int = 0
    requests: int = 0
    raw_bytes: int = 0
    wire_bytes: int = 0
    transfers: int = 0
    """Requests of a D whose KV is to come, and the staging that they will take there."""
    staged_bytes: int = 0


class Sent(msgspec.Struct, frozen=True):
    """All that a gateway has under way at one moment, as it tells between two exchanges."""

    member: str
    seq: int
    """The higher one is younger, of this and of what the member says of itself."""
    loads: dict[str, Load] = {}
    """By place, as `Member.sent`."""


class LinkSample(msgspec.Struct, frozen=True):
    """A link as the agent of one engine measured it; `age_s` when it was told."""

    engine: str
    peer: str
    instance: str
    goodput_bytes_per_s: float
    rtt_s: float
    wire_ratio: float
    age_s: float


class Member(msgspec.Struct, frozen=True):
    """One gateway, as it last described itself."""

    id: str
    """New with each start."""
    address: str = ""
    """Where it serves, for people."""
    claims: dict[str, int] = {}
    """Requests by tenant that it may have in flight, until it says otherwise."""
    sent: dict[str, Load] = {}
    """By place: an engine's name, or `peer/instance`."""
    links: tuple[LinkSample, ...] = ()
    processes: int = 1
    """Workers that it stands for, each with a share of every budget."""
    sent_seq: int = 0
    """How young `sent` is, in the order of `Sent.seq`."""


class Spend(msgspec.Struct, frozen=True):
    """What a gateway has used of a bucket since it last said so; less than nothing gives back."""

    key: BucketKey
    capacity: float
    period_s: float
    """In which a whole capacity comes back."""
    spent: float
    level: float
    """Of all gateways together before this, as this one knows it: where nobody else remembers."""


class SharedPolicy(msgspec.Struct, frozen=True):
    """The text of a policy file that one gateway has taken over, for all others."""

    version: int
    text: str


PREFIX_NAME_BYTES = 8
"""Of one block of a prompt, by a name that only gateways with the same secret can give it."""
PREFIX_TTL_S = 600.0
"""What was sent to an engine so long ago may be gone from its cache."""
PREFIX_BATCHES = 512
"""A store keeps so many batches of all gateways together, the oldest go first."""
PREFIX_READ = 64
"""And tells so many in one exchange."""


class PrefixDelta(msgspec.Struct, frozen=True, array_like=True):
    """What a gateway sent to one engine of late."""

    engine: str
    names: bytes = b""
    """Of blocks of prompts, PREFIX_NAME_BYTES each; the last of a prompt first."""
    cleared: bool = False
    """Before these: the engine has nothing any more of what anybody sent there."""


class HeardPrefixes(msgspec.Struct, frozen=True):
    """What another gateway told in one exchange, so long ago."""

    sender: str
    age_s: float
    deltas: tuple[PrefixDelta, ...]


class Report(msgspec.Struct, frozen=True):
    """What one gateway says."""

    member: Member
    ttl_s: float
    """Without another report for so long it is gone, and all it said of itself with it."""
    spends: tuple[Spend, ...] = ()
    epoch: str = ""
    since: int = 0
    """The `epoch` and `seq` of the answer before."""
    policy_version: int = 0
    """The newest that it knows."""
    publish: str | None = None
    """Text of a policy that all are to take over."""
    prefixes: tuple[PrefixDelta, ...] = ()
    """What it has not told yet, in order."""
    prefixes_since: int | None = None
    """`prefixes_seq` of the answer before; None: it wants to hear of none."""


class Shared(msgspec.Struct, frozen=True):
    """What it hears in answer."""

    epoch: str
    """Another one: the store has lost what it knew."""
    seq: int
    members: tuple[Member, ...]
    """All that are there, itself among them."""
    levels: dict[BucketKey, float]
    """Of the buckets that have changed since, this report's spends included."""
    policy: SharedPolicy | None
    """Where it is newer than what was known."""
    prefixes: tuple[HeardPrefixes, ...] = ()
    """The others' since then, in order, PREFIX_READ batches at most."""
    prefixes_seq: int = 0
    """As far as this tells."""
    prefixes_gap: bool = False
    """Some that came between are not kept any more: what was heard before may be wrong."""
    alone: bool = False
    """This store has lost the one beyond it: each keeps to its share."""


class ClusterStore(Protocol):
    """Where gateways meet. An exchange is atomic. Whoever made a store closes it.

    `prfaas.testing.state_contract` says in tests what each implementation does.
    """

    async def exchange(self, report: Report) -> Shared:
        """Raises StateUnavailable; then the report may have been taken or not."""
        ...

    async def tell_sent(self, sent: Sent) -> None:
        """To all who hear now, at once. Raises StateUnavailable; what is lost comes with the next
        exchange.
        """
        ...

    async def hear_sent(self, take: Callable[[Sent], None]) -> None:
        """Hand over what is told, perhaps one's own as well, until cancelled. Raises
        StateUnavailable where nothing more will come.
        """
        ...

    async def leave(self, member_id: str) -> None:
        """This gateway is gone. Raises StateUnavailable."""
        ...

    async def close(self) -> None: ...
