"""KV on its way in: what the agent stages is copied into the pool, in bounded steps."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from local_engine.answer import Answer
from local_engine.kv.pool import KvPool
from local_engine.port import KvPort
from local_engine.scheduler import Scheduler
from local_engine.sequence import Phase
from prfaas.clock import Clock
from prfaas.errors import PrefillUnavailable
from prfaas.layout import Extent
from prfaas.snapshot import PREFIX_AT_D
from prfaas_connect.port.messages import Abort, Fetch, FetchDone, PortError, Release

LOCAL, STAGED, PARTIAL, REFUSED = "local", "staged", "partial", "refused"


@dataclass(slots=True)
class _Transfer:
    """One Fetch from sending it to its Release."""

    answer: Answer
    session: str
    have: int
    want: int
    offset: int = 0
    end: int = 0
    """Tokens [have, end) lie in staging."""
    extents: Iterator[Extent] = field(default_factory=lambda: iter(()))
    checkpoints: frozenset[int] = frozenset()
    """Tokens after which staging has the states."""
    whole: int = 0
    """Tokens [0, whole) are in the pool, in every layer."""
    digest: hashlib.blake2b | None = None


class KvImporter:
    """Owns the transfers of requests that wait for remote KV; used by the engine thread only.

    It moves its requests through the scheduler and tells the agent about each exactly once: Release
    after a FetchDone that staged something, Abort before any.
    """

    def __init__(
        self,
        pool: KvPool,
        port: KvPort,
        scheduler: Scheduler,
        clock: Clock,
        prefix: str,
        outcomes: Counter[str],
    ) -> None:
        self._pool = pool
        self._port = port
        self._scheduler = scheduler
        self._clock = clock
        self._prefix = prefix
        self._count = 0
        self._by_session: dict[str, _Transfer] = {}
        self._by_answer: dict[Answer, _Transfer] = {}
        # Requests whose prefix another's session is bringing.
        self._held: dict[Answer, str] = {}
        self.suspended = False
        """Set while a lost connection's transfers linger: the next one has other memory."""
        self.imported_tokens = 0
        self._outcomes = outcomes

    def check(self) -> None:
        """Raise AssertionError unless transfers and phases agree."""
        phases = (Phase.REMOTE, Phase.STAGED, Phase.IMPORTING)
        waiting = {seq for phase in phases for seq in self._scheduler.queue(phase)}
        known = {*self._by_answer, *self._held}
        if waiting != known or len(self._by_session) + len(self._held) != len(known):
            raise AssertionError(f"transfers of {known} but waiting are {waiting}")

    def fetch(self, answer: Answer) -> None:
        """A new request with transfer parameters: ask the agent for what is not cached here.

        Puts it into the scheduler, as REMOTE or, where there is nothing to ask, as WAITING. A
        prefix that is on its way for another request is waited for rather than fetched twice.
        """
        self._scheduler.hold_prefix(answer)
        twin = self._twin(answer)
        if twin is None:
            self._ask(answer)
        else:
            self._held[answer] = twin.session

    def _twin(self, answer: Answer) -> _Transfer | None:
        """A transfer that brings at least half of what this request lacks."""
        names = answer.matchable
        lacks = answer.target - answer.computed
        for transfer in self._by_session.values():
            shared = 0
            for mine, theirs in zip(names, transfer.answer.matchable, strict=False):
                if mine != theirs:
                    break
                shared += 1
            brings = self._resumable(transfer, shared * self._pool.block_tokens)
            if 2 * (brings - answer.computed) >= max(lacks, 1):
                return transfer
        return None

    def _resumable(self, transfer: _Transfer, shared: int) -> int:
        """How many of the first `shared` tokens others can go on from once this transfer is in.

        Its checkpoints are told only by the answer; they are taken to be on our own grid.
        """
        if self._pool.states is None:
            return shared
        grid = self._scheduler.state_tokens
        points = self._pool.layout.checkpoints(transfer.have, transfer.want, grid)
        return max((at for at in points if at <= shared and at % grid == 0), default=0)

    def _ask(self, answer: Answer) -> None:
        params = answer.request.kv_transfer_params
        assert params is not None
        want = answer.target
        have = min(answer.computed, want)
        self._count += 1
        session = f"{self._prefix}-{self._count}"
        fetch = Fetch(session, dict(params), have=have, want=want, uncached=want - have)
        try:
            sent = self._port.send(fetch, np.asarray(answer.tokens, dtype="<i4").tobytes())
        except PortError:  # Larger than a message may be; the parameters are the client's.
            self._go_local(answer, "bad_params")
            return
        if have == want:
            # The agent hears of it, so that the gateway does; nobody waits for its answer.
            self._go_local(answer, PREFIX_AT_D)
            return
        if not sent:
            self._go_local(answer, "no_agent")
            return
        answer.fetched_at = self._clock.now()
        answer.started(answer.fetched_at)
        transfer = _Transfer(answer, session, have, want)
        self._by_session[session] = self._by_answer[answer] = transfer

    def done(self, message: FetchDone) -> PrefillUnavailable | None:
        """The agent's answer. Returns the error with which the request must end, if it must."""
        transfer = self._by_session.get(message.session)
        if transfer is None:
            return None  # Aborted meanwhile; the agent frees what it staged when it sees the Abort.
        answer = transfer.answer
        answer.staged_at = self._clock.now()
        if message.status in (STAGED, PARTIAL):
            transfer.end = transfer.want if message.status == STAGED else message.token_end
            if not self._place(transfer, message):
                self._forget(transfer)
                self._port.send(Release(transfer.session, "failed"))
                self._go_local(answer, "bad_staging")
                return None
            answer.kv_status, answer.kv_reason = message.status, message.reason
            answer.kv_quality = message.quality
            self._scheduler.staged(answer)
            return None
        self._forget(transfer)
        if message.status == REFUSED:
            self._settle(answer, REFUSED, message.reason or REFUSED)
            text = message.message or f"remote prefill refused: {message.reason}"
            return PrefillUnavailable(text, retry_after_s=message.retry_after_s)
        self._go_local(answer, message.reason or "unknown")
        return None

    def answer_of(self, session: str) -> Answer | None:
        """The request that a session belongs to."""
        transfer = self._by_session.get(session)
        return transfer.answer if transfer else None

    def step(self, budget_bytes: int) -> bool:
        """Copy about `budget_bytes` out of staging. False: there was nothing to copy."""
        worked = self._ask_again()
        while budget_bytes > 0 and not self.suspended:
            answer = self._scheduler.next_import()
            if answer is None:
                break
            assert isinstance(answer, Answer)
            transfer = self._by_answer[answer]
            worked = True
            try:
                budget_bytes = self._copy(transfer, budget_bytes)
            except PortError:
                break  # The agent is gone; the engine hears of it and calls `disconnected`.
        return worked

    def preempted(self, answer: Answer, before: Phase) -> None:
        """The scheduler took the request's blocks; it prefills here later."""
        if self._give_up(answer, before):
            self._settle(answer, LOCAL, "preempted")

    def cancel(self, answer: Answer) -> None:
        """The request is about to end; free what the agent holds for it."""
        if self._give_up(answer, answer.phase):
            self._settle(answer, "aborted", "cancelled")

    def disconnected(self) -> None:
        """All sessions are void. Chunks that are in the pool whole are kept."""
        held, self._held = self._held, {}
        for answer in held:
            self._go_local(answer, "agent_lost")
        for transfer in list(self._by_session.values()):
            answer = transfer.answer
            self._forget(transfer)
            # Reaches an agent only if this session was opened at one that came back meanwhile.
            self._port.send(Abort(transfer.session))
            # States may be half of one checkpoint and half of the next; those kept are found again.
            usable = self._pool.states is None and transfer.whole > transfer.have
            if answer.phase is Phase.IMPORTING and usable:
                self._finish(transfer, transfer.whole)
                self._settle(answer, PARTIAL, "agent_lost")
                self._scheduler.imported(answer, transfer.whole)
            else:
                self._go_local(answer, "agent_lost")

    def _ask_again(self) -> bool:
        """Requests that waited for another's transfer fetch what they lack once it is over."""
        over = [a for a, session in self._held.items() if session not in self._by_session]
        for answer in over:
            del self._held[answer]
            self._scheduler.match_again(answer)
            twin = self._twin(answer)
            if twin is None:
                self._ask(answer)
            else:
                self._held[answer] = twin.session
        return bool(over)

    def _place(self, transfer: _Transfer, message: FetchDone) -> bool:
        """Where the staged tensors lie; False if the message contradicts itself or the request."""
        welcome = self._port.welcome
        if welcome is None or message.chunk_tokens < 1:
            return False
        if not transfer.have < transfer.end <= transfer.want:
            return False
        layout, grid = self._pool.layout, message.chunk_tokens
        if self._pool.states is not None:
            points = layout.checkpoints(transfer.have, transfer.want, grid)
            if transfer.end not in points:
                return False
            transfer.checkpoints = frozenset(points)
        nbytes = layout.extent_bytes(transfer.have, transfer.end, grid)
        if message.staging_offset < 0 or message.staging_offset + nbytes > welcome.staging_bytes:
            return False
        transfer.offset = message.staging_offset
        transfer.whole = transfer.have
        transfer.extents = layout.extents(transfer.have, transfer.end, grid)
        if welcome.verify_import:
            transfer.digest = hashlib.blake2b(digest_size=16)
        return True

    def _copy(self, transfer: _Transfer, budget_bytes: int) -> int:
        """Copy tensors until the budget is used up or all are in. Returns what is left of it."""
        last = len(self._pool.places) - 1
        while budget_bytes > 0 and not self.suspended:
            extent = next(transfer.extents, None)
            if extent is None:
                self._complete(transfer)
                break
            self._copy_one(transfer, extent)
            if extent.layer == last:
                self._span_done(transfer, extent.span.end)
            budget_bytes -= extent.nbytes
        return budget_bytes

    def _copy_one(self, transfer: _Transfer, extent: Extent) -> None:
        """One tensor from staging to its pool, read back where that is asked for."""
        pool, answer, span = self._pool, transfer.answer, extent.span
        staged = self._port.staging(transfer.offset + extent.offset, extent.nbytes)
        back = np.empty(extent.nbytes if transfer.digest is not None else 0, dtype=np.uint8)
        index = pool.places[extent.layer].index
        if extent.group == pool.kv_group:
            pool.load(index, answer.table, span.start, span.end, staged)
            if transfer.digest is not None:
                pool.export(index, answer.table, span.start, span.end, back)
        else:
            assert pool.states is not None
            pool.states.load(index, answer.state, staged)
            if transfer.digest is not None:
                pool.states.export(index, answer.state, back)
        if transfer.digest is not None:
            transfer.digest.update(back.data)

    def _span_done(self, transfer: _Transfer, end: int) -> None:
        """All layers of the span that ends at `end` are in. Its states, too, at a checkpoint: they
        are kept for reuse before those of the next one take their place.
        """
        if self._pool.states is None:
            transfer.whole = end
        elif end in transfer.checkpoints:
            transfer.whole = end
            self._scheduler.computed(transfer.answer, end)

    def _complete(self, transfer: _Transfer) -> None:
        answer = transfer.answer
        self._forget(transfer)
        digest = transfer.digest.hexdigest() if transfer.digest else ""
        tokens = transfer.end - transfer.have
        self._port.send(Release(transfer.session, "imported", tokens, digest))
        self._finish(transfer, transfer.end)
        self._settle(answer, answer.kv_status, answer.kv_reason)
        self._scheduler.imported(answer, transfer.end)

    def _finish(self, transfer: _Transfer, end: int) -> None:
        answer = transfer.answer
        answer.imported_at = self._clock.now()
        answer.imported_tokens = end - transfer.have
        answer.cached_tokens = end
        self.imported_tokens += answer.imported_tokens

    def _give_up(self, answer: Answer, phase: Phase) -> bool:
        """False: nothing was under way."""
        if self._held.pop(answer, None) is not None:
            return True
        transfer = self._by_answer.get(answer)
        if transfer is None:
            return False
        self._forget(transfer)
        if phase is Phase.REMOTE:
            self._port.send(Abort(transfer.session))
        else:
            self._port.send(Release(transfer.session, "aborted"))
        return True

    def _go_local(self, answer: Answer, reason: str) -> None:
        self._scheduler.fall_back(answer)
        self._settle(answer, LOCAL, reason)

    def _settle(self, answer: Answer, status: str, reason: str) -> None:
        """The one outcome of a request's transfer parameters."""
        answer.kv_status, answer.kv_reason = status, reason
        self._outcomes[STAGED if status == STAGED else reason] += 1

    def _forget(self, transfer: _Transfer) -> None:
        del self._by_session[transfer.session]
        del self._by_answer[transfer.answer]
