"""One fetch at D: staging, the instances of the plan in order, the answer, the outcome."""

from __future__ import annotations

import asyncio
import enum
import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

from prfaas.clock import Clock, Deadline
from prfaas.codecs import CodecSet
from prfaas.errors import (
    IncompatibleLayout,
    InvalidRequest,
    PrefillTimeout,
    PrfaasError,
    SessionLost,
)
from prfaas.kvport import EngineConn, PortClosed
from prfaas.limits import Limits
from prfaas.placement import StagingMap
from prfaas.session_messages import SessionOpen
from prfaas.snapshot import Outcome
from prfaas.trace_context import parse_traceparent
from prfaas.transfer import TransferParams
from prfaas_connect.port.messages import Fetch, FetchDone, Release
from remote_prefill.metrics import AgentMetrics
from remote_prefill.peer_link import PeerLink, new_session_id
from remote_prefill.receiver import Receiver
from remote_prefill.staging import StagingExtent, StagingPool
from remote_prefill.tally import Tally, reason_of
from remote_prefill.worth_waiting import LOOK_S, SLOWER, RecomputeSeconds, WorthWaiting

log = logging.getLogger(__name__)

RETRY_AFTER_S = 1.0
LOST_RETRIES = 2
"""So often an instance that has lost the session is tried again."""
DIGEST_BYTES = 16


class FetchState(enum.StrEnum):
    """Where a fetch stands."""

    WAITING = "waiting"
    """For staging."""
    RECEIVING = "receiving"
    STAGED = "staged"
    """The engine owns the extent until it sends Release."""
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class FetchContext:
    """What all fetches of one engine connection share."""

    conn: EngineConn
    staging: StagingPool
    limits: Limits
    metrics: AgentMetrics
    clock: Clock
    hold_until_sealed: bool
    codecs: CodecSet
    recompute_s: RecomputeSeconds
    slower_by: float
    """A transfer that is so much slower is given up; 0: never."""
    changed: Callable[[], None]
    """Called when staging was taken."""
    ended: Callable[[FetchJob, Outcome], None]
    """Called once for each fetch, with its outcome."""


