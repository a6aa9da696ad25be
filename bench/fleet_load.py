"""Load on a live fleet: the paper's prompts, at a rate or by so many clients, each answer timed."""

from __future__ import annotations

import asyncio
import random
import string
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from bench.fleet_site import MODEL, PAPER_LENGTHS, output_tokens, prompt_tokens
from policies.workload.request import Request
from prfaas.errors import PrfaasError
from prfaas.up.client import OpenAIClient, StreamedAnswer

_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Asked:
    """One request; times in the loop's seconds."""

    url: str
    sent_s: float
    done_s: float
    ttft_s: float
    failure: str = ""


class FleetLoad:
    """Clients of a fleet's gateways; close with `async with`. Lengths and times are drawn from
    `seed`, texts from `words` (none: from `seed`).
    """

    def __init__(self, urls: Sequence[str], seed: int, words: int | None = None) -> None:
        self._urls = tuple(urls)
        self._lengths = random.Random(f"lengths {seed}")
        self._gaps = random.Random(f"gaps {seed}")
        self._words = random.Random(f"words {seed if words is None else words}")
        self._clients: list[OpenAIClient] = []
        self._stack = AsyncExitStack()
        self._turn = 0

    async def __aenter__(self) -> FleetLoad:
        for url in self._urls:
            client = OpenAIClient(url, timeout_s=_TIMEOUT_S)
            self._clients.append(await self._stack.enter_async_context(client))
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    async def at_rate(self, rate_per_s: float, seconds: float) -> list[Asked]:
        """Poisson arrivals for so long, each gateway in turn; all answers."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        tasks: list[asyncio.Task[Asked]] = []
        for at in _arrivals(self._gaps, rate_per_s, seconds):
            await asyncio.sleep(began + at - loop.time())
            tasks.append(asyncio.create_task(self._ask(_length(self._lengths))))
        return await asyncio.gather(*tasks)

    async def saturated(self, clients: int, warm_s: float, seconds: float) -> float:
        """Answers a second of `clients` that ask again at once, over `seconds` after `warm_s`.

        Raises PrfaasError where one fails: then it is not the fleet's rate.
        """
        loop = asyncio.get_running_loop()
        start = loop.time() + warm_s
        ended: list[Asked] = []

        async def client() -> None:
            while True:
                ended.append(await self._ask(_length(self._lengths)))

        tasks = [asyncio.create_task(client()) for _ in range(clients)]
        try:
            await asyncio.sleep(warm_s + seconds)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        failures = {one.failure for one in ended if one.failure}
        if failures:
            raise PrfaasError(f"requests failed: {'; '.join(sorted(failures))}")
        counted = [one for one in ended if start <= one.done_s < start + seconds]
        return len(counted) / seconds

    async def _ask(self, tokens: int) -> Asked:
        """One request to the next gateway."""
        at, self._turn = self._turn % len(self._urls), self._turn + 1
        prompt = "".join(self._words.choices(string.ascii_lowercase, k=tokens))
        loop = asyncio.get_running_loop()
        sink = StreamedAnswer("", 0.0)
        sent_s, failure = loop.time(), ""
        try:
            await self._clients[at].complete(
                prompt, max_tokens=output_tokens(), sink=sink, model=MODEL, ignore_eos=True
            )
        except PrfaasError as exc:
            failure = exc.message
        ttft_s = float("inf") if sink.first_event_at is None else sink.ttft_s
        return Asked(self._urls[at], sent_s, loop.time(), ttft_s, failure)


def drawn(seed: int, rate_per_s: float, seconds: float) -> list[Request]:
    """What `FleetLoad.at_rate` asks with this seed, for the simulator."""
    lengths, gaps = random.Random(f"lengths {seed}"), random.Random(f"gaps {seed}")
    return [
        Request(number, at, _length(lengths), output_tokens())
        for number, at in enumerate(_arrivals(gaps, rate_per_s, seconds))
    ]


def _arrivals(gaps: random.Random, rate_per_s: float, seconds: float) -> Iterator[float]:
    """Poisson, until `seconds`."""
    at = 0.0
    while (at := at + gaps.expovariate(rate_per_s)) < seconds:
        yield at


def _length(lengths: random.Random) -> int:
    return prompt_tokens(PAPER_LENGTHS.draw(lengths))
