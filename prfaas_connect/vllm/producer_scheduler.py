"""Prefill side in vLLM's scheduler process: requests that the agent submits, and their blocks.

The agent announces an export on the port (PrefillStart) and submits its tokens as an ordinary
request over HTTP, for one token that nobody reads; the request's `kv_transfer_params` name the
export. From then on the request is vLLM's, and its blocks are read by the workers as they fill.
"""

from __future__ import annotations

import enum
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from prfaas_connect.port.layout import KvLayout, chunk_spans
from prfaas_connect.port.messages import (
    PortMessage,
    PrefillCancel,
    PrefillEnd,
    PrefillStart,
    Welcome,
)
from prfaas_connect.vllm.layouts import HeadRange
from prfaas_connect.vllm.producer_plan import ExportOpen, ExportStep, PrefillPlan

log = logging.getLogger(__name__)

EXPORT_PARAM = "prfaas_export"
"""Key in `kv_transfer_params` of a request that the agent submits: {"session", "epoch"}."""
START_WAIT_S = 2.0
"""The announcement takes another way than the request, which waits for it so long."""
MAX_EXPORTS = 1024


class Port(Protocol):
    """What is needed of `EnginePort`."""

    @property
    def ring_bytes(self) -> int: ...

    def send(self, message: PortMessage, blob: bytes | memoryview = b"") -> bool: ...


class Phase(enum.Enum):
    """Where an export stands."""

    ANNOUNCED = "announced"
    """Its request has not come."""
    QUEUED = "queued"
    COMPUTING = "computing"
    DRAINING = "draining"
    """All computed; the workers still read its blocks, which vLLM keeps for us."""


@dataclass(slots=True, eq=False)
class _Export:
    session: str
    epoch: int
    send_from: int
    tokens: npt.NDArray[np.int32]
    announced_at: float
    phase: Phase = Phase.ANNOUNCED
    request_id: str = ""
    cached: int = 0
    begun_at: float = 0.0
    computed_at: float = 0.0

    @property
    def key(self) -> tuple[str, int]:
        return self.session, self.epoch


