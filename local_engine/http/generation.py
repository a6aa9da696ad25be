"""One generation: what to ask of the engine, and the pieces of answers that come back."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from local_engine.http.checks import (
    check_prompt_length,
    check_tokens,
    refuse_unsupported,
    template_messages,
)
from local_engine.http.sampling import choices, of_choice, sampling_params, stop_strings
from local_engine.http.schema import ChatRequest, CompletionRequest
from local_engine.http.state import RETRY_AFTER_S, ServerState, Serving
from local_engine.http.text import AnswerText, Piece
from local_engine.http.tool_calls import ToolCallReader, writes_tool_calls
from local_engine.http.tools import Tool, offered_tools
from local_engine.metrics import EngineMetrics
from local_engine.requests import EngineRequest, TokenEvent
from prfaas.clock import Deadline
from prfaas.errors import EngineUnavailable, InvalidRequest, Overloaded, UnknownModel

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Job:
    """A validated request: one of the engine's for each answer, all of one prompt."""

    engine_requests: tuple[EngineRequest, ...]
    stops: tuple[str, ...]
    reads_tool_calls: bool = False

    @property
    def prompt_tokens(self) -> int:
        return len(self.engine_requests[0].prompt_tokens)

    @property
    def answers(self) -> int:
        return len(self.engine_requests)


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
    count = choices(request)
    tools = None
    if isinstance(request, ChatRequest):
        param = "messages"
        tools = offered_tools(
            request.tools, request.tool_choice, request.parallel_tool_calls, serving.tokenizer
        )
        tokens = await chat_tokens(state, serving, request, tools)
    else:
        param = "prompt"
        tokens = await completion_tokens(state, serving, request)
    check_prompt_length(len(tokens), serving.max_context, state.limits.max_prompt_tokens, param)
    sampling = sampling_params(request, len(tokens), serving.max_context, serving.vocab_size)
    if serving.paced and sampling.logprobs is not None:
        raise InvalidRequest("logprobs: a paced engine computes none", param="logprobs")
    # Clients may send one request id twice at a time; the engine's must be unique.
    name = f"{answer_id}-{uuid.uuid4().hex[:8]}"
    template = serving.tokenizer.tool_template if tools else None
    return Job(
        tuple(
            EngineRequest(
                request_id=f"{name}-{index}" if count > 1 else name,
                prompt_tokens=tokens,
                sampling=of_choice(sampling, index),
                cache_salt=request.cache_salt or "",
                kv_transfer_params=request.kv_transfer_params,
            )
            for index in range(count)
        ),
        stops,
        reads_tool_calls=template is not None and writes_tool_calls(template),
    )


async def chat_tokens(
    state: ServerState, serving: Serving, request: ChatRequest, tools: list[Tool] | None
) -> tuple[int, ...]:
    """Prompt tokens of a chat."""
    messages = template_messages(request.messages)
    chars = chat_chars(messages, tools)
    tokens = await state.on_text(chars, lambda: serving.tokenizer.encode_chat(messages, tools))
    return tuple(tokens)


def chat_chars(messages: list[dict[str, Any]], tools: list[Tool] | None) -> int:
    """About how long the text of a chat is."""
    return sum(len(message["content"]) for message in messages) + len(repr(tools or ""))


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
    """Pieces of the answers; the last of each has a reason. Leaving cancels what still runs.

    Submitting and iterating raise what the engine raises, and Overloaded at the deadline. Whatever
    becomes of the request, the metrics count it.
    """
    async with AsyncExitStack() as stack:
        answers = [
            await stack.enter_async_context(_answer(serving, job, index, deadline))
            for index in range(job.answers)
        ]
        if len(answers) == 1:
            yield answers[0]
        else:
            yield await stack.enter_async_context(aclosing(_as_they_come(answers)))


async def _as_they_come(answers: Sequence[AsyncIterator[Piece]]) -> AsyncGenerator[Piece]:
    """Pieces of all answers, of each in its order; at most one ahead of each is taken."""
    waiting = {asyncio.ensure_future(anext(answer)): answer for answer in answers}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                piece, answer = task.result(), waiting.pop(task)
                if piece.reason is None:
                    waiting[asyncio.ensure_future(anext(answer))] = answer
                yield piece
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


@asynccontextmanager
async def _answer(
    serving: Serving, job: Job, index: int, deadline: Deadline
) -> AsyncIterator[AsyncIterator[Piece]]:
    """Pieces of one answer."""
    request = job.engine_requests[index]
    account = _Account(serving.metrics)
    try:
        async with within(deadline):
            stream = await serving.engine.submit(request)
        reader = ToolCallReader() if job.reads_tool_calls else None
        text = AnswerText(serving.tokenizer.detokenizer(), job.stops, index, reader)
        async with aclosing(stream), aclosing(_pieces(stream, text, account, deadline)) as pieces:
            yield pieces
    except (asyncio.CancelledError, ConnectionError):
        account.failed("abort")
        raise
    except Exception:
        account.failed("error")
        raise
    finally:
        account.close()
        log.debug("%s: %s", request.request_id, account.outcome)


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
        self._ended = False

    def failed(self, outcome: str) -> None:
        """The request fails; an answer that had ended before has not."""
        if not self._ended:
            self.outcome = outcome

    def add(self, piece: Piece) -> None:
        if piece.reason is not None:
            self.outcome = piece.reason.value
            self._ended = True
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
