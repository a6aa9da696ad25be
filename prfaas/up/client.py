"""A streaming OpenAI client that times every token, for the demonstration and benchmarks."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import aiohttp

from prfaas.errors import PeerUnavailable, PrfaasError, from_kind

REQUEST_ID_HEADER = "x-request-id"

SocketFactory = Callable[[tuple[Any, ...]], socket.socket]
"""Makes the socket for one `getaddrinfo` result."""


@dataclass(slots=True)
class StreamedAnswer:
    """One streamed answer; times are `time.perf_counter()` seconds."""

    request_id: str
    sent_at: float
    text: str = ""
    finish_reason: str = ""
    first_event_at: float | None = None
    """When the first event came, which is sent with the first token even where it has no text."""
    token_at: list[float] = field(default_factory=list)
    """When each event with text came; one token each, but for characters of several tokens."""
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def ttft_s(self) -> float:
        """Request sent to first token; only once there is one."""
        assert self.first_event_at is not None
        return self.first_event_at - self.sent_at

    @property
    def itl_s(self) -> list[float]:
        """Times between texts."""
        return [later - earlier for earlier, later in pairwise(self.token_at)]

    def itl_between(self, start: float, end: float) -> list[float]:
        """Times between texts of which any part lies in [start, end]."""
        return [b - a for a, b in pairwise(self.token_at) if b >= start and a <= end]


class OpenAIClient:
    """Owns an HTTP session to one server; close with `async with`.

    Errors of the server come out as the class they went in as.
    """

    def __init__(
        self, url: str, *, timeout_s: float, socket_factory: SocketFactory | None = None
    ) -> None:
        """`socket_factory` makes the sockets, for servers in another network namespace."""
        self._url = url
        self._socket_factory = socket_factory
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> OpenAIClient:
        connector = aiohttp.TCPConnector(limit=0, socket_factory=self._socket_factory)
        self._session = aiohttp.ClientSession(timeout=self._timeout, connector=connector)
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def chat(
        self, content: str, *, max_tokens: int, sink: StreamedAnswer | None = None, **fields: Any
    ) -> StreamedAnswer:
        """Stream the greedy answer to one user message; `sink` can be read while it grows."""
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": max_tokens}
        return await self._stream("/v1/chat/completions", {**body, **fields}, sink)

    async def complete(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int,
        sink: StreamedAnswer | None = None,
        **fields: Any,
    ) -> StreamedAnswer:
        """Stream the greedy completion of a text or of token ids."""
        body = {"prompt": prompt, "max_tokens": max_tokens}
        return await self._stream("/v1/completions", {**body, **fields}, sink)

    async def get(self, path: str) -> dict[str, Any]:
        """A JSON document."""
        with self._translated(path):
            async with self._open().get(self._url + path) as response:
                return await _json(response)

    async def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Post JSON, get JSON."""
        with self._translated(path):
            async with self._open().post(self._url + path, json=body) as response:
                return await _json(response)

    async def status(self, path: str) -> int:
        """HTTP status of a GET; 0 where nobody listens."""
        try:
            async with self._open().get(self._url + path) as response:
                return response.status
        except aiohttp.ClientConnectionError:
            return 0

    async def _stream(
        self, path: str, fields: Mapping[str, Any], sink: StreamedAnswer | None
    ) -> StreamedAnswer:
        body = {
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **fields,
        }
        answer = StreamedAnswer("", 0.0) if sink is None else sink
        answer.sent_at = time.perf_counter()
        complete = False
        with self._translated(path):
            async with self._open().post(self._url + path, json=body) as response:
                if response.status != 200:
                    await _json(response)
                answer.request_id = response.headers.get(REQUEST_ID_HEADER, "")
                async for line in response.content:
                    if line.startswith(b"data: [DONE]"):
                        complete = True
                    elif line.startswith(b"data: "):
                        _take_event(answer, json.loads(line[6:]))
        if not complete:
            raise PrfaasError(f"the stream of {path} ended without [DONE]")
        return answer

    @contextmanager
    def _translated(self, path: str) -> Iterator[None]:
        try:
            yield
        except (aiohttp.ClientError, TimeoutError) as exc:
            why = str(exc) or type(exc).__name__
            raise PeerUnavailable(f"{self._url}{path} broke off: {why}") from exc

    def _open(self) -> aiohttp.ClientSession:
        assert self._session is not None
        return self._session


def _take_event(answer: StreamedAnswer, event: dict[str, Any]) -> None:
    if "error" in event:
        raise _error(event)
    if event.get("usage"):
        answer.usage = event["usage"]
    if answer.first_event_at is None:
        answer.first_event_at = time.perf_counter()
    for choice in event["choices"]:
        text = choice["text"] if "text" in choice else choice["delta"].get("content")
        if text:
            answer.text += text
            answer.token_at.append(time.perf_counter())
        if choice.get("finish_reason"):
            answer.finish_reason = choice["finish_reason"]


async def _json(response: aiohttp.ClientResponse) -> dict[str, Any]:
    try:
        body = await response.json(content_type=None)
    except ValueError:
        raise PrfaasError(f"{response.url.path} answered {response.status}, not JSON") from None
    if response.status >= 400 or not isinstance(body, dict):
        raise _error(body if isinstance(body, dict) else {})
    return body


def _error(body: Mapping[str, Any]) -> PrfaasError:
    error = body.get("error") or {}
    return from_kind(str(error.get("type", "")), str(error.get("message", body)))
