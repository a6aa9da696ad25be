"""Bytes made on an accelerator, to the ring: beside the model, through pinned memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Bytes = npt.NDArray[np.uint8]
LEAST_BYTES = 1 << 16


class Mark(Protocol):
    """A place in what the side stream has been given."""

    def passed(self) -> bool:
        """Whether all before it is done; asked, not waited for."""
        ...

    def wait(self) -> None:
        """Until it is passed: for those few who cannot come back later."""
        ...

    def fence(self) -> None:
        """Let nothing that the model's stream is given from now on begin before it is passed."""
        ...


class Device(Protocol):
    """What is needed of an accelerator."""

    def pinned(self, nbytes: int) -> Tensor:
        """Host memory, uint8, that copies reach while the CPU goes on."""
        ...

    def run(self, make: Callable[[], Tensor], host: Tensor) -> Mark:
        """On the side stream, after all that the model's stream has been given so far: `make`, and
        the bytes it gives to `host`, which is as long. Returns before any of it is done.
        """
        ...


class TorchDevice:
    """An accelerator of torch, with a side stream that the model's stream never waits for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device)

    def pinned(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def run(self, make: Callable[[], Tensor], host: Tensor) -> Mark:
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            # What is made is freed to the side stream's own memory: only it can get it next.
            host.copy_(make(), non_blocking=True)
            event = torch.Event(self._device)
            event.record(self._stream)
        return _EventMark(event)


class _EventMark:
    def __init__(self, event: torch.Event) -> None:
        self._event = event

    def passed(self) -> bool:
        return self._event.query()

    def wait(self) -> None:
        self._event.synchronize()

    def fence(self) -> None:
        self._event.wait()


class Staging:
    """Pinned buffers of one device, each with one copy at a time; as many as copies were on their
    way at once, which a ring bounds. Used by one thread, nothing to close.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._free: list[Tensor] = []

    def start(self, make: Callable[[], Tensor], nbytes: int, ring: Bytes) -> StagedCopy:
        """Have `make` give `nbytes` (uint8) on the side stream, which end up in `ring`."""
        host = self._take(nbytes)
        return StagedCopy(self, host, self._device.run(make, host[:nbytes]), nbytes, ring)

    def give_back(self, host: Tensor) -> None:
        """A buffer whose bytes have been taken out."""
        self._free.append(host)

    def _take(self, nbytes: int) -> Tensor:
        fits = [i for i, host in enumerate(self._free) if host.numel() >= nbytes]
        if fits:
            return self._free.pop(min(fits, key=lambda i: self._free[i].numel()))
        return self._device.pinned(max(LEAST_BYTES, 1 << (nbytes - 1).bit_length()))


class StagedCopy:
    """One copy on its way. Who wants it no more fences it and lets go: its buffer goes with it, and
    not to another copy.
    """

    def __init__(
        self, staging: Staging, host: Tensor, mark: Mark, nbytes: int, ring: Bytes
    ) -> None:
        self._staging = staging
        self._host: Tensor | None = host
        self._mark = mark
        self._nbytes = nbytes
        self._ring = ring

    def done(self) -> bool:
        """Whether its bytes lie in the ring; asked until they do."""
        if self._host is None:
            return True
        if not self._mark.passed():
            return False
        self._ring[: self._nbytes] = self._host[: self._nbytes].numpy()
        self._staging.give_back(self._host)
        self._host = None
        return True

    def wait(self) -> None:
        """Until its bytes lie in the ring."""
        if self._host is not None:
            self._mark.wait()
            self.done()

    def fence(self) -> None:
        """Let nothing that the model does from now on reach what it reads before it is read."""
        self._mark.fence()
