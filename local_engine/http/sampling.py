"""How an answer is to be drawn, checked field by field."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from local_engine.http.checks import check_tokens
from local_engine.http.schema import (
    MAX_CHOICES,
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    ChatRequest,
    CompletionRequest,
)
from local_engine.requests import SamplingParams
from prfaas.errors import ContextTooLong, InvalidRequest

_SEED_BITS = 64
_MAX_BIAS = 100
# Beyond these a penalty only asks for overflow.
_MIN_REPETITION, _MAX_REPETITION = 0.01, 100


def sampling_params(
    request: ChatRequest | CompletionRequest, prompt_tokens: int, max_context: int, vocab_size: int
) -> SamplingParams:
    """How to draw the answer. Raises InvalidRequest or ContextTooLong naming the field."""
    top_k = 0 if request.top_k in (None, -1) else request.top_k
    assert top_k is not None
    _require(top_k >= 0, "top_k", "must be positive, or 0 or -1 for off")
    top_p = 1.0 if request.top_p is None else request.top_p
    _require(0 < top_p <= 1, "top_p", "must be above 0 and at most 1")
    seed = request.seed
    _require(
        seed is None or -(1 << (_SEED_BITS - 1)) <= seed < 1 << _SEED_BITS,
        "seed",
        f"must fit {_SEED_BITS} bits",
    )
    stop_ids = request.stop_token_ids or []
    _require(len(stop_ids) <= MAX_STOP_TOKEN_IDS, "stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS}")
    return SamplingParams(
        max_tokens=_max_tokens(request, prompt_tokens, max_context),
        temperature=_between("temperature", request.temperature, 1.0, 0, 2),
        top_p=top_p,
        top_k=top_k,
        min_p=_between("min_p", request.min_p, 0.0, 0, 1),
        seed=seed,
        stop_token_ids=frozenset(check_tokens(stop_ids, vocab_size, "stop_token_ids")),
        ignore_eos=request.ignore_eos,
        repetition_penalty=_between(
            "repetition_penalty", request.repetition_penalty, 1.0, _MIN_REPETITION, _MAX_REPETITION
        ),
        presence_penalty=_between("presence_penalty", request.presence_penalty, 0.0, -2, 2),
        frequency_penalty=_between("frequency_penalty", request.frequency_penalty, 0.0, -2, 2),
        logit_bias=_logit_bias(request.logit_bias or {}, vocab_size),
        logprobs=_logprobs(request),
    )


def choices(request: ChatRequest | CompletionRequest) -> int:
    """How many answers are asked for. Raises InvalidRequest."""
    count = 1 if request.n is None else request.n
    _require(1 <= count <= MAX_CHOICES, "n", f"must be between 1 and {MAX_CHOICES}")
    _require(
        request.best_of in (None, count), "best_of", "must equal n: this engine ranks no answers"
    )
    _require(
        count == 1 or request.kv_transfer_params is None,
        "n",
        "must be 1 with kv_transfer_params, which bring the KV of one answer",
    )
    return count


def of_choice(params: SamplingParams, index: int) -> SamplingParams:
    """The first answer is the one to n = 1; each further one has a seed that follows from `seed`.

    Not `seed` + index, which would be the first answer to the next seed.
    """
    if params.seed is None or index == 0:
        return params
    digest = hashlib.blake2b(f"{params.seed}/{index}".encode(), digest_size=8).digest()
    return replace(params, seed=int.from_bytes(digest, "little"))


def stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    """The request's stop strings. Raises InvalidRequest."""
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    _require(len(stops) <= MAX_STOP_STRINGS, "stop", f"at most {MAX_STOP_STRINGS} strings")
    for text in stops:
        _require(0 < len(text) <= MAX_STOP_CHARS, "stop", f"1 to {MAX_STOP_CHARS} characters each")
    return stops


def _between(name: str, value: float | None, default: float, least: float, most: float) -> float:
    if value is None:
        return default
    _require(least <= value <= most, name, f"must be between {least} and {most}")
    return float(value)


def _logit_bias(biases: dict[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    """OpenAI's form: an object whose keys are token ids in decimal."""
    _require(len(biases) <= MAX_LOGIT_BIASES, "logit_bias", f"at most {MAX_LOGIT_BIASES} tokens")
    found: dict[int, float] = {}
    for key, bias in biases.items():
        where = key[:20]
        _require(
            key.isascii() and key.isdigit() and len(key) <= 12, "logit_bias",
            f"{where!r} is not a token id",
        )  # fmt: skip
        token = int(key)
        _require(
            token < vocab_size, "logit_bias",
            f"token {token} is outside the vocabulary of {vocab_size}",
        )  # fmt: skip
        _require(token not in found, "logit_bias", f"token {token} is there twice")
        _require(
            -_MAX_BIAS <= bias <= _MAX_BIAS, "logit_bias",
            f"the bias of token {token} must be between -{_MAX_BIAS} and {_MAX_BIAS}",
        )  # fmt: skip
        found[token] = float(bias)
    return tuple(found.items())


def _logprobs(request: ChatRequest | CompletionRequest) -> int | None:
    """A chat says whether and how many; a completion how many, 0 being the drawn token's alone."""
    if isinstance(request, CompletionRequest):
        name, count = "logprobs", request.logprobs
    else:
        name, count = "top_logprobs", request.top_logprobs or 0
        if not request.logprobs:
            _require(not count, name, "needs logprobs: true")
            return None
    if count is None:
        return None
    _require(0 <= count <= MAX_LOGPROBS, name, f"must be between 0 and {MAX_LOGPROBS}")
    return count


def _max_tokens(
    request: ChatRequest | CompletionRequest, prompt_tokens: int, max_context: int
) -> int:
    """`max_tokens`, or its newer name for chats; by default what is left of the context."""
    room = max_context - prompt_tokens
    name, asked = "max_tokens", request.max_tokens
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        newer = request.max_completion_tokens
        if asked is not None and asked != newer:
            raise InvalidRequest(
                f"max_completion_tokens is {newer}, max_tokens is {asked}", param="max_tokens"
            )
        name, asked = "max_completion_tokens", newer
    if asked is None:
        return room
    _require(asked >= 1, name, "must be at least 1")
    if asked > room:
        raise ContextTooLong(
            f"{name} is {asked}; with {prompt_tokens} prompt tokens the context of {max_context} "
            f"tokens leaves {room}",
            param=name,
        )
    return asked


def _require(condition: bool, param: str, problem: str) -> None:
    if not condition:
        raise InvalidRequest(f"{param}: {problem}", param=param)
