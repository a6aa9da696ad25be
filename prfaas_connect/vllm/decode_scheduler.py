"""Decode side in vLLM's scheduler process: which requests wait for remote KV, and for what.

A request waits as "unknown" (None) while its transfer runs, claims blocks once its KV is staged,
and is loaded by the worker over the steps that follow. What the agent refuses claims one block,
whose load then fails, which is how a connector ends a request. (vLLM admits it, like any other,
once its whole prompt would fit into free blocks.)
"""

from __future__ import annotations

import enum
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from prfaas_connect.port.messages import (
    Abort,
    Fetch,
    FetchDone,
    PortError,
    PortMessage,
    Release,
    Welcome,
)
from prfaas_connect.vllm.plan import DecodePlan, Load

log = logging.getLogger(__name__)

IDLE_WAIT_S = 0.004
"""A step with nothing to compute waits so long for news: vLLM steps without pause while requests
wait, and an unanswered one would cost a core."""


class Port(Protocol):
    """What is needed of `EnginePort`."""

    def send(self, message: PortMessage, blob: bytes | memoryview = b"") -> bool: ...


class Phase(enum.Enum):
    """Where a request's transfer stands."""

    NEW = "new"
    """Not asked for yet: what the prefix cache has is not known, or another brings the same."""
    FETCHING = "fetching"
    STAGED = "staged"
    """All that will come lies in staging, for vLLM to claim blocks."""
    REFUSED = "refused"
    """To be failed: waits for a block to fail on."""
    LOADING = "loading"
    """Blocks are claimed; the worker copies, or fails them."""


@dataclass(slots=True, eq=False)
class _Transfer:
    request_id: str
    session: str
    params: dict[str, Any]
    tokens: npt.NDArray[np.int32]
    """All of the prompt."""
    phase: Phase = Phase.NEW
    computed: int = -1
    """Tokens in the prefix cache as vLLM said last; -1: it has not."""
    twin: _Transfer | None = None
    """Brings at least half of what this one lacks."""
    have: int = 0
    end: int = 0
    """Tokens [have, end) lie in staging."""
    offset: int = 0
    chunk_tokens: int = 0
    connection: str = ""
    blocks: frozenset[int] = frozenset()
    holds_staging: bool = False
    loaded: int = 0
    cancelled: bool = False
    failed: bool = False
    message: str = ""

    @property
    def want(self) -> int:
        return len(self.tokens) - 1