class FetchJob:
    """One fetch from its admission to its outcome; owns its staging extent.

    `run` answers the engine; afterwards `release` or `abort` ends it. `abort` may come any time.
    """

    def __init__(
        self,
        fetch: Fetch,
        tokens: bytes,
        params: TransferParams,
        links: list[PeerLink],
        context: FetchContext,
    ) -> None:
        self.fetch = fetch
        self.params = params
        self.state = FetchState.WAITING
        self._tokens = tokens[: 4 * fetch.want]
        self._links = links
        self._context = context
        self._tally = Tally()
        self._started_s = context.clock.now()
        self._staged_s = 0.0
        self._watermark = fetch.have
        self._imported_tokens = 0
        self._extent: StagingExtent | None = None
        self._map: StagingMap | None = None
        self._epoch = 0
        self._status = ""
        self._reason = ""
        self.parent = parse_traceparent(params.traceparent or "")
        self.span = self.parent.child() if self.parent is not None else None
        self._task: asyncio.Task[None] | None = None
        self._overdue: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return (
            f"<Fetch {self.params.transfer_id} {self.state.name} "
            f"[{self.fetch.have},{self.fetch.want}) whole to {self._watermark}>"
        )

    def start(self) -> None:
        """Run as a task of its own."""
        self._task = asyncio.create_task(self._run(), name=f"fetch {self.params.transfer_id}")

    async def abort(self, status: str, reason: str) -> None:
        """End now, with this outcome: no answer follows, staging is free when this returns."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._end(status, reason)

    async def release(self, message: Release) -> None:
        """The engine is done with the extent."""
        if self.state is not FetchState.STAGED:
            log.warning("release of %r, which is not staged", self)
            return
        self._tally.add_phase("import", self._context.clock.now() - self._staged_s)
        result = message.result
        if result == "imported" and message.digest and not await self._digest_agrees(message):
            result = "digest_mismatch"
            log.error("import of %r read back other bytes than were staged", self)
        self._context.metrics.imports.labels(result).inc()
        self._imported_tokens = message.imported_tokens
        if result == "imported":
            self._end(self._status, self._reason)
        elif result == "aborted":
            self._end("aborted", "")
        else:
            self._end("failed", f"import_{result}" if result == "failed" else result)

    # --- bringing ---

    async def _run(self) -> None:
        try:
            error = await self._bring()
        except Exception as exc:  # the engine must hear something, or its request hangs
            log.exception("%r", self)
            error = PrfaasError(f"internal error: {exc!r}")
            self._reason = reason_of(error)
        try:
            self._answer(error)
        except PortClosed:
            log.info("%r: the engine left before the answer", self)

    async def _bring(self) -> PrfaasError | None:
        """All of [have, want) into staging; the last error where that did not work out."""
        context = self._context
        limits = context.limits
        limit_s = min(self.params.deadline_s, limits.transfer_timeout_s)
        deadline = Deadline.after(limit_s, context.clock)
        nbytes = context.conn.layout.session_bytes(self.fetch.have, self.fetch.want)
        try:
            wait_s = deadline.capped(limits.staging_timeout_s)
            self._extent = await context.staging.reserve(nbytes, wait_s)
        except PrfaasError as exc:
            full = not isinstance(exc, InvalidRequest)
            self._reason = "staging_full" if full else "staging_too_small"
            return exc
        finally:
            self._tally.add_phase("staging", context.clock.now() - self._started_s)
        self.state = FetchState.RECEIVING
        context.changed()
        error: PrfaasError | None = None
        for link in self._links:
            if deadline.expired():
                break
            for _ in range(1 + LOST_RETRIES):
                error = await self._try(link, self._extent, deadline)
                if not isinstance(error, SessionLost) or deadline.expired() or self._whole:
                    break
                # Its agent has restarted: what it computed is in the engine's prefix cache.
                await link.wait_ready(deadline.capped(limits.connect_timeout_s))
            if error is None:
                return None
            self._reason = reason_of(error)
            if self._whole:
                break  # only the seal did not come: there is nothing left to ask anybody for
            if isinstance(error, PrefillTimeout) and error.phase == SLOWER:
                break  # which is what D will do
        return error or PrefillTimeout("no time left for any instance", phase="total")

    @property
    def _whole(self) -> bool:
        return self._watermark >= self.fetch.want

    async def _try(
        self, link: PeerLink, extent: StagingExtent, deadline: Deadline
    ) -> PrfaasError | None:
        """What is missing from one instance; its error, with whole chunks kept."""
        self._epoch += 1
        if link.name not in self._tally.tried[-1:]:
            self._tally.tried.append(link.name)
            self._tally.tried_reasons.append("")
        receivers: list[Receiver] = []
        result = "complete"
        try:
            remote = link.require_ready()
            staging = self._map = self._map_for(link, remote.chunk_tokens, extent)
            request = SessionOpen(
                transfer_id=self.params.transfer_id,
                model=remote.model,
                tokens=self._tokens,
                send_from=self._watermark,
                salt=self.params.salt,
                use_cache=True,
                quality=self.params.quality,
                codecs=self._context.codecs.names,
                deadline_s=max(deadline.remaining_s(), 1e-3),
                lease_s=self._context.limits.lease_s,
                engine_epoch=remote.engine_epoch,
                hold_until_sealed=self._context.hold_until_sealed,
                tenant=self.params.tenant,
                traceparent=self.span.traceparent if self.span is not None else "",
            )
            fetching = link.fetch(
                request,
                # Another number for each try: a Cancel of the last one must not hit this one.
                session=new_session_id(),
                epoch=self._epoch,
                staging=staging,
                target=extent,
                deadline=deadline,
                watch=receivers.append,
            )
            if self.params.on_failure == "local" and self._context.slower_by > 0:
                await self._while_worth_it(asyncio.ensure_future(fetching), staging, receivers)
            else:
                await fetching
            self._tally.tried_reasons[-1] = ""
            return None
        except PrfaasError as exc:
            link.suspect(exc)
            result = exc.kind
            self._tally.tried_reasons[-1] = reason_of(exc)
            log.info("%r: %s failed kind=%s: %s", self, link.name, exc.kind, exc.message)
            return exc
        finally:
            for receiver in receivers:
                self._tally.add(link, receiver, self._context.codecs)
                if self._map is not None:
                    whole = self._map.whole_end(receiver.machine.ledger.resumable)
                    self._watermark = max(self._watermark, whole)
            self._context.metrics.tries.labels(link.peer, link.instance, result).inc()

    async def _while_worth_it(
        self, fetching: asyncio.Future[None], staging: StagingMap, receivers: list[Receiver]
    ) -> None:
        """Until it has ended. Raises what it does, or that D computes the rest sooner."""
        worth, now = WorthWaiting(self._context.slower_by), self._context.clock.now
        try:
            while not (await asyncio.wait({fetching}, timeout=LOOK_S))[0]:
                if not receivers:
                    continue
                book = receivers[-1].machine.ledger
                whole = max(self._watermark, staging.whole_end(book.resumable))
                recompute_s = self._context.recompute_s(self.fetch.want - whole, whole)
                wanted = book.layout.extent_bytes(book.start, book.end, book.chunk_tokens)
                if not worth.look(now(), book.raw_bytes, wanted - book.raw_bytes, recompute_s):
                    raise PrefillTimeout(
                        f"{wanted - book.raw_bytes} bytes are still to come, and D computes the "
                        f"rest in {recompute_s:.3g} s",
                        phase=SLOWER,
                    )
            await fetching
        finally:
            if not fetching.done():
                fetching.cancel()
                await asyncio.gather(fetching, return_exceptions=True)

    def _map_for(self, link: PeerLink, chunk_tokens: int, extent: StagingExtent) -> StagingMap:
        """Where what an instance sends has its places. Raises IncompatibleLayout where it has other
        checkpoints than what came from another one.
        """
        layout, old = self._context.conn.layout, self._map
        other_points = layout.state_bytes and old is not None and old.chunk_tokens != chunk_tokens
        if old is not None and not other_points:
            return old
        if old is not None and self._tally.wire_bytes:
            raise IncompatibleLayout(
                f"{link.name} has checkpoints on a grid of {chunk_tokens} tokens, what is staged "
                f"has them on one of {old.chunk_tokens}",
                field="chunk_tokens",
            )
        have, want = self.fetch.have, self.fetch.want
        return StagingMap(layout, have, want, chunk_tokens, extent.buffer)

    def _answer(self, error: PrfaasError | None) -> None:
        """FetchDone; the extent stays with the engine only where there is something in it."""
        have, want = self.fetch.have, self.fetch.want
        if error is None:
            self._hand_over("staged", want)
        elif self.params.on_failure == "reject":
            self._refuse("refused", error)
        elif self._watermark > have:
            self._hand_over("partial", self._watermark)
        else:
            self._refuse("local", error)

    def _hand_over(self, status: str, token_end: int) -> None:
        extent, staging_map = self._extent, self._map
        if extent is None or staging_map is None:
            raise RuntimeError(f"{self!r} has nothing staged")
        self.state = FetchState.STAGED
        self._status = status
        if status == "staged":
            self._reason = ""
        self._staged_s = self._context.clock.now()
        self._overdue = asyncio.get_running_loop().call_later(
            self._context.limits.request_timeout_s, self._import_overdue
        )
        self._context.conn.send(
            FetchDone(
                session=self.fetch.session,
                status=status,
                reason=self._reason,
                token_end=token_end,
                staging_offset=extent.offset,
                chunk_tokens=staging_map.chunk_tokens,
                quality=self._tally.quality or "",
            )
        )

    def _refuse(self, status: str, error: PrfaasError) -> None:
        done = FetchDone(
            session=self.fetch.session,
            status=status,
            reason=self._reason or reason_of(error),
            retry_after_s=error.retry_after_s or RETRY_AFTER_S,
            message=error.message,
        )
        self._end(status, done.reason)
        self._context.conn.send(done)

    # --- the end ---

    def _import_overdue(self) -> None:
        """Memory that an engine may still read is not given to others: cut the engine instead."""
        log.error("%r: the engine never released its staging; closing its port", self)
        self._context.conn.close()

    async def _digest_agrees(self, message: Release) -> bool:
        if self._extent is None or self._map is None:
            return False
        have, end = self.fetch.have, self.fetch.have + message.imported_tokens
        nbytes = self._map.layout.extent_bytes(have, end, self._map.chunk_tokens)
        staged = self._extent.buffer[:nbytes]
        digest = await asyncio.to_thread(hashlib.blake2b, staged.data, digest_size=DIGEST_BYTES)
        return digest.hexdigest() == message.digest

    def _end(self, status: str, reason: str) -> None:
        """Free the extent and report, once."""
        if self.state is FetchState.ENDED:
            return
        self.state = FetchState.ENDED
        if self._overdue is not None:
            self._overdue.cancel()
        if self._extent is not None:
            self._extent.release()
        tally, fetch = self._tally, self.fetch
        tally.add_phase("total", self._context.clock.now() - self._started_s)
        self._context.ended(
            self,
            Outcome(
                transfer_id=self.params.transfer_id,
                status=status,
                reason=reason,
                peer=tally.peer,
                instance=tally.instance,
                have_tokens=fetch.have,
                want_tokens=fetch.want,
                received_tokens=self._imported_tokens,
                remote_cached_tokens=tally.remote_cached_tokens,
                raw_bytes=tally.raw_bytes,
                wire_bytes=tally.wire_bytes,
                hidden_wire_bytes=tally.hidden_wire_bytes,
                phases=dict(tally.phases),
                tried=tuple(tally.tried),
                quality=tally.quality or "",
                codecs=dict(tally.codecs),
                tried_reasons=tuple(tally.tried_reasons),
            ),
        )
