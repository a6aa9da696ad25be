"""The text of one answer, from the engine's token events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from local_engine.http.stop import StopMatcher
from local_engine.http.tool_calls import ToolCall, ToolCallReader
from local_engine.requests import FinishReason, TokenEvent, TokenLogprobs
from prfaas.tokens import IncrementalDetokenizer

_HALF_CHARACTER = "\ufffd"


@dataclass(frozen=True, slots=True)
class Piece:
    """What one event adds: text that is safe to send, and the tokens it took.

    `completion_tokens` and `cached_tokens` are totals so far. Only the last piece has a `reason`.
    `logprobs` of each of the tokens if they were asked for; `offsets`: how many characters the
    tokens before each of them made. `called`: the answer has called a tool, here or before.
    """

    text: str
    token_ids: tuple[int, ...]
    completion_tokens: int
    cached_tokens: int
    reason: FinishReason | None = None
    kv_quality: str = ""
    index: int = 0
    """Which of the answers to one request."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    offsets: tuple[int, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    called: bool = False


class AnswerText:
    """Owns the detokenizer, stop matcher and tool reader of one answer; nothing to close."""

    def __init__(
        self,
        detokenizer: IncrementalDetokenizer,
        stops: Sequence[str],
        index: int = 0,
        reader: ToolCallReader | None = None,
    ) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops)
        self._index = index
        self._reader = reader
        self._tokens = 0
        self._chars = 0

    def push(self, event: TokenEvent) -> Piece:
        """Take an event without an error. Tokens after a stop string are not counted."""
        # The token that ends an answer is counted and not shown.
        hidden = 1 if event.finish_reason is FinishReason.STOP else 0
        shown = len(event.token_ids) - hidden
        text, at = "", -1
        offsets = []
        for at, token_id in enumerate(event.token_ids):
            self._tokens += 1
            offsets.append(self._chars)
            if at < shown:
                new = self._detokenizer.push(token_id)
                self._chars += len(new)
                text += self._matcher.push(new)
                if self._matcher.stopped:
                    break
        reason = event.finish_reason
        if self._matcher.stopped:
            reason = FinishReason.STOP
        elif reason is not None:
            text, reason = self._finish(text, reason)
        calls: tuple[ToolCall, ...] = ()
        if self._reader is not None:
            text, calls = self._reader.push(text)
            text += self._reader.finish() if reason is not None else ""
        return Piece(
            text,
            tuple(event.token_ids[: at + 1]),
            self._tokens,
            event.cached_tokens,
            reason,
            event.kv_quality,
            self._index,
            event.logprobs[: at + 1],
            tuple(offsets),
            calls,
            called=self._reader is not None and self._reader.calls > 0,
        )

    def _finish(self, text: str, reason: FinishReason) -> tuple[str, FinishReason]:
        # An answer cut inside a character ends before it.
        text += self._matcher.push(self._detokenizer.flush().rstrip(_HALF_CHARACTER))
        if self._matcher.stopped:
            return text, FinishReason.STOP
        return text + self._matcher.finish(), reason


def join(pieces: Sequence[Piece]) -> Piece:
    """All pieces of one answer as one."""
    last = pieces[-1]
    return Piece(
        "".join(piece.text for piece in pieces),
        tuple(token for piece in pieces for token in piece.token_ids),
        last.completion_tokens,
        last.cached_tokens,
        last.reason,
        last.kv_quality,
        last.index,
        tuple(one for piece in pieces for one in piece.logprobs),
        tuple(offset for piece in pieces for offset in piece.offsets),
        tuple(call for piece in pieces for call in piece.tool_calls),
        last.called,
    )
