"""Decode nodes: sequences share steps whose time depends on batch and context."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable

from policies.simulator.events import EventLoop
from policies.simulator.job import Job
from prfaas.profile import Profile

_SLIVER = 1e-6
"""Of a step, which only rounding leaves."""


class Batch:
    """The sequences one node decodes; nothing to close.

    All advance by one token a step. Between two changes of the batch steps are not simulated one by
    one: tokens are a continuous count at the rate of the step at the last change.
    """

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._tokens = 0.0
        """Tokens every sequence that was there from the start would have made."""
        self._context = 0.0
        self._since = 0.0
        self._ends: list[tuple[float, int, Job]] = []
        self.step_s = profile.step_s(1, 0.0)
        self.busy_s = 0.0
        """Seconds spent decoding, summed over sequences."""

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def context_tokens(self) -> int:
        return int(self._context)

    def advance(self, now: float) -> None:
        """Make tokens until now."""
        elapsed = now - self._since
        self._since = now
        size = len(self._ends)
        if elapsed > 0 and size:
            made = elapsed / self.step_s
            self._tokens += made
            self._context += made * size
            self.busy_s += elapsed * size

    def one_step(self, now: float) -> None:
        """Exactly one step, which ends now, for all in the batch."""
        self._since = now
        self._tokens += 1
        self._context += len(self._ends)
        self.busy_s += self.step_s * len(self._ends)

    def reach_end(self, now: float) -> None:
        """Make tokens until now, which is when the next sequence ends: rounding of the clock must
        not leave a sliver that no time is short enough for."""
        self.advance(now)
        if self._ends:
            self._tokens = max(self._tokens, self._ends[0][0])

    def step_left_s(self) -> float:
        """Seconds until the step under way ends. After `advance`, where steps begin and end with
        whole tokens."""
        made = self._tokens
        return max(0.0, math.ceil(made - _SLIVER) - made) * self.step_s

    def reach_step(self, now: float) -> None:
        """Make tokens until now, which is when a step ends."""
        self.advance(now)
        self._tokens = float(round(self._tokens))

    def hold(self, now: float) -> None:
        """No tokens until now: the node did something else."""
        self._since = now

    def add(self, job: Job) -> None:
        """A sequence joins; its first token comes a step from now. After `advance`."""
        self._context += job.request.prompt_tokens
        heapq.heappush(self._ends, (self._tokens + job.request.output_tokens, job.order, job))
        self._retime()

    def next_end_s(self) -> float:
        """Seconds until the next sequence ends, if nothing changes."""
        return max(0.0, (self._ends[0][0] - self._tokens) * self.step_s)

    def pop_ended(self) -> list[Job]:
        """Sequences that are complete; they leave the batch."""
        ended: list[Job] = []
        while self._ends and self._ends[0][0] <= self._tokens + 1e-9:
            _, _, job = heapq.heappop(self._ends)
            self._context -= job.request.prompt_tokens + job.request.output_tokens
            ended.append(job)
        if ended:
            self._retime()
        return ended

    def _retime(self) -> None:
        self._context = max(0.0, self._context)
        self.step_s = self._profile.step_s(max(1, len(self._ends)), self._context)


class DecodeNodes:
    """D's decoding nodes behind one first-come queue; nothing to close.

    A sequence takes a slot and KV room for its prompt and all of its answer, so that nothing is
    preempted. The emptiest node with room takes the next one.
    """

    def __init__(
        self,
        loop: EventLoop,
        profile: Profile,
        nodes: int,
        kv_tokens: int | None,
        on_first_token: Callable[[Job, float], None],
        on_finished: Callable[[Job], None],
    ) -> None:
        self._loop = loop
        self._slots = profile.decode.max_batch
        self._kv_tokens = kv_tokens
        self._on_first_token, self._on_finished = on_first_token, on_finished
        self._batches = [Batch(profile) for _ in range(nodes)]
        self._sizes = [0] * nodes
        self._kv_used = [0] * nodes
        self._version = [0] * nodes
        self._waiting: deque[Job] = deque()

    def put(self, job: Job) -> None:
        """KV of a prompt is complete: its answer is to be decoded."""
        job.decode_at = self._loop.now
        self._waiting.append(job)
        self._admit()

    @property
    def busy_s(self) -> float:
        return sum(batch.busy_s for batch in self._batches)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return sum(len(batch) for batch in self._batches)

    @property
    def step_s(self) -> float:
        """The step of the emptiest node, which the next sequence will join."""
        return min(batch.step_s for batch in self._batches)

    def _admit(self) -> None:
        batches, waiting, sizes = self._batches, self._waiting, self._sizes
        while waiting:
            job = waiting[0]
            need = job.request.prompt_tokens + job.request.output_tokens
            at = -1
            fewest = self._slots
            for index, size in enumerate(sizes):
                if size < fewest and self._fits(index, need):
                    at, fewest = index, size
            if at < 0:
                return
            waiting.popleft()
            now = self._loop.now
            batch = batches[at]
            batch.advance(now)
            batch.add(job)
            self._kv_used[at] += need
            sizes[at] += 1
            self._on_first_token(job, now + batch.step_s)
            self._schedule(at)

    def _fits(self, index: int, need: int) -> bool:
        if self._kv_tokens is None:
            return True
        used = self._kv_used[index]
        # One that no node could ever hold is decoded alone rather than never.
        return used + need <= self._kv_tokens or used == 0

    def _schedule(self, index: int) -> None:
        self._version[index] += 1
        batch = self._batches[index]
        if self._sizes[index]:
            then = self._loop.now + batch.next_end_s()
            self._loop.at(then, self._ended, (index, self._version[index]))

    def _ended(self, what: tuple[int, int]) -> None:
        index, version = what
        if version != self._version[index]:
            return
        batch = self._batches[index]
        batch.reach_end(self._loop.now)
        for job in batch.pop_ended():
            self._kv_used[index] -= job.request.prompt_tokens + job.request.output_tokens
            self._sizes[index] -= 1
            self._on_finished(job)
        self._schedule(index)
        self._admit()
