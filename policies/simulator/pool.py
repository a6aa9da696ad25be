"""Prefill instances behind one queue: whole prompts, or chunks where the order may interrupt."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from policies.simulator.events import EventLoop
from policies.simulator.job import Job
from policies.simulator.order import Key
from prfaas.errors import ConfigError
from prfaas.profile import Profile

Load = tuple[int, int, int, int, float, int]
"""Queue tokens, waiting prompts, running sequences, their context tokens, decode step seconds, and
how many instances are free."""


class PrefillPool:
    """Owns the queue and the instances of one pool; nothing to close.

    The owner is told when a prompt starts or goes on (to look at the cache again at first, and to
    open its transfer), when it is interrupted, and when it is done.
    """

    def __init__(
        self,
        loop: EventLoop,
        profile: Profile,
        instances: int,
        key: Key,
        preemptive: bool,
        on_start: Callable[[Job], None],
        on_done: Callable[[Job], None],
        on_pause: Callable[[Job], None] | None = None,
        may_start: Callable[[Job], bool] | None = None,
    ) -> None:
        """Raises ConfigError for a pool without instances: what waits there would for ever."""
        if instances < 1:
            raise ConfigError(
                "no node prefills at D, which prompts that stay or fall back wait for: at least "
                "one of local.instances must (prefill_instances), or all do both (colocated)"
            )
        self._loop = loop
        self._seconds = profile.prefill_s
        self._chunk_tokens = profile.prefill.chunk_tokens
        self._key = key
        self._preemptive = preemptive
        self._on_start, self._on_done, self._on_pause = on_start, on_done, on_pause
        self._may_start = may_start
        self.instances = instances
        self.factor = 1.0
        """Prefill takes so many times as long; what has begun is not changed."""
        self.busy_s = 0.0
        """Instance seconds spent computing."""
        self._queue: list[tuple[float, int, Job]] = []
        self._queued_tokens = 0
        self._running: dict[Job, tuple[float, float, int]] = {}
        """Start, end and tokens of what each busy instance computes now."""
        self._epoch = 0
        self.watcher: Callable[[], None] | None = None
        """Called when an instance has nothing to do, or a prompt has to wait."""

    def put(self, job: Job) -> None:
        """A prompt comes: `job.uncached` and `job.cached` are set."""
        job.queued_at = self._loop.now
        job.key = self._key(job, self._seconds(job.uncached, job.cached))
        self._push(job)
        self._start()
        if self.watcher is not None and self._queue:
            self.watcher()

    def kick(self) -> None:
        """Room that a prompt waited for may be there now."""
        self._start()

    def report(self) -> Load:
        """What the pool says of itself, as one instance: its share of what waits, or nothing while
        an instance is free."""
        running = self._running
        if len(running) < self.instances and not self._queue:
            return 0, 0, 0, 0, 0.0, self.instances - len(running)
        now = self._loop.now
        left = 0.0
        for start, end, tokens in running.values():
            if end > start:
                left += tokens * (end - now) / (end - start)
        prompts = len(self._queue) + len(running)
        tokens = int(self._queued_tokens + left) // self.instances
        return tokens, max(1, round(prompts / self.instances)), 0, 0, 0.0, 0

    def fail(self) -> list[Job]:
        """All instances stop: what ran and what waited, in order of arrival."""
        lost = sorted([*self._running, *(job for _, _, job in self._queue)], key=_arrival)
        for start, end, _ in self._running.values():
            self.busy_s -= max(0.0, end - max(self._loop.now, start))
        self._running.clear()
        self._queue.clear()
        self._queued_tokens = 0
        self._epoch += 1
        return lost

    @property
    def idle(self) -> bool:
        return not self._running and not self._queue

    @property
    def free(self) -> int:
        """Instances that have nothing to do."""
        return 0 if self._queue else self.instances - len(self._running)

    @property
    def queued(self) -> int:
        return len(self._queue)

    def waiting(self, most: int) -> list[Job]:
        """The first of those that have not begun, in their order."""
        first = heapq.nsmallest(most, self._queue)
        return [job for _, _, job in first if not job.computed]

    def take(self, job: Job) -> None:
        """A prompt that has not begun leaves the queue, to wait no more here."""
        self._queue.remove((job.key, job.order, job))
        heapq.heapify(self._queue)
        self._queued_tokens -= job.uncached
        job.queue_s += self._loop.now - job.queued_at

    def ahead_s(self) -> float:
        """Instance seconds that what runs now will still take, each to the end of its step."""
        now = self._loop.now
        return sum(end - now for _, end, _ in self._running.values())

    def seconds_of(self, job: Job) -> float:
        """What a waiting prompt will take."""
        return self._seconds(job.uncached, job.cached) * self.factor

    def _push(self, job: Job) -> None:
        heapq.heappush(self._queue, (job.key, job.order, job))
        self._queued_tokens += job.uncached - job.computed

    def _start(self) -> None:
        queue, running = self._queue, self._running
        while queue and len(running) < self.instances:
            job = queue[0][2]
            if self._may_start is not None and not job.computed and not self._may_start(job):
                return
            heapq.heappop(queue)
            self._queued_tokens -= job.uncached - job.computed
            now = self._loop.now
            if not job.computed:
                job.queue_s += now - job.queued_at
                job.started_at = now
            self._on_start(job)
            self._run(job)

    def _run(self, job: Job) -> None:
        left = job.uncached - job.computed
        tokens = min(left, self._chunk_tokens) if self._preemptive else left
        seconds = self._seconds(tokens, job.cached + job.computed) * self.factor
        now = self._loop.now
        self.busy_s += seconds
        job.prefill_s += seconds
        self._running[job] = (now, now + seconds, tokens)
        self._loop.at(now + seconds, self._computed, (self._epoch, job, tokens))

    def _computed(self, what: tuple[int, Job, int]) -> None:
        epoch, job, tokens = what
        if epoch != self._epoch:
            return
        job.computed += tokens
        if job.computed < job.uncached:
            left_s = self._seconds(job.uncached - job.computed, job.cached + job.computed)
            job.key = self._key(job, left_s)
            if not self._queue or self._queue[0][0] >= job.key:
                self._on_start(job)
                self._run(job)
                return
            del self._running[job]
            self._push(job)
            if self._on_pause is not None:
                self._on_pause(job)
        else:
            del self._running[job]
            job.done_at = self._loop.now
            self._on_done(job)
        self._start()
        if self.watcher is not None and self.free:
            self.watcher()


def _arrival(job: Job) -> int:
    return job.order
