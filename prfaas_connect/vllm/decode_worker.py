"""Decode side in a vLLM worker: staged KV goes into the request's blocks, a bounded part in each
step.

All of it happens on the worker's own thread, in the order of the scheduler's plans: a cancel comes
with or before the plan that gives the blocks to another request, so no late byte reaches them.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from prfaas_connect.port.layout import Extent, KvLayout
from prfaas_connect.port.messages import PortError
from prfaas_connect.vllm.plan import DecodePlan, Load

log = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]
JOIN_TIMEOUT_S = 5.0
"""A load whose memory cannot be reached for so long fails."""


class PagedLayer(Protocol):
    """What is needed of `layouts.PagedKv`."""

    def load(self, table: list[int], start: int, end: int, data: Bytes) -> None: ...

    def export(self, table: list[int], start: int, end: int, out: Bytes) -> None: ...


class Staging(Protocol):
    """What is needed of `WorkerPort`."""

    def use(self, connection: str) -> None: ...

    def staging(self, connection: str, offset: int, nbytes: int) -> Bytes | None: ...


@dataclass(slots=True, eq=False)
class _Job:
    load: Load
    since_s: float
    extents: Iterator[Extent]
    staged: Bytes | None = None
    digest: hashlib.blake2b | None = None


@dataclass(slots=True)
class Report:
    """Of one step: loads that have ended, blocks of those that failed, digests by session."""

    done: set[str] = field(default_factory=set)
    bad_blocks: set[int] = field(default_factory=set)
    digests: dict[str, str] = field(default_factory=dict)


class DecodeWorker:
    """Owns the loads under way in one rank; the model runner's thread calls it.

    `layers` are the paged tensors by model layer. `whole` says that this rank has all heads, so
    that it can tell the digest of what it loaded. `settle` waits until copies to a device are done.
    """

    def __init__(
        self,
        layout: KvLayout,
        layers: Mapping[int, PagedLayer],
        port: Staging,
        *,
        bytes_per_step: int,
        whole: bool = True,
        settle: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._layout = layout
        self._layers = layers
        self._port = port
        self._bytes_per_step = bytes_per_step
        self._whole = whole
        self._settle = settle
        self._clock = clock
        self._connection = ""
        self._jobs: deque[_Job] = deque()
        self._report = Report()

    def __len__(self) -> int:
        return len(self._jobs)

    def follow(self, plan: DecodePlan) -> None:
        """Take over what the scheduler says; before anything is computed in this step."""
        self._port.use(plan.connection)
        self._connection = plan.connection or self._connection
        for load in plan.loads:
            extents = self._layout.extents(load.have, load.staged_end, load.chunk_tokens)
            job = _Job(load, self._clock(), extents)
            all_of_it = (load.start, load.end) == (load.have, load.staged_end)
            if plan.verify and self._whole and all_of_it:
                job.digest = hashlib.blake2b(digest_size=16)
            self._jobs.append(job)
        for request_id in plan.cancels:
            for job in [j for j in self._jobs if j.load.request_id == request_id]:
                self._end(job)
        for request_id, blocks in plan.failures.items():
            self._report.done.add(request_id)
            self._report.bad_blocks.update(blocks)

    def step(self) -> None:
        """Copy at most about `bytes_per_step`, oldest load first."""
        budget = self._bytes_per_step
        for job in list(self._jobs):
            if budget <= 0:
                break
            try:
                budget = self._copy(job, budget)
            except (PortError, ValueError, RuntimeError, IndexError) as exc:
                self._fail(job, str(exc))

    def report(self) -> Report:
        """What has ended since the last call."""
        report, self._report = self._report, Report()
        return report

    def _copy(self, job: _Job, budget: int) -> int:
        """Copy of one load; what is left of the budget."""
        load = job.load
        if job.staged is None:
            nbytes = self._layout.session_bytes(load.have, load.staged_end)
            job.staged = self._port.staging(load.connection, load.offset, nbytes)
            if job.staged is None:
                late = self._clock() - job.since_s > JOIN_TIMEOUT_S
                if late or load.connection != self._connection:
                    raise PortError("the agent's memory cannot be reached")
                return budget
        while budget > 0:
            extent = next(job.extents, None)
            if extent is None:
                self._finish(job)
                break
            budget -= self._load(job, extent, job.staged)
        return budget

    def _load(self, job: _Job, extent: Extent, staged: Bytes) -> int:
        """One tensor, less what the prefix cache has by now or vLLM did not claim."""
        load, span = job.load, extent.span
        start, end = max(span.start, load.start), min(span.end, load.end)
        if start >= end:
            return 0
        raw = staged[extent.offset : extent.offset + extent.nbytes]
        if (start, end) != (span.start, span.end):
            rows = raw.reshape(2, span.tokens, -1)[:, start - span.start : end - span.start]
            raw = np.ascontiguousarray(rows).reshape(-1)
        layer = self._layers[extent.layer]
        layer.load(load.block_ids, start, end, raw)
        if job.digest is not None:
            back = np.empty(raw.nbytes, dtype=np.uint8)
            layer.export(load.block_ids, start, end, back)
            job.digest.update(back.data)
        return raw.nbytes

    def _finish(self, job: _Job) -> None:
        self._settle()
        if job.digest is not None:
            self._report.digests[job.load.session] = job.digest.hexdigest()
        self._end(job)

    def _fail(self, job: _Job, reason: str) -> None:
        log.error("loading KV of %s failed: %s", job.load.request_id, reason)
        self._report.bad_blocks.update(job.load.block_ids[job.load.first_block :])
        self._end(job)

    def _end(self, job: _Job) -> None:
        self._jobs.remove(job)
        self._report.done.add(job.load.request_id)
