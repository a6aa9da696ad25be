"""Events reach their consumer in order, bounded, and stop when either side stops."""

from __future__ import annotations

import asyncio
import threading

import pytest

from local_engine.requests import FinishReason, TokenEvent
from local_engine.stream import TokenStream, wake_all
from prfaas.testing.clock import ManualClock

LAST = TokenEvent((9,), FinishReason.STOP)


def make(limit: int = 4) -> tuple[TokenStream, list[str], ManualClock]:
    told: list[str] = []
    clock = ManualClock()
    stream = TokenStream(
        limit,
        clock,
        on_close=lambda: told.append("closed"),
        on_room=lambda: told.append("room"),
    )
    return stream, told, clock


def event(token: int) -> TokenEvent:
    return TokenEvent((token,))


async def test_events_come_in_order_and_the_last_ends_the_iteration() -> None:
    stream, told, _ = make(10)
    for e in (event(1), event(2), LAST):
        stream.push(e)
    assert [e.token_ids[0] async for e in stream] == [1, 2, 9]
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    await stream.aclose()
    assert told == [], "an ended request needs no cancelling"


async def test_a_waiting_consumer_is_woken_from_another_thread() -> None:
    stream, _, _ = make()
    waiting = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)

    def produce() -> None:
        stream.push(event(7))
        wake_all([stream])

    thread = threading.Thread(target=produce)
    thread.start()
    got = await asyncio.wait_for(waiting, 5)
    thread.join()
    assert got.token_ids == (7,)
    stream.push(LAST)
    assert (await anext(stream)).last


async def test_a_full_stream_has_room_again_once_half_is_read() -> None:
    stream, told, _ = make(4)
    for token in range(4):
        assert not stream.full
        stream.push(event(token))
    assert stream.full
    await anext(stream)
    assert stream.full
    assert told == []
    await anext(stream)
    assert not stream.full
    assert told == ["room"]


async def test_reading_is_noted_with_its_time() -> None:
    stream, _, clock = make()
    began = stream.read_at
    stream.push(event(1))
    clock.advance(5)
    assert stream.read_at == began
    await anext(stream)
    assert stream.read_at == began + 5


async def test_closing_early_cancels_once_and_drops_what_is_buffered() -> None:
    stream, told, _ = make()
    stream.push(event(1))
    await stream.aclose()
    await stream.aclose()
    stream.push(event(2))
    assert told == ["closed"]
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_closing_wakes_a_consumer_that_waits() -> None:
    stream, _, _ = make()

    async def consume() -> list[TokenEvent]:
        return [e async for e in stream]

    waiting = asyncio.create_task(consume())
    await asyncio.sleep(0)
    await stream.aclose()
    assert await asyncio.wait_for(waiting, 5) == []


def test_a_consumer_whose_loop_is_closed_counts_as_gone() -> None:
    told: list[str] = []

    async def start() -> TokenStream:
        return TokenStream(
            4, ManualClock(), on_close=lambda: told.append("closed"), on_room=lambda: None
        )

    stream = asyncio.run(start())
    stream.push(event(1))
    wake_all([stream])
    assert told == ["closed"]