class ProducerScheduler:
    """Owns the exports of one engine; vLLM's scheduler thread calls it.

    `connected`, `disconnected` and `handle` come from the port's reader thread. Every export that
    was announced ends with one PrefillEnd, or with the connection.
    """

    def __init__(
        self,
        port: Port,
        layout: KvLayout,
        *,
        chunk_tokens: int,
        vocab_size: int,
        max_tokens: int,
        ranks: Sequence[HeadRange],
        serves: bool = True,
        may_wait: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`serves`: has the prefill role; without it only the numeric probe is answered.
        `may_wait`: this vLLM lets a request wait for us.
        """
        self._port = port
        self._layout = layout
        self._chunk_tokens = chunk_tokens
        self._vocab_size = vocab_size
        self._max_tokens = max_tokens
        self._serves = serves
        self._may_wait = may_wait
        self._clock = clock
        exporting = [rank for rank in ranks if rank.first_copy]
        self._records_per_span = len(exporting) * sum(len(g.layers) for g in layout.groups)
        widest = max((rank.count / rank.total for rank in exporting), default=1.0)
        self._record_token_bytes = int(max(g.token_bytes for g in layout.groups) * widest)
        self._exports: dict[tuple[str, int], _Export] = {}
        self._by_request: dict[str, _Export] = {}
        self._waiting_since: dict[str, float] = {}
        self._drops: list[str] = []
        self._kept: list[str] = []
        self._news: deque[tuple[PortMessage | Welcome | str, bytes]] = deque()
        self._connection = ""

    def __len__(self) -> int:
        return len(self._exports)

    # --- the port's reader thread ---

    def connected(self, welcome: Welcome) -> None:
        """A connection is up."""
        self._news.append((welcome, b""))

    def disconnected(self, reason: str) -> None:
        """It is gone, and with it every export."""
        self._news.append((reason, b""))

    def handle(self, message: PortMessage, blob: bytes) -> None:
        """PrefillStart or PrefillCancel."""
        self._news.append((message, blob))

    # --- vLLM's scheduler thread ---

    def owns(self, request: Any) -> bool:
        """Whether a request is the agent's, known to us or not."""
        params = getattr(request, "kv_transfer_params", None)
        return isinstance(params, dict) and EXPORT_PARAM in params

    def matched_tokens(self, request: Any) -> tuple[int | None, bool]:
        """vLLM's get_num_new_matched_tokens for a request that is ours: never any tokens."""
        self._read_news()
        request_id = request.request_id
        if request_id in self._by_request or self._join(request):
            self._waiting_since.pop(request_id, None)
            return 0, False
        since = self._waiting_since.setdefault(request_id, self._clock())
        if self._may_wait and self._clock() - since < START_WAIT_S:
            return None, False
        if request_id in self._waiting_since:
            log.warning("%s names an export that was never announced", request_id)
        return 0, False

    def plan(self, scheduler_output: Any) -> PrefillPlan:
        """What the workers are to do in this step."""
        self._read_news()
        plan = PrefillPlan(
            connection=self._connection, idle=not scheduler_output.total_num_scheduled_tokens
        )
        plan.drops, self._drops = self._drops, []
        plan.kept, self._kept = self._kept, []
        if not self._by_request:
            return plan
        scheduled: dict[str, int] = scheduler_output.num_scheduled_tokens
        for new in scheduler_output.scheduled_new_reqs:
            export = self._by_request.get(new.req_id)
            if export is not None:
                self._begin(plan, export, new, scheduled[new.req_id])
        self._continue(plan, scheduler_output.scheduled_cached_reqs, scheduled)
        plan.held = [
            request_id
            for request_id, export in self._by_request.items()
            if export.phase is Phase.COMPUTING and request_id not in scheduled
        ]
        return plan

    def finished(self, request: Any) -> tuple[bool, dict[str, Any]]:
        """vLLM is done with a request: whether its blocks must stay until `sent`, and what its
        answer says to whoever submitted it.
        """
        self._read_news()
        self._waiting_since.pop(request.request_id, None)
        export = self._by_request.get(request.request_id)
        answer = {EXPORT_PARAM: {"known": export is not None}}
        return export is not None and self._keeps(export, request), answer

    def _keeps(self, export: _Export, request: Any) -> bool:
        whole = request.num_computed_tokens >= len(export.tokens)
        if export.phase is Phase.COMPUTING and whole and not _was_aborted(request):
            export.phase = Phase.DRAINING
            export.computed_at = self._clock()
            self._kept.append(request.request_id)
            return True
        self._end(export, "failed", "engine_unavailable: vLLM has ended the request early")
        return False

    def sent(self, request_ids: Iterable[str]) -> None:
        """All workers have read these requests' blocks."""
        self._read_news()
        for request_id in request_ids:
            export = self._by_request.get(request_id)
            if export is not None and export.phase is Phase.DRAINING:
                self._end(export, "done")

    # --- one export ---

    def _begin(self, plan: PrefillPlan, export: _Export, new: Any, tokens: int) -> None:
        end = min(new.num_computed_tokens + tokens, len(export.tokens))
        blocks = list(new.block_ids[0])
        if export.phase is Phase.COMPUTING:  # Some model runners get a preempted one as new.
            plan.steps.append(ExportStep(new.req_id, blocks, end, replaces=True))
            return
        export.phase = Phase.COMPUTING
        export.cached = new.num_computed_tokens
        export.begun_at = export.computed_at = self._clock()
        plan.opens.append(
            ExportOpen(
                new.req_id,
                export.session,
                export.epoch,
                export.send_from,
                len(export.tokens),
                export.cached,
            )
        )
        plan.steps.append(ExportStep(new.req_id, blocks, end))

    def _continue(self, plan: PrefillPlan, cached: Any, scheduled: dict[str, int]) -> None:
        resumed = _resumed(cached)
        for index, request_id in enumerate(cached.req_ids):
            export = self._by_request.get(request_id)
            if export is None or export.phase is not Phase.COMPUTING:
                continue
            new_blocks = cached.new_block_ids[index]
            end = cached.num_computed_tokens[index] + scheduled[request_id]
            plan.steps.append(
                ExportStep(
                    request_id,
                    list(new_blocks[0]) if new_blocks is not None else [],
                    min(end, len(export.tokens)),
                    replaces=request_id in resumed,
                )
            )

    def _join(self, request: Any) -> bool:
        """Tie a request to the export it names; False where that was not announced (yet)."""
        named = request.kv_transfer_params[EXPORT_PARAM]
        if not isinstance(named, dict):
            return False
        export = self._exports.get((named.get("session"), named.get("epoch")))  # type: ignore[arg-type]
        if export is None or export.phase is not Phase.ANNOUNCED:
            return False
        theirs = np.asarray(request.prompt_token_ids, dtype="<i4")
        if not np.array_equal(theirs, export.tokens):
            self._end(export, "failed", "invalid_request: the request's tokens are others")
            return False
        export.phase = Phase.QUEUED
        export.request_id = request.request_id
        self._by_request[request.request_id] = export
        return True

    def _end(self, export: _Export, status: str, reason: str = "") -> None:
        """The one last word about an export."""
        self._forget(export, drop=status != "done")
        spans = chunk_spans(export.send_from, len(export.tokens), self._chunk_tokens)
        begun = export.begun_at
        self._port.send(
            PrefillEnd(
                session=export.session,
                epoch=export.epoch,
                status=status,
                records=len(spans) * self._records_per_span if status == "done" else 0,
                cached_tokens=export.cached,
                computed_tokens=len(export.tokens) - export.cached if status == "done" else 0,
                queue_s=(begun or self._clock()) - export.announced_at,
                compute_s=export.computed_at - begun if begun else 0.0,
                reason=reason,
            )
        )

    def _forget(self, export: _Export, *, drop: bool) -> None:
        """`drop`: the workers stop reading its blocks."""
        del self._exports[export.key]
        self._by_request.pop(export.request_id, None)
        if drop and export.phase in (Phase.COMPUTING, Phase.DRAINING):
            self._drops.append(export.request_id)

    # --- the agent's word ---

    def _read_news(self) -> None:
        while self._news:
            message, blob = self._news.popleft()
            if isinstance(message, PrefillStart):
                self._start(message, blob)
            elif isinstance(message, PrefillCancel):
                export = self._exports.get((message.session, message.epoch))
                if export is not None:
                    self._end(export, "cancelled")
            elif isinstance(message, Welcome):
                self._connection = message.connection
            elif isinstance(message, str):
                for export in list(self._exports.values()):
                    self._forget(export, drop=True)

    def _start(self, start: PrefillStart, blob: bytes) -> None:
        tokens = np.frombuffer(blob[: len(blob) // 4 * 4], dtype="<i4")
        refusal = self._refusal(start, blob, tokens)
        if refusal:
            self._port.send(PrefillEnd(start.session, start.epoch, "failed", reason=refusal))
            return
        export = _Export(start.session, start.epoch, start.send_from, tokens, self._clock())
        self._exports[export.key] = export

    def _refusal(self, start: PrefillStart, blob: bytes, tokens: npt.NDArray[np.int32]) -> str:
        """Why a start cannot be served, beginning with the kind of an error; or nothing."""
        if start.use_cache and not self._serves:
            return "invalid_request: this engine has no prefill role"
        if (start.session, start.epoch) in self._exports:
            return "invalid_request: the session exists already"
        if len(self._exports) >= MAX_EXPORTS:
            return "overloaded"
        if len(blob) % 4:
            return f"invalid_request: {len(blob)} bytes are not int32 token ids"
        # vLLM wants room for the token that it samples.
        if not 1 <= len(tokens) < self._max_tokens:
            return (
                f"invalid_request: {len(tokens)} tokens, this engine takes 1 to "
                f"{self._max_tokens - 1}"
            )
        if not 0 <= start.send_from <= len(tokens):
            return (
                f"invalid_request: send_from {start.send_from} is not within {len(tokens)} tokens"
            )
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self._vocab_size:
            wrong = low if low < 0 else high
            return f"invalid_request: token {wrong} is outside the vocabulary of {self._vocab_size}"
        longest = min(self._chunk_tokens, len(tokens)) * self._record_token_bytes
        if longest > self._port.ring_bytes:
            return (
                f"internal_error: a record of {longest} bytes does not fit the ring of "
                f"{self._port.ring_bytes}"
            )
        return ""


def _was_aborted(request: Any) -> bool:
    status = getattr(request, "status", None)
    return "ABORT" in str(getattr(status, "name", status)) or "ERROR" in str(status)


def _resumed(cached: Any) -> set[str]:
    """Requests that come back from preemption with other blocks; two ways to say it by version."""
    ids = getattr(cached, "resumed_req_ids", None)
    if ids is not None:
        return set(ids)
    flags = getattr(cached, "resumed_from_preemption", None) or ()
    return {name for name, again in zip(cached.req_ids, flags, strict=False) if again}
