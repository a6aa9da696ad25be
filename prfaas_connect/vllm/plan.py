"""What the scheduler's half of the decode side tells the worker's half in each engine step."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Load:
    """Tokens [start, end) of a request, from staging into its blocks.

    The staging extent at `offset` holds [have, staged_end) on a grid of `chunk_tokens`;
    `block_ids` are all blocks of the request, from its first token on.
    """

    request_id: str
    session: str
    connection: str
    """`Welcome.connection` in whose memory the extent lies."""
    block_ids: list[int]
    first_block: int
    """Index of the first block that is this request's alone."""
    have: int
    staged_end: int
    start: int
    end: int
    offset: int
    chunk_tokens: int


@dataclass(slots=True)
class DecodePlan:
    """Of one step, in this order: `cancels`, `failures`, `loads`."""

    connection: str = ""
    """`Welcome.connection` of now; loads may be of an earlier one."""
    verify: bool = False
    """Send back the digest of what was loaded."""
    loads: list[Load] = field(default_factory=list)
    failures: dict[str, list[int]] = field(default_factory=dict)
    """Blocks of requests that were refused: their load fails."""
    cancels: list[str] = field(default_factory=list)
    """Requests that are gone: not another byte into their blocks."""

    def __bool__(self) -> bool:
        return bool(self.loads or self.failures or self.cancels)
