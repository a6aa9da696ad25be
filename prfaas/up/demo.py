"""The demonstration: one prompt served at D, one that the policy sends to P, and a burst."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from prfaas.up.burst import BurstResult, run_burst, running_chats
from prfaas.up.client import OpenAIClient, StreamedAnswer
from prfaas.up.cluster import Record, d_has_queue, measured, wait_cluster, wait_record
from prfaas.up.prompts import SHORT, burst_prompts, long_prompt, queued_prompt, warm_up_prompt
from prfaas.up.report import burst_table, request_table

_PAIRED_TIMEOUT_S = 60.0
_QUEUE_TIMEOUT_S = 10.0
_IDLE_TIMEOUT_S = 30.0
_SHORT_TOKENS, _LONG_TOKENS = 32, 48
_BURST_PROMPTS = 6
_ARRIVAL_GAP_S = 1.0
_REMOTE_STATUS = "staged"


@dataclass(slots=True)
class Demo:
    """Shows both paths on a running system; `problems` lists what was not as it should be."""

    console: Console
    gateway: OpenAIClient
    local_gateway: OpenAIClient
    """A gateway with offload switched off, in front of the same engine."""
    d_engine: OpenAIClient
    p_engine: OpenAIClient
    d_core: int | None
    p_core: int | None
    problems: list[str] = field(default_factory=list)

    async def run(self) -> None:
        """The whole of it. Raises PrfaasError where a request fails."""
        await wait_cluster(self.gateway, "both sides to be measured", measured, _PAIRED_TIMEOUT_S)
        await self.warm_up()
        await self.short()
        await self.long()
        await self.burst()
        await self.check_idle()

    async def warm_up(self) -> None:
        """A long prompt at each engine: the few chunks they measured at start, both at once and
        beside the start of everything else, are a poor base for the estimates shown here."""
        engines = (self.d_engine, self.p_engine)
        await asyncio.gather(*(e.chat(warm_up_prompt(), max_tokens=8) for e in engines))

    async def short(self) -> None:
        """A short prompt, which stays at D."""
        answer = await self.gateway.chat(SHORT, max_tokens=_SHORT_TOKENS)
        record = await wait_record(self.gateway, answer.request_id)
        self._show("A short prompt", answer, record)
        if record["target"] != "local":
            self.problems.append("the short prompt was not served at D")

    async def long(self) -> None:
        """A long prompt while D decodes chats and has another prompt in its queue."""
        async with running_chats(self.gateway) as chats:
            queued = asyncio.create_task(self.d_engine.chat(queued_prompt(), max_tokens=1))
            try:
                # A model so fast that its queue is gone before anyone hears of it goes on too.
                await wait_cluster(
                    self.gateway,
                    "D's queue",
                    lambda cluster: queued.done() or d_has_queue(cluster),
                    _QUEUE_TIMEOUT_S,
                )
                answer = await self.gateway.chat(long_prompt(), max_tokens=_LONG_TOKENS)
                await queued
            finally:
                queued.cancel()
                await asyncio.gather(queued, return_exceptions=True)
            busy = f"D busy with {len(chats)} chats and a queued prompt"
        record = await wait_record(self.gateway, answer.request_id)
        self._show(f"A long prompt, {busy}", answer, record)
        outcome = record["outcome"] or {}
        if record["target"] != "remote" or outcome.get("status") != _REMOTE_STATUS:
            self.problems.append(
                "the long prompt was not wholly prefilled at P; on a machine that has other work "
                "that can happen, otherwise the logs say why"
            )

    async def burst(self) -> None:
        """Long prompts into running chats: local only, then with offload."""
        self.console.print(
            f"\n{_BURST_PROMPTS} long prompts, {_ARRIVAL_GAP_S:.0f} s apart, while chats run: "
            "first with offload switched off, then with it"
        )
        local = await run_burst(
            self.local_gateway, burst_prompts("Text", _BURST_PROMPTS), _ARRIVAL_GAP_S
        )
        offload = await run_burst(
            self.gateway, burst_prompts("Page", _BURST_PROMPTS), _ARRIVAL_GAP_S
        )
        self.console.print(burst_table(local, offload), self._cores())
        self._check_bursts(local, offload)

    async def check_idle(self) -> None:
        """Both engines idle again, and every block of their pools where it belongs."""
        deadline = asyncio.get_running_loop().time() + _IDLE_TIMEOUT_S
        for name, engine in (("D", self.d_engine), ("P", self.p_engine)):
            while not _idle(state := await engine.get("/debug/integrity")):
                if asyncio.get_running_loop().time() > deadline:
                    self.problems.append(f"{name} is not idle and whole: {state}")
                    break
                await asyncio.sleep(0.1)

    def _show(self, title: str, answer: StreamedAnswer, record: Record) -> None:
        self.console.print()
        self.console.print(request_table(title, answer, record))
        if not answer.text.strip():
            self.problems.append(f"{title}: the answer is empty")

    def _cores(self) -> str:
        if self.d_core is None:
            return "Both engines share this machine's cores: offload has no core of its own here."
        return (
            f"D runs on core {self.d_core}, P on core {self.p_core}: offload uses a second core, "
            "as a second cluster would."
        )

    def _check_bursts(self, local: BurstResult, offload: BurstResult) -> None:
        if local.offloaded:
            self.problems.append("a prompt was offloaded with offload switched off")
        if not offload.offloaded:
            self.problems.append("no prompt of the burst was offloaded")


def _idle(integrity: dict[str, Any]) -> bool:
    busy = ("waiting", "waiting_kv", "running", "exporting", "queue_tokens", "integrity_failures")
    return (
        bool(integrity["ok"])
        and not any(integrity[name] for name in busy)
        and integrity["free_blocks"] == integrity["total_blocks"]
    )
