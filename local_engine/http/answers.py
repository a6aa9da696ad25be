"""Answers in OpenAI's shape, whole and as server-sent events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from local_engine.http.logprobs import ChatLogprobs, TextLogprobs, chat_logprobs, text_logprobs
from local_engine.http.text import Piece
from local_engine.http.tool_calls import ToolCall
from local_engine.requests import FinishReason
from prfaas.errors import PrfaasError, openai_body
from prfaas.tokens import Tokenizer

SSE_DONE = b"data: [DONE]\n\n"

_ENCODER = msgspec.json.Encoder()


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int = 0
    kv_quality: str | msgspec.UnsetType = msgspec.UNSET
    """Class of KV that came from elsewhere for this answer, where that is not the very bytes."""


class Usage(msgspec.Struct):
    """Token counts; `cached_tokens` of the prompt were not computed by this engine: it had them, or
    they came from a peer, whether that had them or computed them now. As in vLLM.

    Several answers to one prompt share it: it counts once.
    """

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


class CalledFunction(msgspec.Struct):
    """`arguments` is JSON, as text."""

    name: str
    arguments: str


class MessageCall(msgspec.Struct):
    id: str
    function: CalledFunction
    type: str = "function"


class DeltaCall(MessageCall, kw_only=True):
    """A whole call; calls are not sent in parts."""

    index: int


class AnswerMessage(msgspec.Struct):
    """`content` is null only beside calls."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    tool_calls: list[MessageCall] | msgspec.UnsetType = msgspec.UNSET


TokenIds = list[int] | msgspec.UnsetType
"""Of the answer, where the client asked with `return_token_ids` as vLLM's clients do."""


class ChatChoice(msgspec.Struct):
    message: AnswerMessage
    finish_reason: str
    token_ids: TokenIds = msgspec.UNSET
    index: int = 0
    logprobs: ChatLogprobs | None = None


class TextChoice(msgspec.Struct):
    text: str
    finish_reason: str | None
    token_ids: TokenIds = msgspec.UNSET
    index: int = 0
    logprobs: TextLogprobs | None = None


