"""An OpenAI server on loopback whose latencies, answers and failures a test scripts."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from prfaas.errors import EngineUnavailable, PrfaasError, openai_body

CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"


@dataclass(frozen=True, slots=True)
class Script:
    """What one request gets. Times in seconds; each text is one token and one event.

    `error`: instead of an answer, before any byte. After `stop_after` texts of a streamed answer
    comes what `then` says: an error event, a cut connection, or silence until the client leaves.
    """

    texts: tuple[str, ...] = ("Hello", ",", " world", ".")
    first_delay_s: float = 0.0
    token_delay_s: float = 0.0
    error: PrfaasError | None = None
    stop_after: int | None = None
    then: str = "error_event"
    """`error_event`, `cut` or `hang`."""
    end_delay_s: float = 0.0
    """Between [DONE] and the end of the answer."""
    cached_tokens: int = 0
    finish_reason: str = "stop"


@dataclass(slots=True)
class SeenRequest:
    """One generation request as the server saw it, and what became of it."""

    path: str
    headers: Mapping[str, str]
    raw_body: bytes
    body: dict[str, Any]
    received_s: float = field(default_factory=time.monotonic)
    finished: bool = False
    """The whole script was played."""
    cancelled: bool = False
    """The client went away first."""


class ScriptedEngine:
    """Owns one listening server; use as `async with scripted_engine() as engine`.

    `script` answers every request for which `queue` holds no other; `on_request` wins over both.
    `seen` keeps all generation requests in order of arrival.
    """

    def __init__(self, model: str, tokenize: Callable[[str], list[int]]) -> None:
        self.model = model
        self.max_model_len = 8192
        self.script = Script()
        self.queue: deque[Script] = deque()
        self.on_request: Callable[[SeenRequest], Script] | None = None
        self.seen: list[SeenRequest] = []
        self.ready = True
        self.healthy = True
        self.url = ""
        self.active = 0
        self._tokenize = tokenize

    def __repr__(self) -> str:
        return f"<ScriptedEngine {self.url} seen={len(self.seen)} active={self.active}>"

    def app(self) -> web.Application:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post(CHAT_PATH, self._generate)
        app.router.add_post(COMPLETIONS_PATH, self._generate)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/tokenize", self._tokenize_route)
        app.router.add_get("/health", self._health)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/metrics", self._metrics)
        return app

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        seen = SeenRequest(request.path, request.headers.copy(), raw, json.loads(raw))
        self.seen.append(seen)
        script = self._script_of(seen)
        self.active += 1
        try:
            response = await self._play(request, seen, script)
            seen.finished = True
            return response
        except (asyncio.CancelledError, ConnectionError):
            seen.cancelled = True
            raise
        finally:
            self.active -= 1

    def _script_of(self, seen: SeenRequest) -> Script:
        if self.on_request is not None:
            return self.on_request(seen)
        return self.queue.popleft() if self.queue else self.script

    async def _play(
        self, request: web.Request, seen: SeenRequest, script: Script
    ) -> web.StreamResponse:
        await asyncio.sleep(script.first_delay_s)
        if script.error is not None:
            return _error_response(script.error)
        answer = _Answer(seen, script, self.model, len(self._prompt_tokens(seen.body)))
        if not seen.body.get("stream"):
            for _ in answer.texts[1:]:
                await asyncio.sleep(script.token_delay_s)
            return web.json_response(answer.whole())
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        for key in ("X-Request-Id",):
            if key in request.headers:
                response.headers[key] = request.headers[key]
        await response.prepare(request)
        for at, text in enumerate(answer.texts):
            if at == script.stop_after:
                return await self._fail(request, response, script)
            if at:
                await asyncio.sleep(script.token_delay_s)
            await response.write(answer.event(text, first=at == 0))
        if script.stop_after is not None and script.stop_after >= len(answer.texts):
            return await self._fail(request, response, script)
        await response.write(answer.end())
        await asyncio.sleep(script.end_delay_s)
        await response.write_eof()
        return response

    async def _fail(
        self, request: web.Request, response: web.StreamResponse, script: Script
    ) -> web.StreamResponse:
        if script.then == "error_event":
            error = EngineUnavailable("scripted failure")
            await response.write(_event(openai_body(error)))
            await response.write_eof()
        elif script.then == "cut":
            assert request.transport is not None
            request.transport.abort()
        elif script.then == "hang":
            await asyncio.Event().wait()
        else:
            raise ValueError(f"unknown failure {script.then!r}")
        return response

    def _prompt_tokens(self, body: dict[str, Any]) -> list[int]:
        """Ids of the prompt; a token array is itself, messages are their contents joined."""
        prompt = body.get("prompt", "")
        if isinstance(prompt, list):
            return prompt
        if "messages" in body:
            prompt = "\n".join(str(m.get("content", "")) for m in body["messages"])
        return self._tokenize(prompt)

    async def _models(self, request: web.Request) -> web.Response:
        card = {
            "id": self.model,
            "object": "model",
            "created": 0,
            "owned_by": "scripted",
            "max_model_len": self.max_model_len,
        }
        return web.json_response({"object": "list", "data": [card]})

    async def _tokenize_route(self, request: web.Request) -> web.Response:
        tokens = self._prompt_tokens(await request.json())
        return web.json_response(
            {"tokens": tokens, "count": len(tokens), "max_model_len": self.max_model_len}
        )

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def _ready(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.ready else 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        label = f'{{engine="0",model_name="{self.model}"}}'
        return web.Response(text=f"vllm:num_requests_running{label} {self.active}\n")


class _Answer:
    """One scripted answer in the shape of the endpoint it came by."""

    def __init__(self, seen: SeenRequest, script: Script, model: str, prompt_tokens: int) -> None:
        self.chat = seen.path == CHAT_PATH
        body = seen.body
        limit = body.get("max_completion_tokens") or body.get("max_tokens") or len(script.texts)
        self.texts = script.texts[:limit]
        self.finish_reason = "length" if limit < len(script.texts) else script.finish_reason
        self.with_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        self._head = {
            "id": ("chatcmpl-" if self.chat else "cmpl-") + f"scripted{int(seen.received_s * 1e6)}",
            "object": "chat.completion" if self.chat else "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": len(self.texts),
            "total_tokens": prompt_tokens + len(self.texts),
            "prompt_tokens_details": {"cached_tokens": script.cached_tokens},
        }

    def whole(self) -> dict[str, Any]:
        text = "".join(self.texts)
        content: dict[str, Any] = (
            {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        )
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": self.finish_reason}
        return {**self._head, "choices": [choice], "usage": self._usage}

    def event(self, text: str, first: bool) -> bytes:
        role = {"role": "assistant"} if first else {}
        return self._chunk({"delta": {**role, "content": text}} if self.chat else {"text": text})

    def end(self) -> bytes:
        parts = [self._chunk({"delta": {}} if self.chat else {"text": ""}, self.finish_reason)]
        if self.with_usage:
            parts.append(_event({**self._chunk_head(), "choices": [], "usage": self._usage}))
        return b"".join((*parts, b"data: [DONE]\n\n"))

    def _chunk(self, content: dict[str, Any], finish_reason: str | None = None) -> bytes:
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": finish_reason}
        usage = {"usage": None} if self.with_usage else {}
        return _event({**self._chunk_head(), "choices": [choice], **usage})

    def _chunk_head(self) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk"} if self.chat else self._head


def _event(data: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


def _error_response(error: PrfaasError) -> web.Response:
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
    return web.json_response(openai_body(error), status=error.http_status, headers=headers)


@asynccontextmanager
async def scripted_engine(
    model: str = "scripted", tokenize: Callable[[str], list[int]] | None = None
) -> AsyncIterator[ScriptedEngine]:
    """A running ScriptedEngine on a free loopback port; by default a token is a UTF-8 byte."""
    engine = ScriptedEngine(model, tokenize or (lambda text: list(text.encode())))
    runner = web.AppRunner(engine.app(), handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        engine.url = f"http://{host}:{port}"
        yield engine
    finally:
        await runner.cleanup()
