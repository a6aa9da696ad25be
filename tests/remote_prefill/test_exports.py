"""The ring is freed in order whatever is copied out first; nothing is kept of what is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from prfaas.errors import EngineUnavailable, Overloaded
from prfaas.kvport import PortClosed
from prfaas_connect.port.messages import (
    PortError,
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


class Rank(Conn):
    """What a hub needs of a RankConn: what it sends is put into `says`."""

    def __init__(self) -> None:
        super().__init__()
        self.says: asyncio.Queue[PortMessage | None] = asyncio.Queue()

    async def __aiter__(self) -> AsyncIterator[tuple[PortMessage, bytes]]:
        while (message := await self.says.get()) is not None:
            yield message, b""


class Scripted:
    """A submitter that does as it is told."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int, str, bool]] = []
        self.result: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def submit(
        self, tokens: bytes, *, session: str, epoch: int, salt: str, use_cache: bool
    ) -> None:
        self.asked.append((session, epoch, salt, use_cache))
        await self.result


def joined(hub: ExportHub, rank: Rank) -> asyncio.Task[None]:
    made: Any = rank
    return asyncio.create_task(hub.serve_rank(made))


async def test_each_rank_s_ring_is_freed_in_its_own_order(hub: ExportHub, conn: Conn) -> None:
    one, two = Rank(), Rank()
    tasks = [joined(hub, one), joined(hub, two)]
    export = start(hub)
    one.says.put_nowait(record(export, 0))
    first = await view(export)
    two.says.put_nowait(record(export, 0))
    second = await view(export)
    assert hub.unfreed_records == 2
    second.done()
    assert (one.take(), two.take()) == ([], [RingFree(1)])
    first.done()
    assert (one.take(), two.take()) == ([RingFree(1)], [])
    assert conn.take() == [PrefillStart(export.key, 3, 0)]
    for rank in (one, two):
        rank.says.put_nowait(None)
    await asyncio.gather(*tasks)


async def test_the_end_waits_for_what_ranks_have_sent(hub: ExportHub) -> None:
    rank = Rank()
    task = joined(hub, rank)
    export = start(hub)
    await asyncio.sleep(0)
    hub.on_end(PrefillEnd(export.key, 3, "done", records=2))
    rank.says.put_nowait(record(export, 0))
    rank.says.put_nowait(record(export, 10))
    for _ in range(2):
        (await view(export)).done()
    assert isinstance(await export.next(), PrefillEnd)
    assert len(hub) == 0
    # A failure does not wait for anything.
    other = start(hub)
    hub.on_end(PrefillEnd(other.key, 3, "failed", records=2))
    assert isinstance(await other.next(), PrefillEnd)
    rank.says.put_nowait(None)
    await task


async def test_a_cancelled_export_that_waits_for_records_is_forgotten(hub: ExportHub) -> None:
    rank = Rank()
    task = joined(hub, rank)
    await asyncio.sleep(0)
    before, after = start(hub), start(hub)
    hub.on_end(PrefillEnd(before.key, 3, "done", records=2))
    before.cancel()
    after.cancel()
    hub.on_end(PrefillEnd(after.key, 3, "done", records=2))
    assert len(hub) == 0
    rank.says.put_nowait(None)
    await task


async def test_a_rank_that_leaves_or_says_something_else_ends_the_engine_s_connection(
    conn: Conn, hub: ExportHub
) -> None:
    rank = Rank()
    task = joined(hub, rank)
    rank.says.put_nowait(PrefillEnd("x", 1, "done"))
    with pytest.raises(PortError, match="not for a rank"):
        await task
    assert conn.closed


async def test_an_engine_with_an_api_is_announced_a_secret_name_and_gets_the_tokens(
    conn: Conn,
) -> None:
    made: Any = conn
    submitter = Scripted()
    hub = ExportHub(made, submitter)
    assert hub.submits
    export = hub.start(b"\0\0\0\0", epoch=3, send_from=0, salt="s", use_cache=True)
    await asyncio.sleep(0)
    assert submitter.asked == [(export.key, 3, "s", True)]
    assert conn.take() == [PrefillStart(export.key, 3, 0, "s")]
    assert len(export.key) > 16
    submitter.result.set_result(None)
    hub.on_end(PrefillEnd(export.key, 3, "done"))
    assert isinstance(await export.next(), PrefillEnd)
    assert export.task is not None
    await asyncio.wait([export.task])
    hub.close()


async def test_what_the_api_refuses_ends_the_export_with_that_error(conn: Conn) -> None:
    made: Any = conn
    submitter = Scripted()
    hub = ExportHub(made, submitter)
    export = hub.start(b"\0\0\0\0", epoch=3, send_from=0, salt="", use_cache=True)
    submitter.result.set_exception(Overloaded("too many", retry_after_s=1.0))
    end = await export.next()
    assert isinstance(end, PrefillEnd)
    assert (end.status, end.reason) == ("failed", "overloaded: too many")
    assert conn.take()[-1] == PrefillCancel(export.key, 3)
    hub.on_end(PrefillEnd(export.key, 3, "cancelled"))
    assert len(hub) == 0


async def test_cancelling_and_closing_end_the_request_at_the_api(conn: Conn) -> None:
    made: Any = conn
    submitter = Scripted()
    hub = ExportHub(made, submitter)
    exports = [
        hub.start(b"\0\0\0\0", epoch=3, send_from=0, salt="", use_cache=True) for _ in range(2)
    ]
    await asyncio.sleep(0)
    exports[0].cancel()
    hub.close()
    tasks = [export.task for export in exports if export.task is not None]
    await asyncio.wait(tasks)
    assert all(task.cancelled() for task in tasks)
    with pytest.raises(EngineUnavailable):
        await exports[1].next()
