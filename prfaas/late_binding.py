"""Late binding, of gateways as of simulated ones: who does it, at what price, what is told of it.

A request that waits at one place moves to another one that stands idle.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import msgspec

LOCAL = "local"
"""D, as estimates and moves name it; instances are `peer/instance`."""
LOOKED_AT = 32
"""Waiting requests that are compared at a time, which must not keep the others waiting."""
MOST_MOVES = 2
"""Of one request: neither is it sent to and fro, nor does an answer come ever later."""
LINK_PRICE = 2.0
"""Seconds that a move to a peer must gain besides, for each second of the link that its KV takes:
an instance that is idle because the link is full would fill it further for next to nothing."""
FLOW_PRICE = 0.5
"""Of those seconds, more for each transfer under way, which shares the link with what moves."""


@runtime_checkable
class BindsLate(Protocol):
    """A policy whose decisions may still change while a request waits."""

    @property
    def move_gain_s(self) -> float | None:
        """What a request must gain to move; None: none ever moves."""
        ...


class Move(msgspec.Struct, frozen=True):
    """One move of a request, as its log line has it."""

    source: str = msgspec.field(name="from")
    """`local`, or `peer/instance`."""
    to: str
    why: str
    """`peer_idle` or `local_idle`: what stood idle while the request waited."""
    after_s: float
    """Since the request came."""
    stay_s: float
    """Estimated time to its first token from then on, where it was."""
    go_s: float
    """The same where it went, with the price of the link."""

    @property
    def gain_s(self) -> float:
        return self.stay_s - self.go_s
