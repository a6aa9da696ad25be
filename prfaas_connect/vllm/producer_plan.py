"""What the scheduler's half of the prefill side tells the workers' halves in each engine step."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ExportOpen:
    """A request whose KV leaves: tokens [send_from, token_end), of which [0, cached) were there."""

    request_id: str
    session: str
    epoch: int
    send_from: int
    token_end: int
    cached: int


@dataclass(frozen=True, slots=True)
class ExportStep:
    """After this step the request's tokens [0, computed_end) have KV.

    `block_ids` come after those known, or instead of them (`replaces`: it was preempted).
    """

    request_id: str
    block_ids: list[int]
    computed_end: int
    replaces: bool = False


@dataclass(slots=True)
class PrefillPlan:
    """Of one step, in this order: `drops`, `held`, `opens`, `steps`, `kept`."""

    connection: str = ""
    """`Welcome.connection` that the exports belong to; those of another are void."""
    opens: list[ExportOpen] = field(default_factory=list)
    steps: list[ExportStep] = field(default_factory=list)
    held: list[str] = field(default_factory=list)
    """Requests not in this step: they may have lost their blocks, so nothing is read from them."""
    drops: list[str] = field(default_factory=list)
    """Requests whose export is over before its end: not another byte is read from their blocks."""
    kept: list[str] = field(default_factory=list)
    """Requests that are over for vLLM, which keeps their blocks until it hears they are sent."""
    idle: bool = False
    """Nothing is computed in this step."""

    def __bool__(self) -> bool:
        return bool(self.opens or self.steps or self.held or self.drops or self.kept)
