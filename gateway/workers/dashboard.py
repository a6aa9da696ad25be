"""The dashboard of a worker shows all workers: it asks the others while somebody looks."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import msgspec

from gateway.dashboard.gather import Gatherer, latencies
from gateway.dashboard.latest import AT_FIRST, Latest
from gateway.dashboard.messages import (
    Link,
    Place,
    Request,
    Requests,
    Samples,
    Saved,
    Shadowing,
    Share,
    State,
    Together,
)
from gateway.records import RecordBook
from gateway.workers.siblings import AskDashboard, Siblings

TICK_S = 0.5
"""Between two questions about requests; every second one is about everything."""
STATE = -1
_BREAKERS = ("closed", "trial", "open")

S = TypeVar("S", Saved, Share, Shadowing)


class DashboardPart(msgspec.Struct):
    """What one process has to show."""

    requests: Requests
    state: State | None = None
    samples: Samples | None = None
    together: Together | None = None
    """Of the process that keeps the state: how it stands with other gateways."""


class WorkersDashboard:
    """What pages are shown, in place of one process' own. Owns what the others last said; `run` it
    until cancelled.
    """

    def __init__(self, gatherer: Gatherer, records: RecordBook, siblings: Siblings) -> None:
        self._gatherer = gatherer
        self._records = records
        self._siblings = siblings
        self._own = Latest(records)
        self._for_others: dict[int, Latest] = {}
        self._parts: dict[int, DashboardPart] = {}
        self._news: list[Request] = []
        self._left_out = 0
        self._shown: OrderedDict[str, Request] = OrderedDict()
        """Of the others, for a page that opens later."""

    # --- what the feed asks ---

    def state(self) -> State:
        """Of all, as last heard."""
        parts = [
            (part.state, part.samples)
            for part in self._parts.values()
            if part.state is not None and part.samples is not None
        ]
        kept = self._parts.get(STATE)
        own = (self._gatherer.state(), self._gatherer.samples())
        return merged([own, *parts], None if kept is None else kept.together)

    def begin(self) -> Requests:
        own = self._own.begin()
        found = sorted([*own.requests, *self._shown.values()], key=lambda each: each.at)
        return Requests(found[-AT_FIRST:])

    def changed(self) -> Requests:
        own = self._own.changed()
        news, self._news = self._news, []
        left_out, self._left_out = self._left_out, 0
        found = sorted([*own.requests, *news], key=lambda each: each.at)
        return Requests(found, own.left_out + left_out)

    def skip(self) -> None:
        self._own.skip()

    # --- asking and being asked ---

    async def run(self, somebody_looks: Callable[[], bool]) -> None:
        whole = first = True
        while True:
            await asyncio.sleep(TICK_S if not first or somebody_looks() else TICK_S / 5)
            if not somebody_looks():
                self._parts.clear()
                self._shown.clear()
                self._news.clear()
                whole = first = True
                continue
            await self.look(first=first, whole=whole)
            whole, first = not whole, False

    async def look(self, *, first: bool, whole: bool) -> None:
        """Ask all others once."""
        own = self._siblings.index
        ask = AskDashboard(own, first, whole)
        found = await self._siblings.ask(ask, DashboardPart, state=True, own=False)
        for index in [index for index in self._parts if index not in found and index != STATE]:
            del self._parts[index]
        kept = self._parts.get(STATE)
        if STATE not in found and kept is not None and kept.together is not None:
            kept.together.up = False
        for index, part in found.items():
            before = self._parts.get(index)
            if part.state is None and before is not None:
                part.state, part.samples = before.state, before.samples
            self._parts[index] = part
            for request in part.requests.requests:
                self._shown.pop(request.id, None)
                self._shown[request.id] = request
                self._news.append(request)
            self._left_out += part.requests.left_out
        while len(self._shown) > AT_FIRST:
            self._shown.popitem(last=False)

    def part(self, ask: AskDashboard) -> DashboardPart:
        """For another worker: what is new since it last asked."""
        latest = self._for_others.get(ask.asker)
        if latest is None or ask.first:
            latest = self._for_others[ask.asker] = Latest(self._records)
            requests = latest.begin()
            latest.skip()
        else:
            requests = latest.changed()
        if not ask.whole:
            return DashboardPart(requests)
        return DashboardPart(requests, self._gatherer.state(), self._gatherer.samples())


def merged(parts: Sequence[tuple[State, Samples]], together: Together | None) -> State:
    """One state of all workers: what each has of its own adds up, of a breaker the worst is shown,
    and what all are told alike is the first one's.
    """
    states = [state for state, _ in parts]
    whole = states[0]
    whole.together = together
    if len(states) == 1:
        return whole
    whole.up_s = max(state.up_s for state in states)
    whole.in_flight = sum(state.in_flight for state in states)
    whole.decided = sum(state.decided for state in states)
    if any(state.status == "ready" for state in states):
        whole.status = "ready"
    for other in states[1:]:
        _add_places(whole.engines, other.engines)
        _add_places(whole.instances, other.instances)
        _add_links(whole.links, other.links)
    whole.latency = latencies(Samples.of(samples for _, samples in parts))
    whole.share = _sum(Share(), (state.share for state in states))
    whole.saved = _sum(Saved(), (state.saved for state in states))
    shadows = [state.shadow for state in states if state.shadow is not None]
    whole.shadow = _sum(Shadowing(), shadows) if shadows else None
    reasons: dict[tuple[str, str], int] = {}
    for state in states:
        for target, reason, count in state.reasons:
            reasons[target, reason] = reasons.get((target, reason), 0) + count
    found = [(target, reason, count) for (target, reason), count in reasons.items()]
    whole.reasons = sorted(found, key=lambda each: -each[2])
    return whole


def _add_places(places: list[Place], others: Iterable[Place]) -> None:
    known = {place.name: place for place in places}
    for other in others:
        place = known.get(other.name)
        if place is not None:
            if place.in_flight is not None and other.in_flight is not None:
                place.in_flight += other.in_flight
            place.breaker = max(place.breaker, other.breaker, key=_BREAKERS.index)
            place.openings += other.openings


def _add_links(links: list[Link], others: Iterable[Link]) -> None:
    known = {(link.engine, link.peer, link.instance): link for link in links}
    for other in others:
        link = known.get((other.engine, other.peer, other.instance))
        if link is not None:
            link.breaker = max(link.breaker, other.breaker, key=_BREAKERS.index)
            link.openings += other.openings


def _sum(total: S, parts: Iterable[S]) -> S:
    """Field by field; all of them are counts."""
    for part in parts:
        for name in total.__struct_fields__:
            setattr(total, name, getattr(total, name) + getattr(part, name))
    return total
