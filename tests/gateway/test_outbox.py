"""Writes that go out together, in the order in which they were put."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from gateway.outbox import CROWD, Outbox


class Socket:
    """Says in `log` what is done to it."""

    def __init__(self, name: str, log: list[str]) -> None:
        self._name = name
        self._log = log
        self.closed = False

    def write(self, data: bytes) -> None:
        self._log.append(f"{self._name} {data.decode()}")

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True
        self._log.append(f"{self._name} closed")


def two() -> tuple[list[str], Any, Any]:
    log: list[str] = []
    return log, cast(Any, Socket("a", log)), cast(Any, Socket("b", log))


async def test_a_crowds_writes_go_out_in_the_next_turn_and_in_order() -> None:
    log, a, b = two()
    outbox = Outbox()
    outbox.write(a, b"1", CROWD)
    outbox.write(b, b"2", CROWD)
    outbox.write(a, b"3", 0)  # not before what is held for the same socket
    assert log == []
    await asyncio.sleep(0)
    assert log == ["a 1", "b 2", "a 3"]
    outbox.write(b, b"4", CROWD)
    await asyncio.sleep(0)
    assert log[3:] == ["b 4"]


async def test_a_few_do_not_wait() -> None:
    log, a, _ = two()
    Outbox().write(a, b"1", CROWD - 1)
    assert log == ["a 1"]


async def test_a_socket_is_closed_after_what_was_put_for_it() -> None:
    log, a, b = two()
    outbox = Outbox()
    outbox.write(a, b"1", CROWD)
    outbox.write(b, b"2", CROWD)
    outbox.close(a)
    assert log == ["a 1", "b 2", "a closed"]
    await asyncio.sleep(0)
    assert len(log) == 3


async def test_nothing_is_written_to_a_socket_that_is_gone() -> None:
    log, a, b = two()
    outbox = Outbox()
    outbox.write(a, b"1", CROWD)
    outbox.write(b, b"2", CROWD)
    a.closed = True
    await asyncio.sleep(0)
    assert log == ["b 2"]
