"""Request handlers: body in, response out; what happens in between is in the other modules."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from aiohttp import web

from local_engine.http.answers import AnswerShape, ChatShape, Heading, TextShape
from local_engine.http.checks import check_tokens, template_messages
from local_engine.http.decoding import Body, decode_body
from local_engine.http.errors import request_id
from local_engine.http.generation import chat_chars, generate, prepare, require_model, within
from local_engine.http.respond import Tally, respond_stream, respond_whole
from local_engine.http.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from local_engine.http.state import Phase, ServerState, Serving
from local_engine.http.tools import offered_tools
from local_engine.metrics import CONTENT_TYPE
from prfaas.clock import Deadline
from prfaas.errors import BodyTooLarge, InvalidRequest


class Handlers:
    """The routes of one server; all they know is in its state."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, ChatRequest, ChatShape, "chatcmpl")

    async def completion(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, CompletionRequest, TextShape, "cmpl")

    async def _answer(
        self,
        request: web.Request,
        kind: type[ChatRequest] | type[CompletionRequest],
        shape_of: type[AnswerShape],
        prefix: str,
    ) -> web.StreamResponse:
        """The story of one generation: read, check, submit, relay."""
        limits = self._state.limits
        deadline = Deadline.after(limits.request_timeout_s)
        serving = self._state.open
        answer_id = f"{prefix}-{request_id(request)}"
        async with within(deadline):
            body = await _read(request, kind)
            job = await prepare(self._state, serving, body, answer_id)
        options = body.stream_options
        heading = Heading(
            id=answer_id,
            created=int(time.time()),
            model=serving.model_name,
            system_fingerprint=serving.system_fingerprint,
            usage_at_end=options is not None and options.include_usage,
            usage_each=options is not None
            and options.include_usage
            and options.continuous_usage_stats,
            token_ids=bool(body.return_token_ids),
        )
        shape = shape_of(heading, serving.tokenizer)
        tally = Tally(job.prompt_tokens, job.answers)
        async with generate(serving, job, deadline) as pieces:
            if not body.stream:
                return await respond_whole(shape, pieces, tally)
            return await respond_stream(request, shape, pieces, tally, limits.slow_client_timeout_s)

    async def models(self, request: web.Request) -> web.Response:
        return _json({"object": "list", "data": [_model_card(self._state.loaded)]})

    async def model(self, request: web.Request) -> web.Response:
        serving = self._state.loaded
        require_model(serving, request.match_info["model"])
        return _json(_model_card(serving))

    async def tokenize(self, request: web.Request) -> web.Response:
        serving = self._state.loaded
        async with within(self._deadline()):
            body = await _read(request, TokenizeRequest)
            require_model(serving, body.model)
            tokens = await self._tokens(serving, body)
        return _json({"tokens": tokens, "count": len(tokens), "max_model_len": serving.max_context})

    async def _tokens(self, serving: Serving, body: TokenizeRequest) -> list[int]:
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("give either prompt or messages", param="prompt")
        if body.tools and body.messages is None:
            raise InvalidRequest("tools: only with messages", param="tools")
        tokenizer = serving.tokenizer
        if body.prompt is not None:
            text, special = body.prompt, body.add_special_tokens in (None, True)
            return await self._state.on_text(len(text), lambda: tokenizer.encode(text, special))
        messages = template_messages(body.messages or [])
        tools = offered_tools(body.tools, None, None, tokenizer)

        def work() -> list[int]:
            text = tokenizer.render_chat(messages, tools, body.add_generation_prompt)
            return tokenizer.encode(text, bool(body.add_special_tokens))

        return await self._state.on_text(chat_chars(messages, tools), work)

    async def detokenize(self, request: web.Request) -> web.Response:
        serving = self._state.loaded
        async with within(self._deadline()):
            body = await _read(request, DetokenizeRequest)
            require_model(serving, body.model)
            ids = check_tokens(body.tokens, serving.vocab_size, "tokens")
            text = await self._state.on_text(
                len(ids), lambda: serving.tokenizer.decode(ids, skip_special=False)
            )
        return _json({"prompt": text})

    async def health(self, request: web.Request) -> web.Response:
        """The process lives, and its engine if it has one already."""
        return web.Response(status=503 if self._state.broken else 200)

    async def ready(self, request: web.Request) -> web.Response:
        """New requests are welcome."""
        status = "broken" if self._state.broken else self._state.phase.value
        return web.json_response({"status": status}, status=200 if status == Phase.READY else 503)

    async def metrics(self, request: web.Request) -> web.Response:
        page = self._state.loaded.metrics.render()
        return web.Response(body=page, headers={"Content-Type": CONTENT_TYPE})

    async def integrity(self, request: web.Request) -> web.Response:
        """Run the pool's self-check: 200 with the counts, or 500 with what is wrong."""
        engine = self._state.loaded.engine
        problem = None
        try:
            await engine.check_integrity()
        except AssertionError as error:
            problem = str(error)
        stats = engine.stats()
        counts = {
            name: getattr(stats, name)
            for name in (
                "waiting", "waiting_kv", "running", "exporting", "queue_tokens", "context_tokens",
                "free_blocks", "cached_blocks", "total_blocks", "free_states", "kept_states",
                "total_states", "integrity_failures",
            )
        }  # fmt: skip
        return web.json_response(
            {"ok": problem is None, "problem": problem, **counts},
            status=200 if problem is None else 500,
        )

    async def reset_prefix_cache(self, request: web.Request) -> web.Response:
        await self._state.loaded.engine.reset_prefix_cache()
        return web.Response()

    def _deadline(self) -> Deadline:
        return Deadline.after(self._state.limits.request_timeout_s)


async def _read(request: web.Request, kind: type[Body]) -> Body:
    """The typed body. Raises BodyTooLarge, before reading where the length is declared."""
    limit = request.client_max_size
    if request.content_length is not None and request.content_length > limit:
        raise BodyTooLarge(f"the body of {request.content_length} bytes is over the limit {limit}")
    return decode_body(await request.read(), kind)


def _model_card(serving: Serving) -> dict[str, Any]:
    return {
        "id": serving.model_name,
        "object": "model",
        "created": serving.created,
        "owned_by": serving.owned_by,
        "max_model_len": serving.max_context,
    }


def _json(data: dict[str, Any]) -> web.Response:
    return web.Response(body=msgspec.json.encode(data), content_type="application/json")
