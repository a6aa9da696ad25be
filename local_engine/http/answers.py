"""Answers in OpenAI's shape, whole and as server-sent events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import msgspec

from local_engine.requests import FinishReason
from prfaas.errors import PrfaasError, openai_body

SSE_DONE = b"data: [DONE]\n\n"

_ENCODER = msgspec.json.Encoder()


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int = 0
    kv_quality: str | msgspec.UnsetType = msgspec.UNSET
    """Class of KV that came from elsewhere for this answer, where that is not the very bytes."""


class Usage(msgspec.Struct):
    """Token counts of one answer; `cached_tokens` of the prompt were not computed anew anywhere."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails

    @staticmethod
    def of(
        prompt_tokens: int, completion_tokens: int, cached_tokens: int, kv_quality: str = ""
    ) -> Usage:
        lossy = kv_quality not in ("", "exact")
        return Usage(
            prompt_tokens,
            completion_tokens,
            prompt_tokens + completion_tokens,
            PromptTokensDetails(cached_tokens, kv_quality if lossy else msgspec.UNSET),
        )


class AnswerMessage(msgspec.Struct):
    content: str
    role: str = "assistant"
    refusal: None = None


TokenIds = list[int] | msgspec.UnsetType
"""Of the answer, where the client asked with `return_token_ids` as vLLM's clients do."""


class ChatChoice(msgspec.Struct):
    message: AnswerMessage
    finish_reason: FinishReason
    token_ids: TokenIds = msgspec.UNSET
    index: int = 0
    logprobs: None = None


class TextChoice(msgspec.Struct):
    text: str
    finish_reason: FinishReason | None
    token_ids: TokenIds = msgspec.UNSET
    index: int = 0
    logprobs: None = None


class Delta(msgspec.Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None


class DeltaChoice(msgspec.Struct):
    delta: Delta
    finish_reason: FinishReason | None
    index: int = 0
    logprobs: None = None


class Answer(msgspec.Struct):
    """A whole answer, or one chunk of a streamed one; `usage` unset: not asked for."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice | TextChoice | DeltaChoice]
    system_fingerprint: str
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


@dataclass(frozen=True, slots=True)
class Heading:
    """What every chunk of one answer repeats. `created` is in Unix seconds."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    usage_at_end: bool = False
    """The client asked for a usage chunk; all others then have `usage: null`."""
    token_ids: bool = False
    """The client asked for the tokens of the answer."""


class AnswerShape(ABC):
    """One endpoint's way to say an answer; holds nothing but the heading."""

    def __init__(self, heading: Heading) -> None:
        self._heading = heading

    @abstractmethod
    def whole(self, text: str, token_ids: list[int], reason: FinishReason, usage: Usage) -> bytes:
        """The body of an answer that is not streamed."""

    @abstractmethod
    def first(self, text: str) -> bytes:
        """The event or events that open a stream, with the text there is so far."""

    @abstractmethod
    def more(self, text: str) -> bytes:
        """The event for further text."""

    @abstractmethod
    def last(self, reason: FinishReason) -> bytes:
        """The event that says why the answer ends."""

    @abstractmethod
    def usage(self, usage: Usage) -> bytes:
        """The usage event."""

    def end(self, reason: FinishReason, usage: Usage) -> bytes:
        """Everything that follows the last text of a complete stream."""
        counts = self.usage(usage) if self._heading.usage_at_end else b""
        return self.last(reason) + counts + SSE_DONE

    def _shown(self, token_ids: list[int]) -> TokenIds:
        return token_ids if self._heading.token_ids else msgspec.UNSET

    def _answer(
        self, kind: str, choices: list[ChatChoice | TextChoice | DeltaChoice], usage: Usage | None
    ) -> bytes:
        head = self._heading
        shown = usage if usage is not None or head.usage_at_end else msgspec.UNSET
        return _ENCODER.encode(
            Answer(head.id, kind, head.created, head.model, choices, head.system_fingerprint, shown)
        )

    def _event(
        self, kind: str, choices: list[ChatChoice | TextChoice | DeltaChoice], usage: Usage | None
    ) -> bytes:
        return b"data: " + self._answer(kind, choices, usage) + b"\n\n"


class ChatShape(AnswerShape):
    """/v1/chat/completions."""

    KIND = "chat.completion"
    CHUNK = "chat.completion.chunk"

    def whole(self, text: str, token_ids: list[int], reason: FinishReason, usage: Usage) -> bytes:
        choice = ChatChoice(AnswerMessage(text), reason, self._shown(token_ids))
        return self._answer(self.KIND, [choice], usage)

    def first(self, text: str) -> bytes:
        opening = self._delta(Delta(role="assistant", content=""), None)
        return opening + self.more(text) if text else opening

    def more(self, text: str) -> bytes:
        return self._delta(Delta(content=text), None)

    def last(self, reason: FinishReason) -> bytes:
        return self._delta(Delta(), reason)

    def usage(self, usage: Usage) -> bytes:
        return self._event(self.CHUNK, [], usage)

    def _delta(self, delta: Delta, reason: FinishReason | None) -> bytes:
        return self._event(self.CHUNK, [DeltaChoice(delta, reason)], None)


class TextShape(AnswerShape):
    """/v1/completions."""

    KIND = "text_completion"

    def whole(self, text: str, token_ids: list[int], reason: FinishReason, usage: Usage) -> bytes:
        choice = TextChoice(text, reason, self._shown(token_ids))
        return self._answer(self.KIND, [choice], usage)

    def first(self, text: str) -> bytes:
        return self.more(text)

    def more(self, text: str) -> bytes:
        return self._event(self.KIND, [TextChoice(text, None)], None)

    def last(self, reason: FinishReason) -> bytes:
        return self._event(self.KIND, [TextChoice("", reason)], None)

    def usage(self, usage: Usage) -> bytes:
        return self._event(self.KIND, [], usage)


def error_body(error: PrfaasError) -> bytes:
    """An error as a JSON body."""
    return _ENCODER.encode(openai_body(error))


def error_event(error: PrfaasError) -> bytes:
    """An error after the stream began; no [DONE] follows."""
    return b"data: " + error_body(error) + b"\n\n"
