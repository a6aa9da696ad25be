"""Where the parts meet: each interface is one to three methods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from prfaas.hashing import BlockHash
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
