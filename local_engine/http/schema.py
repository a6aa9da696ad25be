"""Request bodies: what this engine honours, what it takes note of, and what it must refuse.

`ACTED_ON` names the fields of a body that the engine honours, or that cannot change the answer.
Every other field is known only to be refused by name unless it asks for no change (`checks.py`);
a field that is not listed here at all is refused by the decoder.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

MAX_STOP_STRINGS = 4
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 64
MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_LOGIT_BIASES = 1024
MAX_TOOLS = 128


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`stream_options` of a streamed answer."""

    include_usage: bool = False
    include_obfuscation: bool = False
    """Padding against traffic analysis, which a server may leave out."""
    continuous_usage_stats: bool = False
    """With `include_usage`: the usage so far in every event, as in vLLM."""


class Generation(msgspec.Struct, kw_only=True):
    """What chat and completion requests have in common."""

    ACTED_ON: ClassVar[frozenset[str]] = frozenset({
        "model", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop",
        "stop_token_ids", "ignore_eos", "n", "best_of", "presence_penalty", "frequency_penalty",
        "repetition_penalty", "logit_bias", "logprobs", "return_token_ids", "stream",
        "stream_options", "cache_salt", "kv_transfer_params",
        # They say who asks, or choose among services this engine does not have.
        "user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key",
        "prompt_cache_retention",
    })  # fmt: skip

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    n: int | None = 1
    best_of: int | None = None
    min_p: float | None = 0.0
    presence_penalty: float | None = 0.0
    frequency_penalty: float | None = 0.0
    repetition_penalty: float | None = 1.0
    logit_bias: dict[str, float] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None

    user: str | None = None
    metadata: dict[str, str] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    echo: bool | None = False
    length_penalty: float | None = 1.0
    min_tokens: int | None = 0
    use_beam_search: bool | None = False
    prompt_logprobs: int | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool | None = False
    skip_special_tokens: bool | None = True
    spaces_between_special_tokens: bool | None = True
    truncate_prompt_tokens: int | None = None
    return_token_ids: bool | None = False
    return_tokens_as_token_ids: bool | None = False
    response_format: Any = None
    structured_outputs: Any = None
    priority: int | None = 0
    store: bool | None = False


class ContentPart(msgspec.Struct, kw_only=True):
    """One part of a message; only text is served."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One message; `tool_calls` are of an earlier answer, role tool says what came of them."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[Any] | None = None
    tool_call_id: str | None = None
    function_call: Any = None
    audio: Any = None
    refusal: str | None = None
    annotations: list[Any] | None = None


class ChatRequest(Generation, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions."""

    ACTED_ON: ClassVar[frozenset[str]] = Generation.ACTED_ON | {
        "messages", "max_completion_tokens", "top_logprobs", "tools", "tool_choice",
        "parallel_tool_calls",
    }  # fmt: skip

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = 0
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None

    functions: list[Any] | None = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    web_search_options: Any = None
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    add_special_tokens: bool | None = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[Any] | None = None


class CompletionRequest(Generation, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions. `prompt`: text, one token array, or a list with one of either."""

    ACTED_ON: ClassVar[frozenset[str]] = Generation.ACTED_ON | {"prompt", "add_special_tokens"}

    prompt: str | list[Any]
    add_special_tokens: bool = True
    logprobs: int | None = None

    suffix: str | None = None
    prompt_embeds: Any = None


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize: of `prompt` as it stands, or of `messages` through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[Any] | None = None
    add_special_tokens: bool | None = None
    """Default: true for `prompt`, false for `messages`, whose template has what the model wants."""
    add_generation_prompt: bool = True


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None
