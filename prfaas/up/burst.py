"""A burst: long prompts arrive while chats are running, through one gateway or another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from prfaas.up.client import OpenAIClient, StreamedAnswer
from prfaas.up.cluster import wait_record
from prfaas.up.prompts import CHATS

_CHAT_TOKENS = 600
_WARM_TOKENS = 3
_ANSWER_TOKENS = 16


@dataclass(frozen=True, slots=True)
class BurstResult:
    """What the running chats and the arriving prompts felt; seconds."""

    itl_s: tuple[float, ...]
    """Of the chats, from the first arrival to the last first token."""
    ttft_s: tuple[float, ...]
    """Of the long prompts, in order of arrival."""
    offloaded: int


@asynccontextmanager
async def running_chats(
    gateway: OpenAIClient, prompts: Sequence[str] = CHATS
) -> AsyncIterator[list[StreamedAnswer]]:
    """Chats that keep decoding until the body ends; it starts when each has some tokens."""
    answers: list[StreamedAnswer] = []

    async def chat(prompt: str) -> None:
        while True:
            answer = StreamedAnswer("", 0.0)
            answers.append(answer)
            await gateway.chat(prompt, max_tokens=_CHAT_TOKENS, ignore_eos=True, sink=answer)

    tasks = [asyncio.create_task(chat(prompt)) for prompt in prompts]
    try:
        while sum(len(answer.token_at) >= _WARM_TOKENS for answer in answers) < len(prompts):
            failed = next((task for task in tasks if task.done()), None)
            if failed is not None:
                await failed
            await asyncio.sleep(0.02)
        yield answers
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def run_burst(
    gateway: OpenAIClient, prompts: Sequence[str], arrival_gap_s: float
) -> BurstResult:
    """Send the prompts `arrival_gap_s` apart into running chats, all through `gateway`."""

    async def ask(prompt: str, after_s: float) -> StreamedAnswer:
        await asyncio.sleep(after_s)
        return await gateway.chat(prompt, max_tokens=_ANSWER_TOKENS)

    async with running_chats(gateway) as chats:
        answers = await asyncio.gather(
            *(ask(prompt, number * arrival_gap_s) for number, prompt in enumerate(prompts))
        )
        start = min(answer.sent_at for answer in answers)
        end = max(answer.sent_at + answer.ttft_s for answer in answers)
        itl_s = [gap for chat in chats for gap in chat.itl_between(start, end)]
    records = [await wait_record(gateway, answer.request_id) for answer in answers]
    return BurstResult(
        itl_s=tuple(itl_s),
        ttft_s=tuple(answer.ttft_s for answer in answers),
        offloaded=sum(record["target"] == "remote" for record in records),
    )
