"""Who waits for a stream hears comments, only between events, and none after the end."""

import asyncio
import functools
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import pytest

from gateway.keepalive import COMMENT, Keepalives, KeepaliveSink
from gateway.relay import write
from prfaas.errors import Cancelled
from prfaas.testing.gateway_setup import until
from prfaas.testing.virtual_time import run_virtually

HEADERS = {"content-type": "text/event-stream"}
EVERY_S = 0.05


def virtually(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """In virtual time: what is waited for takes as long as it says, on any machine."""

    @functools.wraps(test)
    def run() -> None:
        run_virtually(test())

    return run


class Client:
    """Notes what it gets; `slow_s` is how long each write takes, `gone` refuses them."""

    def __init__(self, slow_s: float = 0.0, gone: bool = False) -> None:
        self.started = False
        self.headers: Mapping[str, str] = {}
        self.got: list[bytes] = []
        self.ended = False
        self.writing = 0
        self._slow_s = slow_s
        self._gone = gone

    async def start(self, headers: Mapping[str, str]) -> None:
        assert not self.started
        self.started, self.headers = True, headers

    def put(self, data: bytes, last: bool = False) -> bool:
        assert self.started
        assert not self.ended
        assert not self.writing, "two writes at once"
        if self._gone:
            raise Cancelled("the client went away")
        self.writing += 1
        self._late = data
        return True

    async def drain(self) -> None:
        await asyncio.sleep(self._slow_s)
        self.writing -= 1
        self.got.append(self._late)

    async def end(self, complete: bool) -> None:
        assert not self.writing
        self.ended = True


@virtually
async def test_silence_is_broken_and_the_first_comment_commits() -> None:
    client = Client()
    sink = KeepaliveSink(client, HEADERS, Keepalives(EVERY_S))
    await asyncio.sleep(EVERY_S / 2)
    assert not sink.started
    await asyncio.sleep(EVERY_S * 4)
    assert sink.started
    assert client.headers == HEADERS
    assert len(client.got) >= 2
    assert set(client.got) == {COMMENT}
    await sink.start({"content-type": "another"})  # too late: they have gone out
    assert client.headers == HEADERS
    await write(sink, b"data: 1\n\n")
    await sink.end(complete=True)
    assert client.got[-1] == b"data: 1\n\n"
    said = len(client.got)
    await asyncio.sleep(EVERY_S * 3)
    assert len(client.got) == said
    await sink.close()


@virtually
async def test_a_stream_that_moves_has_no_comments() -> None:
    client = Client()
    sink = KeepaliveSink(client, HEADERS, Keepalives(EVERY_S * 4))
    await sink.start(HEADERS)
    for _ in range(20):
        await write(sink, b"data: 1\n\n")
        await asyncio.sleep(EVERY_S / 2)
    await sink.end(complete=True)
    await sink.close()
    assert COMMENT not in client.got


@virtually
async def test_a_comment_never_meets_an_event() -> None:
    client = Client(slow_s=EVERY_S * 1.5)
    sink = KeepaliveSink(client, HEADERS, Keepalives(EVERY_S))
    await asyncio.sleep(EVERY_S * 1.5)  # a comment is on its way
    assert client.writing
    await write(sink, b"data: 1\n\n")
    await asyncio.sleep(EVERY_S * 1.5)
    await sink.end(complete=True)
    await sink.close()
    assert client.got[:2] == [COMMENT, b"data: 1\n\n"]


@virtually
async def test_a_client_found_gone_is_told_to_who_writes_next() -> None:
    sink = KeepaliveSink(Client(gone=True), HEADERS, Keepalives(EVERY_S))
    await asyncio.sleep(EVERY_S * 3)
    with pytest.raises(Cancelled):
        await write(sink, b"data: 1\n\n")
    await sink.close()


@virtually
async def test_closing_ends_a_comment_under_way_and_its_error() -> None:
    for client in (Client(slow_s=60), Client(gone=True)):
        sink = KeepaliveSink(client, HEADERS, Keepalives(EVERY_S))
        await asyncio.sleep(EVERY_S * 1.5)
        async with asyncio.timeout(1):
            await sink.close()
        assert client.got == []


@virtually
async def test_one_timer_serves_streams_of_any_age() -> None:
    keepalives = Keepalives(EVERY_S)
    clients: list[Client] = []
    sinks: list[KeepaliveSink] = []
    for _ in range(5):
        clients.append(Client())
        sinks.append(KeepaliveSink(clients[-1], HEADERS, keepalives))
        await asyncio.sleep(EVERY_S / 3)
    await until(lambda: all(len(client.got) > 1 for client in clients), "a comment for each")
    for sink in sinks:
        await sink.close()
    assert not len(keepalives)
    await until(lambda: keepalives._timer is None, "the timer to end with the last")
    late = Client()
    sink = KeepaliveSink(late, HEADERS, keepalives)
    await until(lambda: late.got, "a comment for who came after that")
    await sink.close()
    keepalives.close()
