"""The text of one answer, from the engine's token events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from local_engine.http.stop import StopMatcher
from local_engine.requests import FinishReason, TokenEvent
from prfaas.tokens import IncrementalDetokenizer

_HALF_CHARACTER = "\ufffd"


@dataclass(frozen=True, slots=True)
class Piece:
    """What one event adds: text that is safe to send, and the tokens it took.

    `completion_tokens` and `cached_tokens` are totals so far. Only the last piece has a `reason`.
    """

    text: str
    token_ids: tuple[int, ...]
    completion_tokens: int
    cached_tokens: int
    reason: FinishReason | None = None
    kv_quality: str = ""


class AnswerText:
    """Owns the detokenizer and stop matcher of one answer; nothing to close."""

    def __init__(self, detokenizer: IncrementalDetokenizer, stops: Sequence[str]) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops)
        self._tokens = 0

    def push(self, event: TokenEvent) -> Piece:
        """Take an event without an error. Tokens after a stop string are not counted."""
        # The token that ends an answer is counted and not shown.
        hidden = 1 if event.finish_reason is FinishReason.STOP else 0
        shown = len(event.token_ids) - hidden
        text, at = "", -1
        for at, token_id in enumerate(event.token_ids):
            self._tokens += 1
            if at < shown:
                text += self._matcher.push(self._detokenizer.push(token_id))
                if self._matcher.stopped:
                    break
        taken = tuple(event.token_ids[: at + 1])
        reason = event.finish_reason
        if self._matcher.stopped:
            reason = FinishReason.STOP
        elif reason is not None:
            text, reason = self._finish(text, reason)
        return Piece(text, taken, self._tokens, event.cached_tokens, reason, event.kv_quality)

    def _finish(self, text: str, reason: FinishReason) -> tuple[str, FinishReason]:
        # An answer cut inside a character ends before it.
        text += self._matcher.push(self._detokenizer.flush().rstrip(_HALF_CHARACTER))
        if self._matcher.stopped:
            return text, FinishReason.STOP
        return text + self._matcher.finish(), reason