class DecodeScheduler:
    """Owns the transfers of requests that wait for remote KV; vLLM's scheduler thread calls it.

    `connected`, `disconnected` and `answered` come from the port's reader thread. The agent is
    told about each transfer exactly once: Release after an answer that staged something, Abort
    before any. `cached_tokens`, where vLLM lets us look, says what its prefix cache has.
    """

    def __init__(
        self,
        port: Port,
        *,
        epoch: str,
        block_tokens: int,
        session_bytes: Callable[[int, int], int],
        cached_tokens: Callable[[Any], int] | None = None,
        idle_wait_s: float = IDLE_WAIT_S,
    ) -> None:
        self._port = port
        self._epoch = epoch
        self._block_tokens = block_tokens
        self._session_bytes = session_bytes
        self.cached_tokens = cached_tokens
        self._idle_wait_s = idle_wait_s
        self._numbers = itertools.count(1)
        self._waiting: dict[str, _Transfer] = {}
        """By request: not loading yet."""
        self._loading: dict[str, _Transfer] = {}
        """By request: until the worker reports, also when vLLM has forgotten the request."""
        self._by_session: dict[str, _Transfer] = {}
        self._seen: set[str] = set()
        """Requests that are not over: each is asked for once, whatever vLLM asks later."""
        self._plan = DecodePlan()
        self._welcome: Welcome | None = None
        """Of the connection that the news read so far are of; the port may be further."""
        self._news: deque[FetchDone | Welcome | str] = deque()
        self._arrived = threading.Event()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._loading)

    # --- the port's reader thread ---

    def connected(self, welcome: Welcome) -> None:
        """A connection is up."""
        self._tell(welcome)

    def disconnected(self, reason: str) -> None:
        """It is gone, and with it every session that has not been claimed."""
        self._tell(reason)

    def answered(self, done: FetchDone) -> None:
        """The agent's answer to a Fetch."""
        self._tell(done)

    def _tell(self, news: FetchDone | Welcome | str) -> None:
        self._news.append(news)
        self._arrived.set()

    # --- vLLM's scheduler thread ---

    def new_request(self, request: Any) -> None:
        """A request came: ask for its KV at once where it is known what is here already.

        May be called again for the same request.
        """
        if request.request_id in self._seen or not is_ours(request):
            return
        self._seen.add(request.request_id)
        transfer = _Transfer(
            request.request_id,
            f"{self._epoch}-{next(self._numbers)}",
            dict(request.kv_transfer_params),
            np.asarray(request.prompt_token_ids, dtype="<i4"),
        )
        self._waiting[transfer.request_id] = transfer
        if self.cached_tokens is not None:
            transfer.computed = self.cached_tokens(request)
            self._ask(transfer)

    def matched_tokens(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """vLLM's get_num_new_matched_tokens: asked in every step until the request is scheduled."""
        self._read_news()
        transfer = self._waiting.get(request.request_id)
        if transfer is None:
            return 0, False
        transfer.computed = computed
        if transfer.phase in (Phase.NEW, Phase.FETCHING):
            return None, False
        if transfer.phase is Phase.REFUSED:
            return 1, True
        tokens = self._usable_end(transfer) - computed
        return (tokens, True) if tokens > 0 else (0, False)

    def allocated(self, request: Any, block_ids: Sequence[int], external_tokens: int) -> None:
        """vLLM's update_state_after_alloc: the blocks are there, or the request goes on without."""
        transfer = self._waiting.get(request.request_id)
        if transfer is None:
            return
        if external_tokens == 0:
            # All of it is in the prefix cache by now, or another connector brings it.
            useless = transfer.phase is Phase.STAGED and transfer.computed >= transfer.end
            self._drop(transfer, "imported" if useless else "aborted")
            return
        del self._waiting[transfer.request_id]
        self._loading[transfer.request_id] = transfer
        start, end = transfer.computed, transfer.computed + external_tokens
        fits = len(block_ids) * self._block_tokens >= end
        first = start // self._block_tokens
        transfer.blocks = frozenset(block_ids[first:] if fits else block_ids)
        if transfer.phase is Phase.STAGED and fits and end <= transfer.end:
            transfer.loaded = end - transfer.have
            self._plan.loads.append(
                Load(
                    transfer.request_id,
                    transfer.session,
                    transfer.connection,
                    list(block_ids),
                    first,
                    transfer.have,
                    transfer.end,
                    start,
                    end,
                    transfer.offset,
                    transfer.chunk_tokens,
                )
            )
        else:
            if transfer.phase is Phase.STAGED:
                log.error("%d blocks of %s do not hold %d tokens", len(block_ids), request, end)
            self._plan.failures[transfer.request_id] = list(transfer.blocks)
        transfer.phase = Phase.LOADING

    def plan(self, scheduled_tokens: int) -> DecodePlan:
        """What the worker is to do in this step, which computes so many tokens."""
        self._read_news()
        for transfer in list(self._waiting.values()):
            if transfer.phase is Phase.NEW and transfer.computed >= 0:
                self._ask(transfer)
        plan, self._plan = self._plan, DecodePlan()
        if self._welcome is not None:
            plan.connection = self._welcome.connection
            plan.verify = self._welcome.verify_import
        if not (plan or scheduled_tokens or self._loading) and self._waiting:
            self._arrived.wait(self._idle_wait_s)
        return plan

    def loaded(self, done: Iterable[str], bad_blocks: set[int], digests: dict[str, str]) -> None:
        """The worker reports a step: requests whose loads have ended, and blocks that failed."""
        for transfer in self._loading.values():
            transfer.failed |= not transfer.blocks.isdisjoint(bad_blocks)
        for request_id in done:
            ended = self._loading.pop(request_id, None)
            if ended is not None:
                result = "failed" if ended.failed else "aborted" if ended.cancelled else "imported"
                self._release(ended, result, digests.get(ended.session, ""))

    def finished(self, request: Any) -> None:
        """vLLM is done with a request, however it ended."""
        self._seen.discard(request.request_id)
        transfer = self._waiting.get(request.request_id)
        if transfer is not None:
            self._drop(transfer, "aborted")
        transfer = self._loading.get(request.request_id)
        if transfer is not None and not transfer.cancelled:
            transfer.cancelled = True
            self._plan.cancels.append(request.request_id)

    # --- one transfer ---

    def _ask(self, transfer: _Transfer) -> None:
        """Send its Fetch, unless another's brings the same or there is nothing to bring."""
        if transfer.twin is None:
            transfer.twin = self._twin_of(transfer)
        if transfer.twin is not None:
            return
        have = min(transfer.computed, transfer.want)
        want = transfer.want
        fetch = Fetch(transfer.session, transfer.params, have=have, want=want, uncached=want - have)
        try:
            sent = self._port.send(fetch, transfer.tokens.tobytes())
        except PortError as exc:  # larger than a message may be; the parameters are the client's
            log.warning("%s is served without its agent: %s", transfer.request_id, exc)
            sent = False
        if not sent or have == want:
            # Nobody waits for the answer of one that has everything; the agent counts it.
            self._forget(transfer)
            return
        transfer.have, transfer.phase = have, Phase.FETCHING
        self._by_session[transfer.session] = transfer

    def _twin_of(self, transfer: _Transfer) -> _Transfer | None:
        lacks = transfer.want - transfer.computed
        for other in [*self._waiting.values(), *self._loading.values()]:
            if other.session not in self._by_session or other.phase is Phase.REFUSED:
                continue
            if same_salt(other.params, transfer.params):
                shared = common_prefix(transfer.tokens, other.tokens) // self._block_tokens
                if 2 * (shared * self._block_tokens - transfer.computed) >= max(lacks, 1):
                    return other
        return None

    def _read_news(self) -> None:
        self._arrived.clear()
        while self._news:
            news = self._news.popleft()
            if isinstance(news, FetchDone):
                self._done(news)
            elif isinstance(news, Welcome):
                self._welcome = news
            else:
                self._welcome = None
                self._void(news)

    def _done(self, done: FetchDone) -> None:
        transfer = self._by_session.get(done.session)
        if transfer is None or transfer.phase is not Phase.FETCHING:
            return  # Given up meanwhile; the agent frees what it staged when it sees the Abort.
        if done.status == "refused":
            log.info("%s is refused: %s", transfer.request_id, done.message or done.reason)
            transfer.phase = Phase.REFUSED
            self._forget_session(transfer)
        elif done.status in ("staged", "partial"):
            transfer.holds_staging = True
            if self._place(transfer, done):
                transfer.phase = Phase.STAGED
            else:
                log.error("the agent staged %s where it cannot be: %s", transfer.request_id, done)
                self._drop(transfer, "failed")
        else:
            self._forget(transfer)

    def _place(self, transfer: _Transfer, done: FetchDone) -> bool:
        """Where the staged tensors lie; False if the message contradicts itself or the request."""
        welcome = self._welcome
        end = transfer.want if done.status == "staged" else done.token_end
        if welcome is None or done.chunk_tokens < 1 or not transfer.have < end <= transfer.want:
            return False
        nbytes = self._session_bytes(transfer.have, end)
        if done.staging_offset < 0 or done.staging_offset + nbytes > welcome.staging_bytes:
            return False
        transfer.end, transfer.offset = end, done.staging_offset
        transfer.chunk_tokens, transfer.connection = done.chunk_tokens, welcome.connection
        return True

    def _usable_end(self, transfer: _Transfer) -> int:
        """Up to which token staging continues what the prefix cache has.

        What came in part ends at a whole block: earlier versions count every block that was
        loaded as full.
        """
        if transfer.computed < transfer.have:
            return 0  # What was here when it was asked for has been evicted.
        if transfer.end == transfer.want:
            return transfer.end
        return transfer.end // self._block_tokens * self._block_tokens

    def _void(self, reason: str) -> None:
        """The connection is gone: who has not claimed blocks goes on alone."""
        log.info("the agent is gone (%s); %d requests go on alone", reason, len(self._by_session))
        for transfer in list(self._waiting.values()):
            if transfer.phase is Phase.REFUSED:
                continue
            if transfer.phase is not Phase.NEW:
                # Reaches an agent only if this session was opened at one that came back meanwhile.
                self._port.send(Abort(transfer.session))
                transfer.holds_staging = False
            self._forget(transfer)

    def _drop(self, transfer: _Transfer, result: str) -> None:
        """Give up a transfer that is not loading, and free what the agent holds for it."""
        if transfer.phase is Phase.FETCHING and not transfer.holds_staging:
            self._port.send(Abort(transfer.session))
        transfer.loaded = 0
        self._release(transfer, result, "")
        self._forget(transfer)

    def _release(self, transfer: _Transfer, result: str, digest: str) -> None:
        if transfer.holds_staging:
            transfer.holds_staging = False
            tokens = transfer.loaded if result == "imported" else 0
            self._port.send(Release(transfer.session, result, tokens, digest))
        self._forget_session(transfer)

    def _forget(self, transfer: _Transfer) -> None:
        """vLLM is on its own with this request from now on."""
        self._waiting.pop(transfer.request_id, None)
        self._forget_session(transfer)

    def _forget_session(self, transfer: _Transfer) -> None:
        """Whoever waited for this one to bring its prefix asks anew."""
        self._by_session.pop(transfer.session, None)
        for other in self._waiting.values():
            if other.twin is transfer:
                other.twin, other.computed = None, -1


def is_ours(request: Any) -> bool:
    """Whether a request carries a gateway's transfer parameters."""
    params = request.kv_transfer_params
    if not isinstance(params, dict) or "transfer_id" not in params:
        return False
    tokens = request.prompt_token_ids
    return tokens is not None and len(tokens) > 1


def same_salt(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two requests may share KV."""
    return bool(one.get("salt") == other.get("salt"))


def common_prefix(one: npt.NDArray[np.int32], other: npt.NDArray[np.int32]) -> int:
    """Tokens that both begin with."""
    shorter = min(len(one), len(other))
    differs = np.flatnonzero(one[:shorter] != other[:shorter])
    return int(differs[0]) if len(differs) else shorter
