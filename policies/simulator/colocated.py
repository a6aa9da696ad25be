"""Nodes of D that both prefill and decode, turn by turn as our engine does."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable

from policies.simulator.decode import Batch
from policies.simulator.events import EventLoop
from policies.simulator.job import Job
from policies.simulator.order import Key
from policies.simulator.pool import Load
from prfaas.profile import Profile


class ColocatedNode:
    """One engine: queue, batch and steps; nothing to close.

    Its turns are those of `local_engine`: what has come is looked at when a turn begins, and then
    there is at most one chunk of a prompt, and a decode step of the batch. KV that has arrived is
    imported first of all, and the step that makes its first token does not wait for another's
    chunk, though never in two turns running. KV is asked for in the same way as it comes: between
    two turns.

    A prompt is begun when a place in the batch and KV room for it and its answer are free, and
    keeps them to its end. What arrives from elsewhere goes before prompts that have not begun.
    """

    def __init__(
        self,
        loop: EventLoop,
        profile: Profile,
        key: Key,
        kv_tokens: int | None,
        on_start: Callable[[Job], None],
        on_prefilled: Callable[[Job], None],
        on_imported: Callable[[Job], None],
        on_first_token: Callable[[Job, float], None],
        on_finished: Callable[[Job], None],
    ) -> None:
        self._loop = loop
        self._profile = profile
        self._chunk_tokens = profile.prefill.chunk_tokens
        self._slots = profile.decode.max_batch
        self._key = key
        self._kv_tokens = kv_tokens
        self._on_start, self._on_prefilled = on_start, on_prefilled
        self._on_imported = on_imported
        self._on_first_token, self._on_finished = on_first_token, on_finished
        self._batch = Batch(profile)
        self._queue: list[tuple[float, int, Job]] = []
        self._queued_tokens = 0
        self._begun = 0
        """Prompts that hold a place and are not in the batch yet."""
        self._arrived: deque[Job] = deque()
        self._asking: deque[tuple[Job, Callable[[Job], None]]] = deque()
        """Requests whose KV is to be asked for."""
        self._fresh: list[Job] = []
        """In the batch, without a first token."""
        self.coming = 0
        """Requests whose KV is on its way here."""
        self._chunk_gave_way = False
        self._kv_used = 0
        self._busy = False
        """A turn is under way, or a step that ends one; its end is an event."""
        self._version = 0
        self.prefill_busy_s = 0.0
        self.watcher: Callable[[], None] | None = None
        """Called when there is nothing to prefill, or a prompt has to wait."""

    def put(self, job: Job) -> None:
        """A prompt to prefill here: `uncached` and `cached` are set."""
        job.queued_at = self._loop.now
        job.key = self._key(job, self._profile.prefill_s(job.uncached, job.cached))
        heapq.heappush(self._queue, (job.key, job.order, job))
        self._queued_tokens += job.uncached
        self._wake()
        if self.watcher is not None and self._queue:
            self.watcher()

    def put_arrived(self, job: Job) -> None:
        """KV of a prompt came from elsewhere."""
        job.decode_at = self._loop.now
        self._arrived.append(job)
        self._wake()

    def ask(self, job: Job, asked: Callable[[Job], None]) -> None:
        """A prompt whose KV is elsewhere: `asked` when the node has come to it."""
        self._asking.append((job, asked))
        self._wake()

    def report(self) -> Load:
        """Queue and batch as the engine would report them."""
        waiting = len(self._queue)
        return (
            self._queued_tokens,
            waiting,
            len(self._batch),
            self._batch.context_tokens,
            self._batch.step_s,
            int(self.free),
        )

    @property
    def free(self) -> bool:
        """Nothing is being prefilled or waits to be, and a prompt could begin."""
        return not self._busy and not self._queue and len(self._batch) < self._slots

    def waiting(self) -> list[tuple[float, int, Job]]:
        """Those that have not begun, each with its key and its order of arrival."""
        return [entry for entry in self._queue if not entry[2].computed]

    def take(self, job: Job) -> None:
        """A prompt that has not begun leaves the queue, to wait no more here."""
        self._queue.remove((job.key, job.order, job))
        heapq.heapify(self._queue)
        self._queued_tokens -= job.uncached
        job.queue_s += self._loop.now - job.queued_at

    @property
    def queue_tokens(self) -> int:
        return self._queued_tokens

    @property
    def decode_busy_s(self) -> float:
        return self._batch.busy_s

    def _wake(self) -> None:
        """Something is new: it is looked at when the step under way ends."""
        if self._busy:
            return
        now = self._loop.now
        self._batch.advance(now)
        left_s = self._batch.step_left_s() if len(self._batch) else 0.0
        if left_s > 0:
            self._busy = True
            self._loop.at(now + left_s, self._between_steps)
        else:
            self._turn()

    def _between_steps(self, _: None) -> None:
        self._batch.reach_step(self._loop.now)
        self._turn()

    def _turn(self) -> None:
        """A turn begins."""
        now = self._loop.now
        self._busy = False
        self._version += 1
        for ended in self._batch.pop_ended():
            self._release(ended)
            self._on_finished(ended)
        while self._asking:
            coming, asked = self._asking.popleft()
            asked(coming)
        self._join_arrived()
        self._chunk_gave_way = not self._chunk_gave_way and bool(self._fresh)
        job = None if self._chunk_gave_way else self._next_prompt(now)
        if job is not None:
            self._chunk(job)
        elif self._fresh:
            self._step()
        else:
            if len(self._batch):
                then = now + self._batch.next_end_s()
                self._loop.at(then, self._decoded, self._version)
            if self.watcher is not None and self.free:
                self.watcher()

    def _chunk(self, job: Job) -> None:
        done = job.cached + job.computed
        grid = (done // self._chunk_tokens + 1) * self._chunk_tokens
        tokens = min(grid - done, job.uncached - job.computed)
        seconds = self._profile.prefill_s(tokens, done)
        job.prefill_s += seconds
        self.prefill_busy_s += seconds
        self._busy = True
        self._loop.at(self._loop.now + seconds, self._chunk_done, (job, tokens))

    def _chunk_done(self, what: tuple[Job, int]) -> None:
        job, tokens = what
        now = self._loop.now
        self._batch.hold(now)
        job.computed += tokens
        self._queued_tokens -= tokens
        if job.computed >= job.uncached:
            job.done_at = job.decode_at = now
            self._begun -= 1
            self._on_prefilled(job)
            self._batch.add(job)
            self._fresh.append(job)
        else:
            left_s = self._profile.prefill_s(job.uncached - job.computed, job.cached + job.computed)
            job.key = self._key(job, left_s)
            heapq.heappush(self._queue, (job.key, job.order, job))
        if len(self._batch):
            self._step()
        else:
            self._turn()

    def _step(self) -> None:
        """One decode step of all that are in the batch."""
        now = self._loop.now
        self._batch.hold(now)
        self._busy = True
        then = now + self._batch.step_s
        for job in self._fresh:
            self._on_first_token(job, then)
        self._fresh.clear()
        self._loop.at(then, self._stepped)

    def _stepped(self, _: None) -> None:
        self._batch.one_step(self._loop.now)
        self._turn()

    def _decoded(self, version: int) -> None:
        if version != self._version or self._busy:
            return
        self._batch.reach_end(self._loop.now)
        self._turn()

    def _join_arrived(self) -> None:
        while self._arrived and self._has_room(self._arrived[0]):
            job = self._arrived.popleft()
            self._take(job)
            self._on_imported(job)
            self._batch.add(job)
            self._fresh.append(job)

    def _next_prompt(self, now: float) -> Job | None:
        if not self._queue:
            return None
        job = self._queue[0][2]
        if not job.computed:
            if not self._has_room(job):
                return self._begun_prompt()
            self._take(job)
            self._begun += 1
            job.queue_s += now - job.queued_at
            job.started_at = now
            before = job.uncached
            self._on_start(job)
            self._queued_tokens += job.uncached - before
        heapq.heappop(self._queue)
        return job

    def _begun_prompt(self) -> Job | None:
        """The first in order of those that hold their place already."""
        begun = [entry for entry in self._queue if entry[2].computed]
        if not begun:
            return None
        entry = min(begun)
        self._queue.remove(entry)
        heapq.heapify(self._queue)
        return entry[2]

    def _has_room(self, job: Job) -> bool:
        if len(self._batch) + self._begun >= self._slots:
            return False
        if self._kv_tokens is None or self._kv_used == 0:
            return True
        return self._kv_used + _kv(job) <= self._kv_tokens

    def _take(self, job: Job) -> None:
        self._kv_used += _kv(job)

    def _release(self, job: Job) -> None:
        self._kv_used -= _kv(job)


def _kv(job: Job) -> int:
    return job.request.prompt_tokens + job.request.output_tokens
