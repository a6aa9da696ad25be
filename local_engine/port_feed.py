"""What the agent is told of its own accord: load and prefix-cache changes."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import replace

from local_engine.kv.events import CacheEventLog
from local_engine.port import KvPort
from local_engine.requests import EngineStats
from prfaas.clock import Clock
from prfaas.hashing import BlockHash
from prfaas_connect.port.messages import KvEvents, Stats

# News wait so long for more, so that a step of a few milliseconds does not send a message each.
MIN_INTERVAL_S = 0.05


class PortFeed:
    """Owns a thread that repeats the load while the engine is deep in a long step; `close` ends it.

    `publish` and `synchronise` are the engine thread's. Deltas flow only between a full snapshot
    and the next disconnect.
    """

    def __init__(
        self, port: KvPort, events: CacheEventLog, interval_s: float, clock: Clock
    ) -> None:
        self._port = port
        self._events = events
        self._interval_s = interval_s
        self._clock = clock
        self._lock = threading.Lock()
        self._told: Stats | None = None
        """By the engine, as of its last step."""
        self._came_requests = 0
        self._came_tokens = 0
        """Since then, while it is deep in a step."""
        self._latest: Stats | None = None
        """Both together."""
        self._sent: Stats | None = None
        self._sent_at = float("-inf")
        self._events_at = float("-inf")
        self._synchronised = False
        self._stop = threading.Event()
        self._news = threading.Event()
        self._deferred = False
        """Something waits until the last message is no longer too young, and the thread knows."""
        self._thread = threading.Thread(target=self._repeat, name="port-feed", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._stop.set()
        self._news.set()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def pending(self) -> bool:
        """There is news that was too fresh to send."""
        return self._synchronised and (self._events.pending or self._latest != self._sent)

    def synchronise(self, names: Iterable[BlockHash]) -> None:
        """A new connection: send the whole cache index and the load."""
        sent = self._send_events(self._events.snapshot(names))
        with self._lock:
            self._synchronised = sent
            if sent and self._latest is not None:
                self._send_stats()

    def disconnected(self) -> None:
        """Nothing more until the next `synchronise`; called on any thread."""
        self._synchronised = False

    def came(self, tokens: int) -> None:
        """A prompt of so many tokens waits until the engine has ended its step; callable on any
        thread. `publish` says when the engine has taken it.
        """
        with self._lock:
            self._came_requests += 1
            self._came_tokens += tokens
            self._add_up()
            if self._synchronised and self._latest != self._sent:
                self._deferred = True
                self._news.set()

    def publish(self, stats: EngineStats, taken_requests: int = 0, taken_tokens: int = 0) -> None:
        """Send what has changed, unless the last message is too young. `taken_...`: of what came
        since the last time, in these stats.
        """
        now = self._clock.now()
        with self._lock:
            self._told = _message(stats)
            self._came_requests -= taken_requests
            self._came_tokens -= taken_tokens
            self._add_up()
            if not self._synchronised:
                self._events.discard()
                return
            if self._latest != self._sent:
                if now - self._sent_at >= MIN_INTERVAL_S:
                    self._send_stats()
                elif not self._deferred:
                    self._deferred = True
                    self._news.set()
        if self._events.pending and now - self._events_at >= MIN_INTERVAL_S:
            self._events_at = now
            if not self._send_events(self._events.take()):
                self._synchronised = False

    def _add_up(self) -> None:
        """Lock held."""
        told = self._told
        if told is not None:
            self._latest = replace(
                told,
                queue_tokens=told.queue_tokens + self._came_tokens,
                waiting=told.waiting + self._came_requests,
            )

    def _send_events(self, messages: Iterable[KvEvents]) -> bool:
        sent = True
        for message in messages:  # All of them: they are numbered as they are made.
            sent &= self._port.send(message)
        return sent

    def _send_stats(self) -> None:
        """Lock held."""
        assert self._latest is not None
        self._deferred = False
        self._port.send(self._latest)
        self._sent, self._sent_at = self._latest, self._clock.now()

    def _repeat(self) -> None:
        wait_s = self._interval_s
        while not self._stop.is_set():
            self._news.wait(wait_s)
            self._news.clear()
            if self._stop.is_set():
                return
            with self._lock:
                # A little early rather than late: the interval is a promise.
                pause_s = MIN_INTERVAL_S if self._deferred else 0.9 * self._interval_s
                due_s = self._sent_at + pause_s - self._clock.now()
                if due_s <= 0:
                    if self._synchronised and self._latest is not None:
                        self._send_stats()
                    due_s = 0.9 * self._interval_s
            wait_s = due_s


def _message(stats: EngineStats) -> Stats:
    return Stats(
        queue_tokens=stats.queue_tokens,
        waiting=stats.waiting,
        running=stats.running,
        context_tokens=stats.context_tokens,
        free_blocks=stats.free_blocks,
        total_blocks=stats.total_blocks,
        decode_step_s=stats.decode_step_s,
        prefill_base_s=stats.prefill_base_s,
        prefill_token_s=stats.prefill_token_s,
        prefill_token_context_s=stats.prefill_token_context_s,
        draining=stats.draining,
        waiting_kv=stats.waiting_kv,
    )
