"""The engine: one thread that schedules, prefills, decodes and moves KV; asyncio callers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Protocol

from local_engine.requests import EngineRequest, EngineStats, TokenEvent
from local_engine.runner import ModelRunner
from prfaas.clock import Deadline
from prfaas.limits import Limits
from prfaas.settings import EngineSettings


class TokenStream(AsyncIterator[TokenEvent], Protocol):
    """Events of one request; whoever stops early must `aclose`, which cancels the request."""

    async def aclose(self) -> None: ...


class Engine:
    """Owns the engine thread, the scheduler and the port; its owner calls `start` and `close`."""

    def __init__(
        self,
        runner: ModelRunner,
        pool: object,
        settings: EngineSettings,
        limits: Limits,
        *,
        vocab_size: int,
        eos_ids: frozenset[int],
        max_context: int,
        port: Callable[[object], object] | None = None,
    ) -> None:
        raise NotImplementedError

    def start(self) -> None:
        """Measure the prefill curve (seconds), then start the engine thread and the port."""

    def close(self) -> None:
        """End every request with an error, stop the thread and the port. Idempotent."""

    async def submit(self, request: EngineRequest) -> TokenStream:
        """Queue a request. Raises InvalidRequest, ContextTooLong, Overloaded, EngineUnavailable."""
        raise NotImplementedError

    def cancel(self, request_id: str) -> None:
        """End a request wherever it is; unknown ids are ignored. Its stream ends with Cancelled."""

    async def drain(self, deadline: Deadline) -> bool:
        """Refuse new requests and wait for the running ones; False if the deadline came first."""
        raise NotImplementedError

    async def reset_prefix_cache(self) -> None:
        """Forget all cached blocks that no sequence uses, and tell the agent."""

    def stats(self) -> EngineStats:
        """A frozen snapshot, never older than one step."""
        raise NotImplementedError

    async def check_integrity(self) -> None:
        """Raise AssertionError that says which block is wrong."""
