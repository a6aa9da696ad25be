"""The ring is freed in order whatever is copied out first; nothing is kept of what is cancelled."""

from __future__ import annotations

from typing import Any

import pytest

from prfaas.errors import EngineUnavailable
from prfaas.kvport import PortClosed
from prfaas_connect.port.messages import (
    PortMessage,
    PrefillCancel,
    PrefillEnd,
    PrefillStart,
    Record,
    RingFree,
)
from remote_prefill.exports import Export, ExportHub, RecordView


class Conn:
    """What a hub needs of an EngineConn."""

    def __init__(self) -> None:
        self.ring = memoryview(bytearray(100))
        self.sent: list[PortMessage] = []
        self.closed = False

    def send(self, message: PortMessage, blob: bytes = b"") -> None:
        if self.closed:
            raise PortClosed("gone")
        self.sent.append(message)

    def close(self) -> None:
        self.closed = True

    def take(self) -> list[PortMessage]:
        sent, self.sent = self.sent, []
        return sent


@pytest.fixture
def conn() -> Conn:
    return Conn()


@pytest.fixture
def hub(conn: Conn) -> ExportHub:
    made: Any = conn
    return ExportHub(made)


def start(hub: ExportHub) -> Export:
    return hub.start(b"\0\0\0\0", epoch=3, send_from=0, salt="", use_cache=True)


def record(export: Export, offset: int = 0, nbytes: int = 10, epoch: int = 3) -> Record:
    return Record(export.key, epoch, 0, 0, 0, 0, 1, 0, 1, offset, nbytes)


async def view(export: Export) -> RecordView:
    event = await export.next()
    assert isinstance(event, RecordView)
    return event


async def test_records_are_freed_in_the_order_they_came(hub: ExportHub, conn: Conn) -> None:
    one, two = start(hub), start(hub)
    assert one.key != two.key
    assert [type(m) for m in conn.take()] == [PrefillStart, PrefillStart]
    hub.on_record(record(one, 0))
    hub.on_record(record(two, 10))
    hub.on_record(record(one, 20))
    first, third = await view(one), await view(one)
    second = await view(two)
    third.done()
    second.done()
    assert conn.take() == []
    first.done()
    first.done()
    assert conn.take() == [RingFree(3)]
    assert hub.unfreed_records == 0


async def test_a_record_shows_its_part_of_the_ring(hub: ExportHub, conn: Conn) -> None:
    export = start(hub)
    conn.ring[20:30] = b"0123456789"
    hub.on_record(record(export, 20))
    assert bytes((await view(export)).raw) == b"0123456789"


async def test_a_cancelled_export_keeps_nothing_of_the_ring(hub: ExportHub, conn: Conn) -> None:
    export = start(hub)
    hub.on_record(record(export))
    conn.take()
    export.cancel()
    export.cancel()
    assert conn.take() == [RingFree(1), PrefillCancel(export.key, 3)]
    hub.on_record(record(export, 10))
    assert conn.take() == [RingFree(1)]
    assert len(hub) == 1  # until the engine has ended it
    hub.on_end(PrefillEnd(export.key, 3, "cancelled"))
    assert len(hub) == 0
    hub.on_record(record(export, 20))
    assert hub.stray_records == 1
    assert hub.unfreed_records == 0


async def test_an_export_that_has_ended_is_not_cancelled_at_the_engine(
    hub: ExportHub, conn: Conn
) -> None:
    export = start(hub)
    hub.on_end(PrefillEnd(export.key, 3, "done"))
    assert isinstance(await export.next(), PrefillEnd)
    conn.take()
    export.cancel()
    assert conn.take() == []


async def test_records_of_another_epoch_are_strays(hub: ExportHub, conn: Conn) -> None:
    export = start(hub)
    conn.take()
    hub.on_record(record(export, epoch=2))
    assert conn.take() == [RingFree(1)]
    assert hub.stray_records == 1


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 10), (95, 10), (0, 0), (0, -5), (1 << 60, 1)])
async def test_bytes_outside_the_ring_cut_the_engine(
    hub: ExportHub, conn: Conn, offset: int, nbytes: int
) -> None:
    hub.on_record(record(start(hub), offset, nbytes))
    assert conn.closed


async def test_when_the_engine_leaves_every_export_fails(hub: ExportHub, conn: Conn) -> None:
    export = start(hub)
    hub.on_record(record(export))
    first = await view(export)
    conn.close()
    hub.close()
    assert hub.closed.is_set()
    with pytest.raises(EngineUnavailable, match="disconnected"):
        await export.next()
    first.done()
    export.cancel()
    with pytest.raises(EngineUnavailable):
        start(hub)
