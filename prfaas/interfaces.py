"""Where the parts meet: each interface is one to three methods."""

from __future__ import annotations

from typing import Protocol, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt

from prfaas.ledger import Piece
from prfaas.session_messages import PrefillReport
from prfaas.snapshot import Decision, Outcome, RequestFacts, Snapshot

State = TypeVar("State")


class RoutingPolicy(Protocol[State]):
    """Pure: no I/O, no clock, no randomness but a hash of the request id. `state` is frozen and
    small.
    """

    name: str

    def initial_state(self) -> State: ...

    def decide(self, request: RequestFacts, snapshot: Snapshot, state: State) -> Decision: ...

    def observe(self, state: State, outcome: Outcome) -> State: ...


@runtime_checkable
class LearningPolicy(RoutingPolicy[State], Protocol):
    """A policy that learns from every request, not only from those that left D."""

    def saw(self, state: State, request: RequestFacts, snapshot: Snapshot) -> State:
        """After each decision: the state with the request counted."""
        ...


class KvRecord(Protocol):
    """One tensor of KV, or a part of it, as its source gives it."""

    @property
    def piece(self) -> Piece: ...

    @property
    def raw(self) -> npt.NDArray[np.uint8]:
        """Canonical bytes; they stay as they are until `done`."""
        ...

    @property
    def cached(self) -> bool:
        """Read from a cache, not computed now."""
        ...

    @property
    def codec(self) -> str:
        """The bytes are not canonical but what this codec has to finish; empty: they are."""
        ...

    def done(self) -> None:
        """The bytes are copied out; idempotent."""
        ...


class KvSource(Protocol):
    """Where a session's KV comes from: an engine's exports, any memory.

    Every byte comes once, in any order. Who takes a record calls its `done`, whatever happens; a
    source may hold the next one back until then.
    """

    async def next(self) -> KvRecord | PrefillReport:
        """The next record; after the last one what the prefill took. Raises PrfaasError where the
        rest will not come.
        """
        ...

    def prepare_for(self, codec: str) -> None:
        """Records may come prepared for this codec from now on, where the source can do that."""
        ...

    def cancel(self) -> None:
        """Nothing more is wanted. Idempotent, also after the end."""
        ...


class KvSink(Protocol):
    """Where decoded KV goes: staging, or any memory. Called from codec threads, for different
    places at once.
    """

    def in_place(self, piece: Piece) -> npt.NDArray[np.uint8] | None:
        """The bytes of a piece where they lie together, to be filled; else None."""
        ...

    def scatter(self, piece: Piece, raw: npt.NDArray[np.uint8]) -> None:
        """Copy a decoded piece to its places."""
        ...
