"""Where the parts meet: each interface is one to three methods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from prfaas.hashing import BlockHash
from prfaas.ledger import Piece
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


class PrefixIndex(Protocol):
    """Which prefixes an engine holds."""

    def match(self, engine: str, chain: Sequence[BlockHash]) -> int:
        """How many leading blocks of `chain` the engine holds."""
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
