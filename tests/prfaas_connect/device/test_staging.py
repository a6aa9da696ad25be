"""Nothing reads a buffer before its bytes are there, and none is used twice at once."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import pytest
import torch

from prfaas.testing.fake_device import POISON, FakeDevice
from prfaas_connect.device import staging
from prfaas_connect.device.staging import Staging, TorchDevice


def bytes_of(value: int, nbytes: int) -> torch.Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8)


def test_bytes_reach_the_ring_only_when_the_device_has_brought_them() -> None:
    device = FakeDevice()
    lanes, ring = Staging(device), np.zeros(96, dtype=np.uint8)
    copies = [
        lanes.start(lambda n=n: bytes_of(n, 32), 32, ring[32 * (n - 1) : 32 * n])  # type: ignore[misc]
        for n in (1, 2, 3)
    ]
    assert not any(copy.done() for copy in copies)
    assert not ring.any()
    device.advance(1)
    assert [copy.done() for copy in copies] == [True, False, False]
    assert ring.tolist() == [1] * 32 + [0] * 64
    copies[2].wait()
    assert [copy.done() for copy in copies] == [True, True, True]
    assert ring.tolist() == [1] * 32 + [2] * 32 + [3] * 32
    assert POISON not in ring


def test_a_buffer_serves_again_once_its_bytes_are_taken_and_not_before() -> None:
    device = FakeDevice()
    lanes, ring = Staging(device), np.zeros(64, dtype=np.uint8)
    first = lanes.start(lambda: bytes_of(1, 64), 64, ring)
    device.advance()
    second = lanes.start(lambda: bytes_of(2, 64), 64, ring)  # the first was not taken out yet
    assert len(device.buffers) == 2
    assert first.done()
    assert ring[0] == 1
    device.advance()
    assert second.done()
    for n in range(3, 9):
        copy = lanes.start(lambda n=n: bytes_of(n, 64), 64, ring)  # type: ignore[misc]
        device.advance()
        assert copy.done()
        assert copy.done(), "asked twice it is still done"
        assert (ring == n).all()
    assert len(device.buffers) == 2
    big = lanes.start(lambda: bytes_of(9, 1 << 20), 1 << 20, np.zeros(1 << 20, np.uint8))
    assert len(device.buffers) == 3
    big.fence()
    assert big.done()


def test_one_that_nobody_wants_takes_its_buffer_with_it() -> None:
    device = FakeDevice()
    lanes, ring = Staging(device), np.zeros(8, dtype=np.uint8)
    lanes.start(lambda: bytes_of(1, 8), 8, ring).fence()
    other = lanes.start(lambda: bytes_of(2, 8), 8, ring)
    assert len(device.buffers) == 2
    other.wait()
    assert (ring == 2).all()


class Recorder:
    """torch's streams and events, which note what is done with them."""

    def __init__(self, said: list[str]) -> None:
        self.said = said
        self.accelerator = self

    uint8 = torch.uint8

    def empty(self, *args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        self.said.append(f"pinned {pin_memory}")
        return torch.empty(*args, **kwargs)

    def current_stream(self, device: torch.device) -> str:
        return f"model's stream of {device}"

    def Stream(self, device: torch.device) -> RecordedStream:
        return RecordedStream(self.said)

    def Event(self, device: torch.device) -> RecordedEvent:
        return RecordedEvent(self.said)


class RecordedStream:
    def __init__(self, said: list[str]) -> None:
        self.said = said

    def wait_stream(self, other: str) -> None:
        self.said.append(f"wait for {other}")

    def __enter__(self) -> Self:
        self.said.append("enter")
        return self

    def __exit__(self, *_: object) -> None:
        self.said.append("leave")


class RecordedEvent:
    def __init__(self, said: list[str]) -> None:
        self.said = said
        self.happened = False

    def record(self, stream: RecordedStream) -> None:
        self.said.append("record")

    def query(self) -> bool:
        self.said.append("query")
        return self.happened

    def synchronize(self) -> None:
        self.said.append("synchronise")
        self.happened = True

    def wait(self) -> None:
        self.said.append("model waits")


class Host:
    """Memory that notes how it is filled."""

    def __init__(self, said: list[str]) -> None:
        self.said = said

    def copy_(self, made: torch.Tensor, *, non_blocking: bool) -> None:
        self.said.append(f"copy {'on' if non_blocking else 'and wait'}")


def test_work_on_an_accelerator_is_in_order_and_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.setattr(staging, "torch", Recorder(said))
    device = TorchDevice(torch.device("cuda:0"))
    device.pinned(8)

    def make() -> torch.Tensor:
        said.append("make")
        return torch.zeros(8, dtype=torch.uint8)

    mark = device.run(make, Host(said))  # type: ignore[arg-type]
    assert said == [
        "pinned True", "wait for model's stream of cuda:0", "enter", "make", "copy on", "record",
        "leave",
    ]  # fmt: skip
    said.clear()
    assert not mark.passed()
    mark.fence()
    mark.wait()
    assert mark.passed()
    assert said == ["query", "model waits", "synchronise", "query"]