class Delta(msgspec.Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    tool_calls: list[DeltaCall] | None = None


class DeltaChoice(msgspec.Struct):
    delta: Delta
    finish_reason: str | None
    index: int = 0
    logprobs: ChatLogprobs | None = None


Choice = ChatChoice | TextChoice | DeltaChoice


class Answer(msgspec.Struct):
    """A whole answer, or one chunk of a streamed one; `usage` unset: not asked for."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]
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
    """The client asked for a usage chunk; all others then have `usage: null`, or their own."""
    usage_each: bool = False
    """It asked for the usage so far in each of the others too."""
    token_ids: bool = False
    """The client asked for the tokens of the answer."""


class AnswerShape(ABC):
    """One endpoint's way to say answers; holds nothing but the heading and the tokens' names."""

    def __init__(self, heading: Heading, tokenizer: Tokenizer) -> None:
        self._heading = heading
        self._tokenizer = tokenizer

    @abstractmethod
    def whole(self, answers: Sequence[Piece], usage: Usage) -> bytes:
        """The body with whole answers, for a request that is not streamed."""

    @property
    def usage_each(self) -> bool:
        """Events are to have the usage so far."""
        return self._heading.usage_each

    @abstractmethod
    def first(self, piece: Piece, so_far: Usage | None = None) -> bytes:
        """The event or events that open an answer in a stream, with what there is so far."""

    @abstractmethod
    def more(self, piece: Piece, so_far: Usage | None = None) -> bytes:
        """The event for a further piece; empty if it has nothing to say yet."""

    @abstractmethod
    def last(self, piece: Piece, so_far: Usage | None = None) -> bytes:
        """The event that says why the answer of this last piece ends."""

    @abstractmethod
    def usage(self, usage: Usage) -> bytes:
        """The usage event."""

    def end(self, usage: Usage) -> bytes:
        """Everything that follows the last answer of a complete stream."""
        return (self.usage(usage) if self._heading.usage_at_end else b"") + SSE_DONE

    def _shown(self, piece: Piece) -> TokenIds:
        return list(piece.token_ids) if self._heading.token_ids else msgspec.UNSET

    def _answer(self, kind: str, choices: list[Choice], usage: Usage | None) -> bytes:
        head = self._heading
        shown = usage if usage is not None or head.usage_at_end else msgspec.UNSET
        return _ENCODER.encode(
            Answer(head.id, kind, head.created, head.model, choices, head.system_fingerprint, shown)
        )

    def _event(self, kind: str, choices: list[Choice], usage: Usage | None) -> bytes:
        return b"data: " + self._answer(kind, choices, usage) + b"\n\n"


class ChatShape(AnswerShape):
    """/v1/chat/completions."""

    KIND = "chat.completion"
    CHUNK = "chat.completion.chunk"

    def whole(self, answers: Sequence[Piece], usage: Usage) -> bytes:
        return self._answer(self.KIND, [self._choice(answer) for answer in answers], usage)

    def _choice(self, answer: Piece) -> ChatChoice:
        message = AnswerMessage(answer.text)
        if answer.tool_calls:
            message.content = answer.text or None
            message.tool_calls = [MessageCall(c.id, _function(c)) for c in answer.tool_calls]
        return ChatChoice(
            message,
            _finish_reason(answer),
            self._shown(answer),
            answer.index,
            chat_logprobs(answer, self._tokenizer),
        )

    def first(self, piece: Piece, so_far: Usage | None = None) -> bytes:
        opening = DeltaChoice(Delta(role="assistant", content=""), None, piece.index)
        return self._event(self.CHUNK, [opening], so_far) + self.more(piece, so_far)

    def more(self, piece: Piece, so_far: Usage | None = None) -> bytes:
        logprobs = chat_logprobs(piece, self._tokenizer)
        if not (piece.text or piece.tool_calls or logprobs):
            return b""
        calls = [
            DeltaCall(call.id, _function(call), index=call.number) for call in piece.tool_calls
        ]
        delta = Delta(content=piece.text or None, tool_calls=calls or None)
        choice = DeltaChoice(delta, None, piece.index, logprobs)
        return self._event(self.CHUNK, [choice], so_far)

    def last(self, piece: Piece, so_far: Usage | None = None) -> bytes:
        choice = DeltaChoice(Delta(), _finish_reason(piece), piece.index)
        return self._event(self.CHUNK, [choice], so_far)

    def usage(self, usage: Usage) -> bytes:
        return self._event(self.CHUNK, [], usage)


class TextShape(AnswerShape):
    """/v1/completions."""

    KIND = "text_completion"

    def whole(self, answers: Sequence[Piece], usage: Usage) -> bytes:
        choices: list[Choice] = [
            TextChoice(
                answer.text,
                _finish_reason(answer),
                self._shown(answer),
                answer.index,
                text_logprobs(answer, self._tokenizer),
            )
            for answer in answers
        ]
        return self._answer(self.KIND, choices, usage)

    def first(self, piece: Piece, so_far: Usage | None = None) -> bytes:
        return self._part(piece, so_far)

    def more(self, piece: Piece, so_far: Usage | None = None) -> bytes:
        return self._part(piece, so_far) if piece.text or piece.logprobs else b""

    def last(self, piece: Piece, so_far: Usage | None = None) -> bytes:
        choice = TextChoice("", _finish_reason(piece), index=piece.index)
        return self._event(self.KIND, [choice], so_far)

    def usage(self, usage: Usage) -> bytes:
        return self._event(self.KIND, [], usage)

    def _part(self, piece: Piece, so_far: Usage | None) -> bytes:
        logprobs = text_logprobs(piece, self._tokenizer)
        choice = TextChoice(piece.text, None, index=piece.index, logprobs=logprobs)
        return self._event(self.KIND, [choice], so_far)


def _finish_reason(piece: Piece) -> str:
    """An answer that called tools and came to its end says so."""
    assert piece.reason is not None
    called = piece.called and piece.reason is FinishReason.STOP
    return "tool_calls" if called else piece.reason.value


def _function(call: ToolCall) -> CalledFunction:
    return CalledFunction(call.name, call.arguments)


def error_body(error: PrfaasError) -> bytes:
    """An error as a JSON body."""
    return _ENCODER.encode(openai_body(error))


def error_event(error: PrfaasError) -> bytes:
    """An error after the stream began; no [DONE] follows."""
    return b"data: " + error_body(error) + b"\n\n"
