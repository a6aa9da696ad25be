"""Whether the gateway's tokenizer counts as the engine does, by asking its `/tokenize`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from itertools import zip_longest
from typing import Any

import msgspec

from gateway.schema import Api, ParsedRequest, parse
from gateway.tokenise import Tokeniser
from gateway.upstream import Upstream
from prfaas.errors import EngineUnavailable, PrfaasError
from prfaas.limits import Limits

logger = logging.getLogger(__name__)

SAMPLE = (
    "The quick brown fox jumps over 13 lazy dogs.\n\tnaïve café, 東京, 🙂 def f(x): return x ** 2"
)


class TokenizerCheck:
    """Compares at start and once every so many requests, one comparison at a time, in a task that
    `close` ends. A difference is warned of once until it is gone again."""

    def __init__(
        self,
        tokeniser: Tokeniser,
        upstream: Callable[[], Upstream],
        every: int,
        limits: Limits,
    ) -> None:
        """`upstream` gives an engine to ask."""
        self._tokeniser = tokeniser
        self._upstream = upstream
        self._every = every
        self._limits = limits
        self._since = 0
        self._task: asyncio.Task[None] | None = None
        self._warned = False
        self.difference: float | None = None
        """Share of ids that differed the last time; None: not compared, or the engine cannot."""

    def start(self, model: str) -> None:
        """Compare a sample text; call it when the engine is reachable."""
        body = msgspec.json.encode({"model": model, "prompt": SAMPLE})
        self._begin(parse(Api.COMPLETIONS, body))

    def saw(self, parsed: ParsedRequest) -> None:
        """Count a tokenised request; every so often it is compared in the background."""
        self._since += 1
        if self._every and self._since >= self._every:
            self._since = 0
            self._begin(parsed)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _begin(self, parsed: ParsedRequest) -> None:
        busy = self._task is not None and not self._task.done()
        comparable = not (parsed.has("tools") or isinstance(parsed.decode("prompt", Any), list))
        if comparable and not busy and self._tokeniser.available:
            self._task = asyncio.create_task(self._compare(parsed))

    async def _compare(self, parsed: ParsedRequest) -> None:
        try:
            async with asyncio.timeout(self._limits.control_timeout_s):
                theirs = await self._ask(parsed)
                ours = await self._tokeniser.ids(parsed)
        except (PrfaasError, TimeoutError) as exc:
            logger.info("the engine's tokenizer cannot be compared: %s", exc)
            return
        differing = sum(a != b for a, b in zip_longest(ours, theirs))
        self.difference = differing / max(len(ours), len(theirs), 1)
        if differing and not self._warned:
            logger.warning(
                "the gateway's tokenizer differs from the engine's in %d of %d ids (%d against %d "
                "tokens): prefix matches and estimates are off",
                differing, max(len(ours), len(theirs)), len(ours), len(theirs),
            )  # fmt: skip
        self._warned = differing > 0

    async def _ask(self, parsed: ParsedRequest) -> list[int]:
        names = ("model", "prompt", "messages", "add_special_tokens")
        body = {name: parsed.fields[name] for name in names if parsed.has(name)}
        headers = {"content-type": "application/json"}
        async with self._upstream().post(
            "/tokenize", headers, msgspec.json.encode(body)
        ) as response:
            answer = await response.read(self._limits.max_answer_bytes)
            if response.status != 200:
                raise EngineUnavailable(f"/tokenize answers {response.status}")
        try:
            return msgspec.json.decode(answer, type=_Tokens).tokens
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            raise EngineUnavailable(f"/tokenize: {exc}") from exc


class _Tokens(msgspec.Struct):
    tokens: list[int]
