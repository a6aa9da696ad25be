"""How one tensor gets from a paged cache into the ring without the model waiting for it."""

from __future__ import annotations

from typing import Protocol

import torch

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


class _DeviceCopy:
    def __init__(self, host: torch.Tensor, event: torch.Event, ring: Bytes) -> None:
        self._host = host
        self._event = event
        self._ring = ring

    def done(self) -> bool:
        if not self._event.query():
            return False
        self._ring[:] = self._host.view(torch.uint8).reshape(-1).numpy()
        return True

    def fence(self) -> None:
        self._event.wait()


class DeviceCopies:
    """For caches on an accelerator: gathered and brought to pinned memory on a stream of its own,
    which waits for what the model's stream has been given so far and not the reverse.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device)

    def start(self, kv: PagedKv, table: list[int], start: int, end: int, ring: Bytes) -> Copy:
        shape = (len(kv.parts), end - start, kv.heads.count, kv.dim)
        host = torch.empty(shape, dtype=kv.dtype, pin_memory=True)
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            gathered = torch.empty(shape, dtype=kv.dtype, device=self._device)
            kv.read(table, start, end, gathered)
            host.copy_(gathered, non_blocking=True)
            event = torch.Event(self._device)
            event.record(self._stream)
        return _DeviceCopy(host, event, ring)


def copies_for(device: torch.device) -> Copies:
    """What copies from tensors on `device`."""
    return HostCopies() if device.type == "cpu" else DeviceCopies(device)
