"""One generation: what to ask of the engine, and the pieces of answer that come back."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from local_engine.http.checks import (
    check_prompt_length,
    check_tokens,
    refuse_unsupported,
    sampling_params,
    stop_strings,
    template_messages,
)
from local_engine.http.schema import ChatRequest, CompletionRequest
from local_engine.http.state import RETRY_AFTER_S, ServerState, Serving
from local_engine.http.text import AnswerText, Piece
from local_engine.metrics import EngineMetrics
from local_engine.requests import EngineRequest, TokenEvent
from prfaas.clock import Deadline
from prfaas.errors import EngineUnavailable, InvalidRequest, Overloaded, UnknownModel

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Job:
    """A validated request."""

    engine_request: EngineRequest
    stops: tuple[str, ...]

    @property
    def prompt_tokens(self) -> int:
        return len(self.engine_request.prompt_tokens)


def require_model(serving: Serving, model: str | None) -> None:
    """Raise UnknownModel unless this server has it; no name means the only one there is."""
    if model is not None and model != serving.model_name:
        raise UnknownModel(f"The model `{model[:200]}` does not exist", param="model")


async def prepare(
    state: ServerState, serving: Serving, request: ChatRequest | CompletionRequest, answer_id: str
) -> Job:
    """Check everything and tokenise. Raises InvalidRequest, ContextTooLong, UnknownModel."""
    require_model(serving, request.model)
    refuse_unsupported(request)
    stops = stop_strings(request.stop)
    if isinstance(request, ChatRequest):
        param = "messages"
        tokens = await chat_tokens(state, serving, request)
    else:
        param = "prompt"
        tokens = await completion_tokens(state, serving, request)
    check_prompt_length(len(tokens), serving.max_context, state.limits.max_prompt_tokens, param)
    sampling = sampling_params(request, len(tokens), serving.max_context, serving.vocab_size)
    return Job(
        EngineRequest(
            # Clients may send one request id twice at a time; the engine's must be unique.
            request_id=f"{answer_id}-{uuid.uuid4().hex[:8]}",
            prompt_tokens=tokens,
            sampling=sampling,
            cache_salt=request.cache_salt or "",
            kv_transfer_params=request.kv_transfer_params,
        ),
        stops,
    )


async def chat_tokens(
    state: ServerState, serving: Serving, request: ChatRequest
) -> tuple[int, ...]:
    """Prompt tokens of a chat."""
    messages = template_messages(request.messages)
    chars = sum(len(message["content"]) for message in messages)
    tokens = await state.on_text(chars, lambda: serving.tokenizer.encode_chat(messages))
    return tuple(tokens)


async def completion_tokens(
    state: ServerState, serving: Serving, request: CompletionRequest
) -> tuple[int, ...]:
    """Prompt tokens of a completion: given as they are, or tokenised."""
    prompt: str | list[Any] = request.prompt
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise InvalidRequest("this engine takes one prompt a request", param="prompt")
        prompt = prompt[0]
    if isinstance(prompt, list):
        return check_tokens(prompt, serving.vocab_size, "prompt")
    text = prompt
    tokens = await state.on_text(
        len(text), lambda: serving.tokenizer.encode(text, request.add_special_tokens)
    )
    return tuple(tokens)


@asynccontextmanager
async def generate(
    serving: Serving, job: Job, deadline: Deadline
) -> AsyncIterator[AsyncIterator[Piece]]:
    """Pieces of the answer, the last with a reason; leaving the context cancels what still runs.

    Submitting and iterating raise what the engine raises, and Overloaded at the deadline. Whatever
    becomes of the request, the metrics count it.
    """
    account = _Account(serving.metrics)
    try:
        async with within(deadline):
            stream = await serving.engine.submit(job.engine_request)
        text = AnswerText(serving.tokenizer.detokenizer(), job.stops)
        async with aclosing(stream), aclosing(_pieces(stream, text, account, deadline)) as pieces:
            yield pieces
    except (asyncio.CancelledError, ConnectionError):
        account.outcome = "abort"
        raise
    except Exception:
        account.outcome = "error"
        raise
    finally:
        account.close()
        log.debug("%s: %s", job.engine_request.request_id, account.outcome)


async def _pieces(
    stream: AsyncIterator[TokenEvent], text: AnswerText, account: _Account, deadline: Deadline
) -> AsyncGenerator[Piece]:
    while True:
        async with within(deadline):
            event = await anext(stream, None)
        if event is None:
            raise EngineUnavailable("the engine ended the request without saying why")
        if event.error is not None:
            raise event.error
        piece = text.push(event)
        account.add(piece)
        yield piece
        if piece.reason is not None:
            return


@asynccontextmanager
async def within(deadline: Deadline) -> AsyncIterator[None]:
    """Raise Overloaded when the body of the context is not done by the deadline."""
    try:
        async with asyncio.timeout(deadline.remaining_s()):
            yield
    except TimeoutError as error:
        raise Overloaded("the request ran out of time", retry_after_s=RETRY_AFTER_S) from error


class _Account:
    """Times and outcome of one request, for the metrics; the time starts when it is made."""

    def __init__(self, metrics: EngineMetrics) -> None:
        self.outcome = "abort"
        self._metrics = metrics
        self._started_s = time.monotonic()
        self._last_token_s: float | None = None

    def add(self, piece: Piece) -> None:
        if piece.reason is not None:
            self.outcome = piece.reason.value
        if not piece.token_ids:
            return
        now = time.monotonic()
        if self._last_token_s is None:
            self._metrics.observe_first_token(now - self._started_s)
        else:
            self._metrics.observe_tokens(now - self._last_token_s, len(piece.token_ids))
        self._last_token_s = now

    def close(self) -> None:
        self._metrics.observe_finished(self.outcome, time.monotonic() - self._started_s)
