"""Frames leave in order, early ones small, later ones together while the transport is busy."""

from __future__ import annotations

import asyncio

import pytest

from prfaas.errors import EngineUnavailable
from prfaas.frames import HEADER_BYTES
from prfaas.ledger import Piece
from remote_prefill.outbox import (
    FIRST_MESSAGE_BYTES,
    FIRST_MESSAGES,
    MESSAGE_BYTES,
    Encoded,
    Outbox,
)


def encoded(layer: int, nbytes: int = 100) -> Encoded:
    return Encoded(Piece(0, layer, 0, 0, 1, 0, 1), nbytes, b"", 0, bytes(nbytes))


def future(layer: int | None = None, nbytes: int = 100) -> asyncio.Future[Encoded]:
    made: asyncio.Future[Encoded] = asyncio.get_running_loop().create_future()
    if layer is not None:
        made.set_result(encoded(layer, nbytes))
    return made


async def layers(outbox: Outbox) -> list[int]:
    batch = await outbox.take()
    assert batch is not None
    return [e.piece.layer for e in batch.pieces]


async def test_order_is_kept_whatever_is_encoded_first() -> None:
    outbox = Outbox()
    first, second = future(), future()
    outbox.put(first)
    outbox.put(second)
    second.set_result(encoded(1))
    taking = asyncio.ensure_future(layers(outbox))
    await asyncio.sleep(0.01)
    assert not taking.done()
    first.set_result(encoded(0))
    assert await taking == [0, 1]
    outbox.end()
    assert await outbox.take() is None


async def test_a_message_that_was_waited_for_is_app_limited_and_one_that_waited_is_not() -> None:
    outbox = Outbox()
    outbox.put(future(0))
    ready = await outbox.take()
    assert ready is not None
    assert not ready.app_limited
    taking = asyncio.ensure_future(outbox.take())
    await asyncio.sleep(0)
    outbox.put(future(1))
    waited = await taking
    assert waited is not None
    assert waited.app_limited


async def test_messages_are_small_at_first_and_then_grow() -> None:
    outbox = Outbox()
    part = FIRST_MESSAGE_BYTES // 2 - HEADER_BYTES
    for layer in range(40):
        outbox.put(future(layer, part))
    sizes = []
    for _ in range(FIRST_MESSAGES + 2):
        batch = await outbox.take()
        assert batch is not None
        sizes.append(sum(HEADER_BYTES + len(e.payload) for e in batch.pieces))
    assert sizes == [FIRST_MESSAGE_BYTES] * FIRST_MESSAGES + [MESSAGE_BYTES] * 2


async def test_a_frame_larger_than_a_message_goes_alone() -> None:
    outbox = Outbox()
    outbox.put(future(0, FIRST_MESSAGE_BYTES))
    outbox.put(future(1, 10))
    assert await layers(outbox) == [0]
    assert await layers(outbox) == [1]


async def test_an_error_comes_after_one_last_message_of_what_is_encoded() -> None:
    outbox = Outbox()
    for layer in range(3):
        outbox.put(future(layer, FIRST_MESSAGE_BYTES // 2))
    outbox.put(future())
    outbox.fail(EngineUnavailable("gone"))
    assert await layers(outbox) == [0]
    with pytest.raises(EngineUnavailable, match="gone"):
        await outbox.take()


async def test_an_error_wakes_who_waits() -> None:
    outbox = Outbox()
    outbox.put(future())
    taking = asyncio.ensure_future(outbox.take())
    await asyncio.sleep(0)
    outbox.fail(EngineUnavailable("gone"))
    with pytest.raises(EngineUnavailable):
        await asyncio.wait_for(taking, 1)
