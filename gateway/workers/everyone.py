"""What a worker says to those outside who ask for the whole gateway: all processes together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.admission import Admission, FallbackBudget
from gateway.cluster_view import ClusterView, describe
from gateway.dashboard.gather import Gatherer
from gateway.metrics import GatewayMetrics
from gateway.records import RecordBook, RequestRecord, Summary, detail, summary
from gateway.workers.dashboard import WorkersDashboard
from gateway.workers.link import WorkerLink
from gateway.workers.merged_metrics import Family, Kept, merged, read_counts, rendered
from gateway.workers.place import Place, name_of
from gateway.workers.siblings import (
    Ask,
    AskCluster,
    AskDashboard,
    AskMetrics,
    AskRequest,
    AskRequests,
    Siblings,
    Told,
)

logger = logging.getLogger(__name__)

WRITE_S = 1.0
"""Between two times at which a process writes what it has counted."""


@dataclass(frozen=True, slots=True)
class Worker:
    """Which process a gateway is, and how it hears of the others."""

    place: Place
    link: WorkerLink


class ClusterPart(msgspec.Struct, frozen=True):
    """What only one worker knows of the cluster, for `/prfaas/cluster`."""

    pid: int
    in_flight: int
    unshown_requests: int
    snapshot_age_s: float
    breakers: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Parts:
    """Of the gateway that answers; borrowed."""

    metrics: GatewayMetrics
    records: RecordBook
    view: ClusterView
    budget: FallbackBudget
    admission: Admission


class Counted:
    """Keeps what one process counts, for the next in its place. `run` until cancelled."""

    def __init__(self, metrics: GatewayMetrics, place: Place) -> None:
        self._kept = Kept(metrics.registry, place.counts_of(place.index))

    def families(self) -> list[Family]:
        return self._kept.families()

    async def run(self) -> None:
        told = False
        while True:
            await asyncio.sleep(WRITE_S)
            try:
                self._kept.write()
                told = False
            except OSError as exc:
                if not told:
                    logger.error("what was counted is not kept: %s", exc.strerror)
                told = True


class Everyone:
    """Asks the other workers, and answers them. `run` it, between `start` and `close`."""

    def __init__(self, worker: Worker, parts: Parts, pid: int) -> None:
        self._worker = worker
        self._parts = parts
        self._pid = pid
        self._counted = Counted(parts.metrics, worker.place)
        self._answers: dict[type[Any], Callable[[Any], object]] = {
            AskMetrics: lambda ask: self._counted.families(),
            AskRequests: lambda ask: [_told(r, summary(r)) for r in self._latest(ask.limit)],
            AskRequest: self._request,
            AskCluster: lambda ask: self._part(),
        }
        self.siblings = Siblings(worker.place, self._said)

    def dashboard(self, gatherer: Gatherer) -> WorkersDashboard:
        """What pages are shown; the others hear of `gatherer`'s part when they ask."""
        shown = WorkersDashboard(gatherer, self._parts.records, self.siblings)
        self._answers[AskDashboard] = shown.part
        return shown

    async def start(self) -> None:
        await self.siblings.start()

    async def run(self) -> None:
        """Until cancelled."""
        await self._counted.run()

    async def close(self) -> None:
        await self.siblings.close()

    # --- for those outside ---

    async def metrics(self) -> bytes:
        """Of all; of a process that does not answer, what it had counted."""
        place = self._worker.place
        found = await self.siblings.ask(AskMetrics(), list[Family], state=True)
        missing = [at for at in range(-1, place.workers) if at not in found]
        parts = [*found.values(), *(read_counts(place.counts_of(at)) for at in missing)]
        return rendered(merged(parts))

    async def requests(self, limit: int) -> list[msgspec.Raw]:
        """The latest of all, the newest first."""
        found = await self.siblings.ask(AskRequests(limit), list[Told])
        all_of_them = sorted(
            (told for each in found.values() for told in each), key=lambda told: -told.received
        )
        return [msgspec.Raw(told.json) for told in all_of_them[:limit]]

    async def request(self, request_id: str) -> msgspec.Raw | None:
        """The youngest of that id."""
        found = await self.siblings.ask(AskRequest(request_id), list[Told])
        told = [told for each in found.values() for told in each]
        return msgspec.Raw(max(told, key=lambda each: each.received).json) if told else None

    async def cluster(self) -> Mapping[str, object]:
        """As this worker sees it, with what only the others know."""
        found = await self.siblings.ask(AskCluster(), ClusterPart)
        whole = dict(describe(self._parts.view, self._parts.budget.free_tokens))
        whole["unshown_requests"] = sum(part.unshown_requests for part in found.values())
        whole["breakers"] = _worst(part.breakers for part in found.values())
        names = {name_of(at) for at in range(self._worker.place.workers)}
        others = self._parts.view.neighbours.members
        whole["other_gateways"] = [
            member.address or member.id for member in others if member.address not in names
        ]
        whole["workers"] = [
            {
                "name": name_of(at),
                "pid": part.pid,
                "in_flight": part.in_flight,
                "snapshot_age_s": part.snapshot_age_s,
            }
            for at, part in sorted(found.items())
        ]
        return whole

    # --- for the other workers ---

    def _said(self, ask: Ask) -> object:
        return self._answers[type(ask)](ask)

    def _latest(self, limit: int) -> list[RequestRecord]:
        return list(self._parts.records.latest(limit))

    def _request(self, ask: AskRequest) -> list[Told]:
        record = self._parts.records.get(ask.request_id)
        return [] if record is None else [_told(record, detail(record))]

    def _part(self) -> ClusterPart:
        view = self._parts.view
        return ClusterPart(
            self._pid,
            self._parts.admission.in_flight,
            len(view.sent),
            self._worker.link.age_s,
            [msgspec.to_builtins(info) for info in view.breakers.infos() if info.opened],
        )


def _told(record: RequestRecord, told: Summary) -> Told:
    return Told(record.started_wall, msgspec.json.encode(told))


def _worst(parts: Any) -> list[dict[str, Any]]:
    """Of each breaker: open where one worker's is, and as often as all of theirs have opened."""
    order = ("closed", "trial", "open")
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for part in parts:
        for info in part:
            known = found.setdefault((info["what"], info["name"]), {**info, "opened": 0})
            known["opened"] += info["opened"]
            known["state"] = max(known["state"], info["state"], key=order.index)
    return list(found.values())
