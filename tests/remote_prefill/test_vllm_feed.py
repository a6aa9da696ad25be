"""KV events from a real ZMQ publisher, of vLLM's way to publish and replay."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from prfaas.errors import ConfigError
from prfaas.testing.waiting import eventually
from remote_prefill.vllm_events import Batch
from remote_prefill.vllm_feed import EventStream

END = (1 << 64) - 1


class Publisher:
    """Publishes numbered batches and replays those it still has; owns its sockets."""

    def __init__(self, directory: Path, keep: int = 1000) -> None:
        self.endpoint = f"ipc://{directory}/events"
        self.replay_endpoint = f"ipc://{directory}/replay"
        self.context = zmq.asyncio.Context()
        self.pub = self.context.socket(zmq.PUB)
        self.pub.bind(self.endpoint)
        self.router = self.context.socket(zmq.ROUTER)
        self.router.bind(self.replay_endpoint)
        self.buffer: list[tuple[int, bytes]] = []
        self.keep = keep
        self.next = 0
        self.task = asyncio.create_task(self._serve())

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self.context.destroy(linger=0)

    async def publish(self, name: str, *, lost: bool = False) -> None:
        payload = msgspec.msgpack.encode([0.0, [{"type": name}], 0])
        self.buffer = [*self.buffer, (self.next, payload)][-self.keep :]
        if not lost:
            await self.pub.send_multipart((b"", self.next.to_bytes(8, "big"), payload))
        self.next += 1

    async def _serve(self) -> None:
        while True:
            client, _, first = await self.router.recv_multipart()
            for number, payload in self.buffer:
                if number >= int.from_bytes(first, "big"):
                    parts = (client, b"", number.to_bytes(8, "big"), payload)
                    await self.router.send_multipart(parts)
            await self.router.send_multipart((client, b"", END.to_bytes(8, "big"), b""))


class Listener:
    """What a stream has told, in order."""

    def __init__(self, endpoint: str, replay: str) -> None:
        self.heard: list[str] = []
        self.stream = EventStream(endpoint, replay, on_batch=self._batch, on_gap=self._gap)
        self.task = asyncio.create_task(self.stream.run())

    def _batch(self, batch: Batch) -> None:
        self.heard.append(str(batch.events[0]["type"]))

    def _gap(self, reason: str) -> None:
        self.heard.append(f"gap: {reason}")

    async def __aenter__(self) -> Listener:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self.stream.close()


@pytest.fixture
async def publisher(tmp_path: Path) -> AsyncIterator[Publisher]:
    made = Publisher(tmp_path)
    yield made
    await made.close()


async def subscribed(listener: Listener, publisher: Publisher) -> None:
    """Until what is published comes; a subscription takes its time to arrive."""
    while not any(name.startswith("hello") for name in listener.heard):
        await publisher.publish(f"hello{publisher.next}")
        await asyncio.sleep(0.01)


async def heard(listener: Listener, last: str) -> list[str]:
    await eventually(lambda: listener.heard[-1:] == [last])
    return listener.heard


async def test_what_was_before_is_replayed_and_nothing_comes_twice(publisher: Publisher) -> None:
    for name in ("a", "b", "c"):
        await publisher.publish(name)
    async with Listener(publisher.endpoint, publisher.replay_endpoint) as listener:
        await subscribed(listener, publisher)
        await publisher.publish("last")
        found = await heard(listener, "last")
        assert found[:4] == ["gap: the feed begins", "a", "b", "c"]
        hellos = [name for name in found if name.startswith("hello")]
        assert hellos == [f"hello{number}" for number in range(3, 3 + len(hellos))]
        assert len(found) == 5 + len(hellos)


async def test_a_gap_is_replayed_where_vllm_still_has_it(publisher: Publisher) -> None:
    async with Listener(publisher.endpoint, publisher.replay_endpoint) as listener:
        await subscribed(listener, publisher)
        await publisher.publish("lost 1", lost=True)
        await publisher.publish("lost 2", lost=True)
        await publisher.publish("last")
        found = await heard(listener, "last")
        assert found[-3:] == ["lost 1", "lost 2", "last"]
        assert sum(name.startswith("gap") for name in found) == 1


async def test_a_gap_that_nobody_has_voids_what_is_known(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path, keep=1)
    for replay in (publisher.replay_endpoint, ""):
        async with Listener(publisher.endpoint, replay) as listener:
            await subscribed(listener, publisher)
            await publisher.publish("lost 1", lost=True)
            await publisher.publish("lost 2", lost=True)
            await publisher.publish("last")
            found = await heard(listener, "last")
            assert found[-2].startswith("gap: batches") or found[-2] == "lost 2"
            assert sum(name.startswith("gap: batches") for name in found) == 1
    await publisher.close()


async def test_a_restart_is_noticed_by_its_numbers(publisher: Publisher) -> None:
    async with Listener(publisher.endpoint, publisher.replay_endpoint) as listener:
        await subscribed(listener, publisher)
        publisher.next, publisher.buffer = 0, []
        await publisher.publish("new")
        found = await heard(listener, "new")
        assert found[-2] == "gap: vLLM has restarted"
        await publisher.publish("second")
        assert (await heard(listener, "second"))[-2] == "new"


async def test_rubbish_on_the_socket_ends_nothing(publisher: Publisher) -> None:
    async with Listener(publisher.endpoint, publisher.replay_endpoint) as listener:
        await subscribed(listener, publisher)
        await publisher.pub.send_multipart((b"", b"short", b"x"))
        await publisher.pub.send_multipart((b"only one",))
        number = publisher.next
        publisher.next += 1
        await publisher.pub.send_multipart((b"", number.to_bytes(8, "big"), b"\xc1"))
        await publisher.publish("after")
        found = await heard(listener, "after")
        assert found[-2] == "gap: a batch could not be read"


def test_an_endpoint_that_is_none_is_named() -> None:
    with pytest.raises(ConfigError, match=r"vllm\.kv_events"):
        EventStream("nonsense", "", on_batch=_nobody, on_gap=_nobody)


def _nobody(_: Any) -> None:
    raise AssertionError
