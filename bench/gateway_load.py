"""Load on a router: closed loops of clients with keep-alive, every answer checked."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from dataclasses import dataclass

from bench.gateway_engine import EVENTS
from bench.gateway_routers import MODEL
from gateway.upstream import HttpUpstream
from prfaas.errors import PrfaasError
from prfaas.limits import Limits

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HEADERS = {"content-type": "application/json"}


class LoadError(PrfaasError):
    """A router answered otherwise than the engine behind it."""

    kind = "load"


@dataclass(frozen=True, slots=True)
class Load:
    """A kind of request. All bodies of one begin alike and end differently, as turns of a chat."""

    name: str
    body_bytes: int
    clients: int
    requests: int
    stream: bool = False
    paced: bool = False
    remote: bool = False
    """A prompt of token ids, which a gateway can offload without a tokenizer."""
    routers: frozenset[str] = frozenset()
    """Who gets it; empty: all that have one engine."""

    @property
    def path(self) -> str:
        return COMPLETIONS if self.remote else CHAT

    @property
    def tokens(self) -> int:
        return EVENTS if self.stream else 1

    def body(self, number: int) -> bytes:
        fields: dict[str, object] = {"model": MODEL, "max_tokens": 32}
        if self.remote:
            return self._ids(fields, number)
        if self.stream:
            fields["stream"] = True
        if self.paced:
            fields["user"] = "paced"
        content = f" {number:08d}"
        message = {"role": "user", "content": content}
        size = len(json.dumps({**fields, "messages": [message]}))
        message["content"] = _words(self.body_bytes - size) + content
        return json.dumps({**fields, "messages": [message]}).encode()

    def _ids(self, fields: dict[str, object], number: int) -> bytes:
        last = 10**8 + number
        left = self.body_bytes - len(json.dumps({**fields, "prompt": [last], "user": ""}))
        prompt = [10 + at % 90 for at in range(left // len("10, "))]
        fields["user"] = "x" * (left % len("10, "))
        return json.dumps({**fields, "prompt": [*prompt, last]}).encode()


def _words(size: int) -> str:
    text = " ".join(f"word{i % 997}" for i in range(size // 6 + 2))
    return text[: max(0, size)]


class Driver:
    """Owns the clients of one router; close it with `close`."""

    def __init__(self, url: str) -> None:
        self._upstream = HttpUpstream(url, "router", Limits())
        self._numbers = itertools.count()

    async def close(self) -> None:
        await self._upstream.close()

    async def run(self, load: Load) -> list[float]:
        """Seconds that each request took. Raises LoadError for a wrong answer."""
        left = iter(range(load.requests))
        took: list[float] = []
        # Made before, so that the load's own work does not lie between two requests.
        bodies = [load.body(next(self._numbers)) for _ in range(min(load.requests, 64))]

        async def client() -> None:
            for at in left:
                started = time.perf_counter()
                async with self._upstream.post(
                    load.path, HEADERS, bodies[at % len(bodies)]
                ) as response:
                    answer = await response.read(1 << 20)
                    status = response.status
                took.append(time.perf_counter() - started)
                whole = answer.count(b"data: ") == EVENTS + 1 if load.stream else b"hello" in answer
                if status != 200 or not whole:
                    raise LoadError(f"{status}: {answer[:200]!r}")

        await asyncio.gather(*(client() for _ in range(load.clients)))
        return took
