"""The engine: one thread that schedules, prefills, decodes and moves KV; asyncio callers."""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import replace
from typing import TypeVar

import numpy as np

from local_engine.admission import Admission
from local_engine.answer import Answer
from local_engine.core import EngineCore
from local_engine.kv.pool import KvPool
from local_engine.kv_encode import KvEncoder
from local_engine.port import KvPort
from local_engine.port_feed import MIN_INTERVAL_S, PortFeed
from local_engine.requests import EngineRequest, EngineStats
from local_engine.runner import ModelRunner
from local_engine.stream import TokenStream, wake_all
from prfaas.clock import SYSTEM_CLOCK, Clock, Deadline
from prfaas.errors import ContextTooLong, EngineUnavailable, InvalidRequest
from prfaas.limits import Limits
from prfaas.settings import EngineSettings
from prfaas_connect.device.staging import Staging, TorchDevice
from prfaas_connect.port.messages import PortMessage, PrefillStart, RingFree, Welcome

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")

# Between two looks at slow clients and stats while there is nothing to do.
_IDLE_WAIT_S = 0.25
_COPY_POLL_S = 0.001
_CHECK_INTERVAL_S = 1.0
_JOIN_TIMEOUT_S = 60.0


class Engine:
    """Owns the engine thread and everything on it; its owner calls `start` and `close`.

    It is the `EngineHandler` of its port. `settings.max_context` is not looked at: `max_context`
    is what model and settings agree on.
    """

    def __init__(
        self,
        runner: ModelRunner,
        pool: KvPool,
        settings: EngineSettings,
        limits: Limits,
        *,
        vocab_size: int,
        eos_ids: frozenset[int],
        max_context: int,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.epoch = secrets.token_hex(8)
        """Random at each start; part of Hello and of every KV event."""
        self.vocab_size = vocab_size
        self.max_context = max_context
        self._pool = pool
        self._settings = settings
        self._limits = limits
        self._eos_ids = eos_ids
        self._clock = clock
        self._admission = Admission(limits.engine_max_waiting)
        self._core = EngineCore(
            runner, pool, settings, limits, self._admission,
            vocab_size=vocab_size, max_context=max_context, epoch=self.epoch, clock=clock,
        )  # fmt: skip
        self._stats = self._core.stats()
        self._integrity_failures = 0
        self._port: KvPort | None = None
        self._feed: PortFeed | None = None
        self._commands: deque[tuple[Callable[[], None], int]] = deque()
        """And the tokens that each brings to prefill."""
        self._taken = (0, 0)
        """Requests that bring some, and those, of commands that ran since the last `_publish`."""
        self._commands_lock = threading.Lock()
        self._ended = False
        self._wake = threading.Event()
        self._stopping = False
        self._checked_at = clock.now()
        self._when_idle: list[Future[None]] = []
        self._failure: str | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def attach_port(self, port: KvPort, encoders: Iterable[KvEncoder] = ()) -> None:
        """Exchange KV through `port`, whose handler is this engine; before `start`. Owns it.
        `encoders`: what the port's Hello says can be prepared on the pool's accelerator.
        """
        self._port = port
        self._feed = PortFeed(port, self._core.events, self._limits.watch_interval_s, self._clock)
        device = self._pool.device
        staging = None if device.type == "cpu" else Staging(TorchDevice(device))
        self._core.attach(port, staging, encoders)

    def start(self) -> None:
        """Measure the prefill curve (seconds), then start the engine thread and the port."""
        self._core.warm_up()
        self._publish()
        self._thread.start()
        if self._feed is not None and self._port is not None:
            self._feed.start()
            self._port.start()

    def close(self) -> None:
        """End every request with EngineUnavailable, stop thread and port. Idempotent."""
        self._admission.refuse("the engine is closing")
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_TIMEOUT_S)
        if self._feed is not None and self._port is not None:
            self._feed.close()
            self._port.close()

    @property
    def healthy(self) -> bool:
        """The engine thread runs."""
        return self._thread.is_alive() and self._failure is None

    async def submit(self, request: EngineRequest) -> TokenStream:
        """Queue a request; its events come from the returned stream, which its owner closes.

        Raises InvalidRequest, ContextTooLong, Overloaded or EngineUnavailable.
        """
        self._check_request(request)
        request_id = request.request_id
        stream = TokenStream(
            self._limits.engine_event_queue,
            self._clock,
            on_close=lambda: self.cancel(request_id),
            on_room=self._wake.set,
        )
        seed = request.sampling.seed
        answer = Answer(
            request,
            next(self._core.orders),
            secrets.randbits(63) if seed is None else seed,
            self._pool,
            stream,
            self._clock.now(),
            eos_ids=self._eos_ids,
            max_context=self.max_context,
            shares=self._settings.prefix_cache,
        )
        self._admission.enter(
            request_id,
            self._retry_after_s(),
            lambda: self._post(
                lambda: self._core.add(answer),
                # What waits for KV from a peer brings none.
                0 if request.kv_transfer_params is not None else len(request.prompt_tokens),
            ),
        )
        return stream

    def cancel(self, request_id: str) -> None:
        """End a request wherever it is; unknown ids are ignored. Its stream ends with Cancelled."""
        self._post(lambda: self._core.cancel(request_id))

    async def drain(self, deadline: Deadline) -> bool:
        """Refuse new requests and wait for the live ones; False if the deadline came first."""
        self._admission.refuse("the engine is draining")
        idle: Future[None] = Future()

        def begin() -> None:
            self._core.draining = True
            self._when_idle.append(idle)

        if not self._post(begin):
            return True
        try:
            await asyncio.wait_for(asyncio.wrap_future(idle), deadline.remaining_s())
        except TimeoutError:
            return False
        return True

    async def reset_prefix_cache(self) -> None:
        """Forget all cached KV, and tell the agent. Sequences that run keep theirs, unshared."""
        await self._call(self._core.clear_cache)

    async def check_integrity(self) -> None:
        """Raise AssertionError that says which block or sequence is wrong."""
        await self._call(self._core.check)

    def stats(self) -> EngineStats:
        """A frozen snapshot, as of the last step."""
        return self._stats

    # --- the port's reader thread ---------------------------------------------------------------

    def on_connected(self, welcome: Welcome) -> None:
        """`EngineHandler`: an agent is there."""
        _LOG.info("connected to agent %s", welcome.agent)
        self._post(self._connected)

    def on_disconnected(self, reason: str) -> None:
        """`EngineHandler`: the agent is gone."""
        if not self._stopping:
            _LOG.warning("agent lost: %s", reason)
        if self._feed is not None:
            self._feed.disconnected()
        self._core.suspend_transfers()
        self._post(self._core.disconnected)

    def on_message(self, message: PortMessage, blob: bytes) -> None:
        """`EngineHandler`: the agent says something."""
        if isinstance(message, RingFree):
            self._wake.set()  # There may be room for what waits to leave.
        else:
            tokens = len(blob) // 4 if isinstance(message, PrefillStart) else 0
            self._post(lambda: self._core.handle(message, blob), tokens)

    # --- callers' side --------------------------------------------------------------------------

    def _check_request(self, request: EngineRequest) -> None:
        tokens, wanted = len(request.prompt_tokens), request.sampling.max_tokens
        if tokens < 1:
            raise InvalidRequest("the prompt has no tokens", param="prompt")
        if wanted < 1:
            raise InvalidRequest(f"max_tokens is {wanted}, it must be positive", param="max_tokens")
        if tokens + wanted > self.max_context:
            raise ContextTooLong(
                f"{tokens} prompt tokens and max_tokens {wanted} exceed "
                f"the context of {self.max_context} tokens",
                param="max_tokens" if tokens < self.max_context else "prompt",
            )
        room = self._pool.blocks * self._pool.block_tokens
        if tokens + wanted > room:
            raise ContextTooLong(
                f"{tokens} prompt tokens and max_tokens {wanted} exceed "
                f"the KV pool of {room} tokens",
                param="max_tokens" if tokens < room else "prompt",
            )
        # What is drawn from must not fail later: that would end the engine, not the request.
        biased = [token for token, _ in request.sampling.logit_bias]
        for param, ids in (("prompt", request.prompt_tokens), ("logit_bias", biased)):
            array = np.asarray(ids)
            wrong = array[(array < 0) | (array >= self.vocab_size)]
            if len(wrong):
                raise InvalidRequest(
                    f"token {wrong[0]} is outside the vocabulary of {self.vocab_size}", param=param
                )
        logprobs = request.sampling.logprobs
        if logprobs is not None and logprobs < 0:
            raise InvalidRequest(f"logprobs is {logprobs}, not positive", param="logprobs")

    def _retry_after_s(self) -> float:
        stats = self._stats
        return min(60.0, max(1.0, stats.queue_tokens * stats.prefill_token_s))

    def _post(self, command: Callable[[], None], tokens: int = 0) -> bool:
        """Have the engine thread run `command`, which brings so many tokens to prefill. False: it
        has ended.
        """
        with self._commands_lock:
            if self._ended:
                return False
            if tokens and self._feed is not None:
                self._feed.came(tokens)
            self._commands.append((command, tokens))
        self._wake.set()
        return True

    async def _call(self, action: Callable[[], _T]) -> _T:
        """Run `action` on the engine thread, between two steps."""
        future: Future[_T] = Future()

        def run() -> None:
            try:
                future.set_result(action())
            except Exception as exc:
                future.set_exception(exc)

        if not self._post(run):
            raise EngineUnavailable("the engine has ended")
        return await asyncio.wrap_future(future)

    # --- engine thread --------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._wake.clear()
                if self._run_commands():
                    self._publish()  # A long step must not hide what came before it.
                worked = self._core.step()
                # What came during the step waits now: an engine that says between two steps that
                # nothing does would get everybody's next request.
                self._run_commands()
                self._publish()
                if not worked and not self._commands:
                    self._rest()
        except BaseException:
            _LOG.exception("the engine thread failed")
            self._failure = "the engine failed; see its log"
        reason = self._failure or "the engine has closed"
        self._admission.refuse(reason)
        self._end(EngineUnavailable(reason))

    def _connected(self) -> None:
        assert self._feed is not None
        self._feed.synchronise(self._core.cached_names())

    def _run_commands(self) -> bool:
        """Whether there were any."""
        any_ran = bool(self._commands)
        while self._commands:
            command, tokens = self._commands.popleft()
            if tokens:
                self._taken = self._taken[0] + 1, self._taken[1] + tokens
            command()
        return any_ran

    def _publish(self) -> None:
        stats = self._core.stats()
        if self._integrity_failures:
            stats = replace(stats, integrity_failures=self._integrity_failures)
        self._stats = stats
        if self._feed is not None:
            taken, self._taken = self._taken, (0, 0)
            self._feed.publish(stats, *taken)
        # Last, so that whoever is woken finds the stats up to date.
        streams, self._core.touched = self._core.touched, []
        wake_all(streams)

    def _rest(self) -> None:
        """Nothing to do until something comes."""
        if self._core.idle:
            self._tell_idle()
            if self._core.measure_if_due():
                self._publish()
            now = self._clock.now()
            if now - self._checked_at >= _CHECK_INTERVAL_S:
                self._checked_at = now
                self._check_quietly()
        wait_s = MIN_INTERVAL_S if self._feed and self._feed.pending else _IDLE_WAIT_S
        self._wake.wait(_COPY_POLL_S if self._core.copying else wait_s)

    def _tell_idle(self) -> None:
        for future in self._when_idle:
            if not future.done():
                future.set_result(None)
        self._when_idle.clear()

    def _check_quietly(self) -> None:
        try:
            self._core.check()
        except AssertionError as exc:
            self._integrity_failures += 1
            _LOG.error("integrity check: %s", exc)

    def _end(self, error: EngineUnavailable) -> None:
        """Take no more commands, and end what is left."""
        with self._commands_lock:
            self._ended = True
        try:
            self._run_commands()
            self._core.fail_all(error)
        except Exception:
            _LOG.exception("cannot end requests in order")
        self._tell_idle()
        self._publish()
