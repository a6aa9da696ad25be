"""What a request went through at the gateway, stage after stage: for metrics and traces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

ADMISSION = "admission"
"""Read, checked, within its tenant's limits, and its turn."""
TOKENISE = "tokenise"
ROOM = "room"
"""Waiting for an engine that may have it."""
DECIDE = "decide"
"""Which engine, and where it is prefilled."""
UPSTREAM = "upstream"
"""At an engine, to the end of its answer."""
FIRST_EVENT = "first_event"
"""The part of that until its answer begins."""

Mark = tuple[str, float, str]
"""A stage that begins, when, and the engine it is at."""


class Stage(msgspec.Struct, frozen=True):
    """One that has ended; times in seconds of the gateway's clock."""

    name: str
    start_s: float
    end_s: float
    engine: str = ""


def stages_of(
    started_at: float, marks: Sequence[Mark], first_event_at: float | None, ended_at: float
) -> Iterator[Stage]:
    """In order, each until the next one begins; the first event belongs to the last engine."""
    name, start_s, engine = ADMISSION, started_at, ""
    for mark in marks:
        yield Stage(name, start_s, mark[1], engine)
        name, start_s, engine = mark
    yield Stage(name, start_s, ended_at, engine)
    if name == UPSTREAM and first_event_at is not None:
        yield Stage(FIRST_EVENT, start_s, first_event_at, engine)


def seconds_of(
    started_at: float, marks: Sequence[Mark], first_event_at: float | None, ended_at: float
) -> list[tuple[str, float]]:
    """As `stages_of`, for metrics: every request needs them, and nobody else's parts."""
    name, start_s = ADMISSION, started_at
    found: list[tuple[str, float]] = []
    for following, at, _ in marks:
        found.append((name, at - start_s))
        name, start_s = following, at
    found.append((name, ended_at - start_s))
    if name == UPSTREAM and first_event_at is not None:
        found.append((FIRST_EVENT, first_event_at - start_s))
    return found


def seconds_by_stage(stages: Iterable[tuple[str, float]]) -> dict[str, float]:
    """All of one name together."""
    found: dict[str, float] = {}
    for name, seconds in stages:
        found[name] = found.get(name, 0.0) + seconds
    return found
