"""What the handlers work with: the engine once it is loaded, and the phase of the server's life."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from local_engine.metrics import EngineMetrics
from prfaas.errors import EngineUnavailable, Overloaded
from prfaas.limits import Limits
from prfaas.tokens import Tokenizer

if TYPE_CHECKING:
    from local_engine.engine import Engine

T = TypeVar("T")

RETRY_AFTER_S = 1.0
INLINE_TEXT_CHARS = 2048
"""Shorter texts are tokenised on the event loop: about a millisecond, less than a thread's turn."""


class Phase(enum.StrEnum):
    """LOADING to READY to DRAINING, in this order and never back."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class Serving:
    """A loaded engine and what its server says about it. Closed by whoever made the parts.

    `paced` is the profile's name, empty for a real model. `created` is in Unix seconds.
    """

    engine: Engine
    tokenizer: Tokenizer
    metrics: EngineMetrics
    model_name: str
    max_context: int
    vocab_size: int
    system_fingerprint: str
    created: int
    paced: str = ""

    @property
    def owned_by(self) -> str:
        return f"prfaas (paced: {self.paced})" if self.paced else "prfaas"


class ServerState:
    """Owns the server's phase and the thread that tokenises long texts; `close` ends the thread."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.phase = Phase.LOADING
        self._serving: Serving | None = None
        self._texts = ThreadPoolExecutor(1, thread_name_prefix="tokenize")
        self._texts_waiting = 0

    def __repr__(self) -> str:
        return f"<ServerState {self.phase.name} tokenizing={self._texts_waiting}>"

    def become_ready(self, serving: Serving) -> None:
        self._serving = serving
        self.phase = Phase.READY

    def become_draining(self) -> None:
        self.phase = Phase.DRAINING

    def close(self) -> None:
        self._texts.shutdown(wait=False, cancel_futures=True)

    @property
    def broken(self) -> bool:
        """The engine was there and has failed; only a restart helps."""
        return self._serving is not None and not self._serving.engine.healthy

    @property
    def loaded(self) -> Serving:
        """Raises EngineUnavailable while the model loads."""
        if self._serving is None:
            raise EngineUnavailable("the model is still loading", retry_after_s=RETRY_AFTER_S)
        return self._serving

    @property
    def open(self) -> Serving:
        """The same for new work, which a draining server refuses."""
        if self.phase is Phase.DRAINING:
            raise EngineUnavailable("the engine is shutting down", retry_after_s=RETRY_AFTER_S)
        return self.loaded

    async def on_text(self, chars: int, work: Callable[[], T]) -> T:
        """Run `work` on a text of this size, off the loop if it is long. Raises Overloaded."""
        if chars <= INLINE_TEXT_CHARS:
            return work()
        if self._texts_waiting >= self.limits.engine_max_waiting:
            raise Overloaded("too many texts wait to be tokenised", retry_after_s=RETRY_AFTER_S)
        self._texts_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._texts, work)
        finally:
            self._texts_waiting -= 1
