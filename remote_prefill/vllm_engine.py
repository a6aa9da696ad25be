"""The vLLM beside an agent: what it is asked over HTTP, and what it tells of itself.

Everything else about it is as with any engine on KvPort.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import numpy as np

from prfaas.clock import Clock
from prfaas.errors import PrfaasError
from prfaas.kvport import EngineConn
from prfaas.settings import EngineAgentSettings, VllmSettings
from prfaas_connect.port.messages import Hello, KvEvents, Stats
from remote_prefill.vllm_events import Batch, Change, VllmIndex
from remote_prefill.vllm_feed import EventStream
from remote_prefill.vllm_metrics import READ, LoadMeter, parse_metrics

if TYPE_CHECKING:
    from remote_prefill.vllm_api import VllmApi

log = logging.getLogger(__name__)

CALIBRATION_TOKENS = (64, 512)
CALIBRATION_ROUNDS = 2
MAX_HASHES = 16384
"""Of one message of ours to the index."""
FAILURES_TO_TELL = 3


class VllmSubmitter:
    """Brings the tokens of an export to vLLM; see `exports.Submitter`."""

    def __init__(self, api: VllmApi, model: str) -> None:
        self._api = api
        self._model = model

    async def submit(
        self, tokens: bytes, *, session: str, epoch: int, salt: str, use_cache: bool
    ) -> None:
        """Until vLLM has answered with the token that nobody reads. Raises PrfaasError."""
        await self._api.prefill(
            self._model,
            tokens,
            salt=salt,
            use_cache=use_cache,
            export={"session": session, "epoch": epoch},
        )


class VllmEngine:
    """Owns the API and the feeds of one connection of one vLLM; `close` ends them.

    `on_stats(None)` says that the load is not known any more; `fetches` counts the requests for
    which the agent brings KV.
    """

    def __init__(
        self,
        settings: VllmSettings,
        hello: Hello,
        *,
        on_stats: Callable[[Stats | None], None],
        on_events: Callable[[KvEvents], None],
        clock: Clock,
        fetches: Callable[[], int] = lambda: 0,
    ) -> None:
        self._settings = settings
        self._hello = hello
        self._on_stats = on_stats
        self._on_events = on_events
        self._clock = clock
        self._fetches = fetches
        # An HTTP client is a sixth of what an agent loads, and only this engine needs one.
        from remote_prefill.vllm_api import VllmApi

        self.api = VllmApi(settings)
        self.submitter = VllmSubmitter(self.api, hello.model)
        self.index = VllmIndex(hello.block_tokens)
        self._meter = LoadMeter(block_tokens=hello.block_tokens, max_tokens=hello.max_tokens)
        self._seq = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._stream: EventStream | None = None

    def start(self) -> None:
        """Begin to read load and events. Raises ConfigError where the events cannot be read."""
        if self._settings.kv_events:
            self._stream = _stream(self._settings, self._batch, self._gap)
            self._spawn(self._stream.run())
        else:
            log.warning(
                "vllm.kv_events names no endpoint: what vLLM has cached is unknown, so nothing is "
                "offloaded to or from it"
            )
        self._spawn(self._poll())

    async def close(self) -> None:
        """Idempotent."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._stream is not None:
            self._stream.close()
        await self.api.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name="vllm feed")
        task.add_done_callback(_tell)
        self._tasks.append(task)

    # --- load ---

    async def _poll(self) -> None:
        failures, calibrated = 0, False
        while True:
            try:
                metrics = parse_metrics(await self.api.metrics(READ))
                if not calibrated:
                    await self._calibrate()
                    calibrated = True
                self._on_stats(self._meter.stats(metrics, fetches=self._fetches()))
                failures = 0
            except PrfaasError as exc:
                failures += 1
                if failures == FAILURES_TO_TELL:
                    log.warning("the load of vLLM is unknown: %s", exc.message)
                    self._on_stats(None)
            await asyncio.sleep(self._settings.poll_s)

    async def _calibrate(self) -> None:
        """Time two prefills of lengths apart, the faster of two rounds each."""
        most = self._hello.max_tokens - 1
        short, long = (min(tokens, most) for tokens in CALIBRATION_TOKENS)
        if short == long:
            return
        times = {short: float("inf"), long: float("inf")}
        for _ in range(CALIBRATION_ROUNDS):
            for tokens in (short, long):
                ids = (np.arange(tokens, dtype=np.int64) * 7919 % self._hello.vocab_size).astype(
                    "<i4"
                )
                started = self._clock.now()
                await self.api.prefill(self._hello.model, ids.tobytes(), use_cache=False)
                times[tokens] = min(times[tokens], self._clock.now() - started)
        token_s = max(0.0, times[long] - times[short]) / (long - short)
        base_s = max(0.0, times[short] - short * token_s)
        self._meter.calibrated(base_s, token_s)
        log.info("vLLM prefills in %.1f ms + %.3f ms a token", 1e3 * base_s, 1e3 * token_s)

    # --- prefix cache ---

    def _batch(self, batch: Batch) -> None:
        self._publish(self.index.apply(batch))

    def _gap(self, reason: str) -> None:
        log.info("the index of vLLM's prefix cache starts anew: %s", reason)
        self.index.clear()
        self._publish(Change(cleared=True))

    def _publish(self, change: Change) -> None:
        if not change:
            return
        most = max(len(change.stored), len(change.removed), 1)
        for start in range(0, most, MAX_HASHES):
            part = slice(start, start + MAX_HASHES)
            self._seq += 1
            self._on_events(
                KvEvents(
                    epoch=self._hello.epoch,
                    seq=self._seq,
                    stored=[name.hex() for name in change.stored[part]],
                    removed=[name.hex() for name in change.removed[part]],
                    cleared=change.cleared and start == 0,
                )
            )


def check_vllm(settings: EngineAgentSettings) -> None:
    """Raise ConfigError where the settings name a vLLM whose events could not be read."""
    if settings.engine == "vllm" and settings.vllm.kv_events:
        _stream(settings.vllm, lambda batch: None, lambda reason: None).close()


def _stream(
    settings: VllmSettings, on_batch: Callable[[Batch], None], on_gap: Callable[[str], None]
) -> EventStream:
    return EventStream(
        settings.kv_events, settings.kv_events_replay, on_batch=on_batch, on_gap=on_gap
    )


def vllm_beside(
    settings: EngineAgentSettings,
    conn: EngineConn,
    *,
    on_stats: Callable[[Stats | None], None],
    on_events: Callable[[KvEvents], None],
    clock: Clock,
    fetches: Callable[[], int] = lambda: 0,
) -> VllmEngine | None:
    """The vLLM that has connected, not started; None for an engine that says all on the port."""
    if settings.engine != "vllm":
        if conn.hello.engine.startswith("vllm"):
            log.error(
                "a vLLM has connected to an agent whose `engine` is %r: it gets no work, and its "
                "load is unknown (start the agent with --engine vllm --engine-url URL)",
                settings.engine,
            )
        return None
    return VllmEngine(
        settings.vllm,
        conn.hello,
        on_stats=on_stats,
        on_events=on_events,
        clock=clock,
        fetches=fetches,
    )


def _tell(task: asyncio.Task[None]) -> None:
    """A feed that ends by itself is a fault of ours, which must not pass in silence."""
    with contextlib.suppress(asyncio.CancelledError):
        error = task.exception()
        if error is not None:
            log.error("a feed of vLLM has ended: %r", error, exc_info=error)
