"""How one tensor gets from a paged cache into the ring without the model waiting for it."""

from __future__ import annotations

from typing import Protocol

import torch

from prfaas_connect.device.staging import Staging, TorchDevice
from prfaas_connect.vllm.layouts import Bytes, PagedKv


class Copy(Protocol):
    """One tensor on its way."""

    def done(self) -> bool:
        """Whether its bytes lie in the ring; asked until they do."""
        ...

    def fence(self) -> None:
        """Let nothing that the model does from now on reach the blocks before they are read."""
        ...


class Copies(Protocol):
    """What starts copies; in the order of the calls, after all that the model has done so far."""

    def start(self, kv: PagedKv, table: list[int], start: int, end: int, ring: Bytes) -> Copy: ...


class _Done:
    def done(self) -> bool:
        return True

    def fence(self) -> None:
        """It has been read."""


class HostCopies:
    """For caches in host memory: the copy is over when `start` returns."""

    def start(self, kv: PagedKv, table: list[int], start: int, end: int, ring: Bytes) -> Copy:
        kv.export(table, start, end, ring)
        return _Done()


class DeviceCopies:
    """For caches on an accelerator: gathered on its side stream, through pinned memory."""

    def __init__(self, device: torch.device, staging: Staging) -> None:
        self._device = device
        self._staging = staging

    def start(self, kv: PagedKv, table: list[int], start: int, end: int, ring: Bytes) -> Copy:
        shape = (len(kv.parts), end - start, kv.heads.count, kv.dim)

        def gather() -> torch.Tensor:
            gathered = torch.empty(shape, dtype=kv.dtype, device=self._device)
            kv.read(table, start, end, gathered)
            return gathered.view(torch.uint8).reshape(-1)

        return self._staging.start(gather, ring.nbytes, ring)


def copies_for(device: torch.device) -> Copies:
    """What copies from tensors on `device`."""
    if device.type == "cpu":
        return HostCopies()
    return DeviceCopies(device, Staging(TorchDevice(device)))
