"""One client request as the engine runs it: a sequence with sampling, a stream and timings."""

from __future__ import annotations

from local_engine.kv.pool import KvPool
from local_engine.penalties import History, penalises
from local_engine.requests import (
    EngineRequest,
    FinishReason,
    RequestTimings,
    TokenEvent,
    TokenLogprobs,
)
from local_engine.sampler import TokenDraw
from local_engine.sequence import Sequence
from local_engine.stream import TokenStream
from prfaas.errors import PrfaasError


class Answer(Sequence):
    """A request and the answer to it so far. The engine ends it; nothing to close."""

    def __init__(
        self,
        request: EngineRequest,
        order: int,
        seed: int,
        pool: KvPool,
        stream: TokenStream,
        now: float,
        *,
        eos_ids: frozenset[int],
        max_context: int,
        shares: bool,
    ) -> None:
        super().__init__(
            request.request_id,
            order,
            request.prompt_tokens,
            request.cache_salt,
            pool,
            shares=shares,
        )
        self.request = request
        self.stream = stream
        self.kv_status = ""
        self.kv_reason = ""
        self.kv_quality = ""
        self.imported_tokens = 0
        self.submitted_at = now
        self._seed = seed
        self._history: History | None = None
        self._stop_ids = request.sampling.stop_token_ids
        if not request.sampling.ignore_eos:
            self._stop_ids = self._stop_ids | eos_ids
        self._max_tokens = min(request.sampling.max_tokens, max_context - self.prompt_tokens)
        # Moments of the engine's clock; None until they come.
        self.started_at: float | None = None
        self.fetched_at: float | None = None
        self.staged_at: float | None = None
        self.imported_at: float | None = None
        self.prefill_from: float | None = None
        self.prefill_to: float | None = None
        self.first_token_at: float | None = None

    @property
    def generated(self) -> int:
        """Tokens drawn so far."""
        return len(self.tokens) - self.prompt_tokens

    def next_draw(self) -> TokenDraw:
        """How its next token is drawn."""
        params, history = self.request.sampling, None
        if penalises(params):
            if self._history is None:
                self._history = History(self.tokens[: self.prompt_tokens])
            history = self._history
            history.add(self.tokens[self.prompt_tokens + history.answered :])
        return TokenDraw(params, self._seed, self.generated, history)

    def finish_reason(self) -> FinishReason | None:
        """Whether the newest token ends the answer."""
        if self.tokens[-1] in self._stop_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.generated >= self._max_tokens else None

    def started(self, now: float) -> None:
        """The engine does something for it, for the first time or again."""
        if self.started_at is None:
            self.started_at = now

    def prefilled(self, started: float, ended: float) -> None:
        """One of its chunks was computed."""
        self.started(started)
        if self.prefill_from is None:
            self.prefill_from = started
        self.prefill_to = ended

    def event(
        self,
        token_ids: tuple[int, ...],
        finish_reason: FinishReason | None = None,
        error: PrfaasError | None = None,
        logprobs: tuple[TokenLogprobs, ...] = (),
    ) -> TokenEvent:
        """What the client is told now."""
        return TokenEvent(
            token_ids=token_ids,
            finish_reason=finish_reason,
            cached_tokens=self.cached_tokens,
            imported_tokens=self.imported_tokens,
            kv_status=self.kv_status,
            kv_reason=self.kv_reason,
            kv_quality=self.kv_quality,
            error=error,
            logprobs=logprobs,
            timings=RequestTimings(
                queue_s=_between(self.submitted_at, self.started_at),
                kv_wait_s=_between(self.fetched_at, self.staged_at),
                import_s=_between(self.staged_at, self.imported_at),
                prefill_s=_between(self.prefill_from, self.prefill_to),
                ttft_s=_between(self.submitted_at, self.first_token_at),
            ),
        )


def _between(start: float | None, end: float | None) -> float:
    return 0.0 if start is None or end is None else end - start
