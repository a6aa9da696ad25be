"""An accelerator that does nothing before it is told to, and finds out who does not wait for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

POISON = 0xEE


@dataclass(slots=True, eq=False)
class FakeMark:
    """What one `run` has been asked for."""

    device: FakeDevice
    make: Callable[[], Tensor]
    host: Tensor
    over: bool = False

    def passed(self) -> bool:
        return self.over

    def wait(self) -> None:
        self.device.run_to(self)

    def fence(self) -> None:
        # What the model does after this comes after the job: it may as well be done now.
        self.device.run_to(self)


class FakeDevice:
    """A `Device` in host memory: jobs wait in order until `advance`, or until one is waited for.

    So what overwrites KV that is still to be read, or reads a buffer too early, gets wrong bytes;
    a buffer that is given a second job before its first is over is an AssertionError.
    """

    def __init__(self) -> None:
        self.jobs: deque[FakeMark] = deque()
        self.buffers: list[Tensor] = []
        self.ran = 0

    def pinned(self, nbytes: int) -> Tensor:
        self.buffers.append(torch.full((nbytes,), POISON, dtype=torch.uint8))
        return self.buffers[-1]

    def run(self, make: Callable[[], Tensor], host: Tensor) -> FakeMark:
        storage = host.untyped_storage().data_ptr()
        assert storage in {each.data_ptr() for each in self.buffers}, "not of pinned memory"
        busy = {job.host.untyped_storage().data_ptr() for job in self.jobs}
        assert storage not in busy, "a buffer has two jobs"
        host.fill_(POISON)
        mark = FakeMark(self, make, host)
        self.jobs.append(mark)
        return mark

    def advance(self, count: int = 1 << 30) -> None:
        """Do the oldest `count` jobs."""
        while self.jobs and count > 0:
            job = self.jobs.popleft()
            job.host.copy_(job.make())
            job.over = True
            self.ran += 1
            count -= 1

    def run_to(self, mark: FakeMark) -> None:
        """Do all jobs up to this one: a stream keeps their order."""
        while not mark.over:
            self.advance(1)
