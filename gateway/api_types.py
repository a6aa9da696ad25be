"""Shapes of the HTTP API as its OpenAPI document shows them.

Of requests the fields that the gateway acts on, and those that clients use most; further fields go
to the engine as they are, which judges them. Of answers what clients rely on.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

Tokens = Annotated[int, Meta(ge=1)]


class StreamOptions(msgspec.Struct):
    """Of a streamed answer."""

    include_usage: bool = False


class Message(msgspec.Struct):
    """One message of a chat; further fields by role, as OpenAI has them."""

    role: str
    content: str | list[dict[str, Any]] | None = None


class Generating(msgspec.Struct, kw_only=True):
    """What chats and completions have in common."""

    model: Annotated[str, Meta(description="The gateway's model; absent: that one.")] | None = None
    max_tokens: Tokens | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = 1
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    cache_salt: (
        Annotated[str, Meta(description="Who sends the same one may share cached prefixes.")] | None
    ) = None


class ChatRequest(Generating, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Tokens | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None


class CompletionRequest(Generating, kw_only=True):
    """POST /v1/completions."""

    prompt: Annotated[
        str | list[Any], Meta(description="Text, one array of token ids, or a list with one.")
    ]
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = False


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """POST /v1/responses, where an engine has it."""

    model: str | None = None
    input: str | list[Any]
    stream: bool | None = False
    previous_response_id: (
        Annotated[str, Meta(description="Refused where several engines could be asked.")] | None
    ) = None
    background: Annotated[bool, Meta(description="Refused where true.")] | None = False
    cache_salt: str | None = None


class EmbeddingsRequest(msgspec.Struct, kw_only=True):
    """POST /v1/embeddings, where an engine has it."""

    model: str | None = None
    input: str | list[Any]
    cache_salt: str | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /tokenize, where an engine has it: of `prompt`, or of `messages` by the template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /detokenize, where an engine has it."""

    tokens: list[Annotated[int, Meta(ge=0)]]
    model: str | None = None


class ErrorFields(msgspec.Struct):
    """What went wrong; `param` names the field of the request that is to blame."""

    message: str
    type: str
    param: str | None = None
    code: str | int | None = None


class ErrorBody(msgspec.Struct):
    """The shape of every error, as OpenAI's client parses it."""

    error: ErrorFields


class PromptTokensDetails(msgspec.Struct):
    """`cached_tokens` were not computed by the engine that answers, as in vLLM."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """Token counts of one request."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int | None = None
    prompt_tokens_details: PromptTokensDetails | None = None


class Answer(msgspec.Struct):
    """A whole chat or completion."""

    id: str
    object: str
    created: int
    model: str
    choices: list[dict[str, Any]]
    usage: Usage | UnsetType | None = UNSET


class ModelCard(msgspec.Struct):
    """The model, with whatever else its engine says of it."""

    id: str
    object: str
    created: int | UnsetType = UNSET
    owned_by: str | UnsetType = UNSET
    max_model_len: int | UnsetType = UNSET


class ModelList(msgspec.Struct):
    """All models: one."""

    object: str
    data: list[ModelCard]


class TokensAnswer(msgspec.Struct):
    """Ids of a text."""

    tokens: list[int]
    count: int


class TextAnswer(msgspec.Struct):
    """The text of ids."""

    prompt: str


class Status(msgspec.Struct):
    """How the gateway is."""

    status: str


class Requests(msgspec.Struct):
    """Latest requests, newest first."""

    requests: list[dict[str, Any]]
