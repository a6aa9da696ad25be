"""Processes ask each other, and do without those that do not answer."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from gateway.workers import siblings as siblings_module
from gateway.workers.place import Place
from gateway.workers.siblings import Ask, AskRequest, AskRequests, Siblings, Told


def place_at(directory: Path, index: int) -> Place:
    return Place(index, 3, 0, directory, 0, -1, -1)


def says(index: int) -> object:
    def answer(ask: Ask) -> object:
        assert isinstance(ask, AskRequests)
        if ask.limit < 0:
            raise ValueError("a bug")
        return [Told(float(index), b"x" * ask.limit)]

    return answer


@pytest.fixture
async def three() -> AsyncIterator[list[Siblings]]:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pw")))
        made = [Siblings(place_at(folder, index), says(index)) for index in range(3)]  # type: ignore[arg-type]
        for each in made:
            await each.start()
            stack.push_async_callback(each.close)
        yield made


async def test_all_answer_whatever_its_size(three: list[Siblings]) -> None:
    for size in (0, 1, 1_000_000):
        found = await three[1].ask(AskRequests(size), list[Told])
        assert list(found) == [1, 0, 2], "its own is the first"
        assert found == {at: [Told(float(at), b"x" * size)] for at in range(3)}
    assert list(await three[1].ask(AskRequests(1), list[Told], own=False)) == [0, 2]
    socket = three[0]._place.socket_of(0)
    assert socket.stat().st_mode & 0o777 == 0o600


async def test_who_is_gone_or_silent_is_left_out(
    three: list[Siblings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(siblings_module, "TIMEOUT_S", 0.2)
    await three[0].close()
    three[0]._place.socket_of(0).unlink()
    assert list(await three[1].ask(AskRequests(1), list[Told], state=True)) == [1, 2]

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_unix_server(silent, three[0]._place.socket_of(0))
    assert list(await three[1].ask(AskRequests(1), list[Told])) == [1, 2]
    server.close()


async def test_what_cannot_be_answered_or_understood_is_said(
    three: list[Siblings], caplog: pytest.LogCaptureFixture
) -> None:
    found = await three[1].ask(AskRequests(-1), list[Told], own=False)
    assert found == {}
    assert "could not be answered" in caplog.text
    assert await three[1].ask(AskRequests(1), list[int], own=False) == {}
    assert "worker-0 answers otherwise" in caplog.text
    reader, writer = await asyncio.open_unix_connection(three[0]._place.socket_of(0))
    writer.write(b"\xff\xff\xff\xff")
    assert await asyncio.wait_for(reader.read(), 20) == b""
    writer.close()
    assert "somebody asks otherwise" in caplog.text


async def test_more_than_the_bound_is_not_answered(
    three: list[Siblings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(siblings_module, "MAX_ASKED", 0)
    assert await three[1].ask(AskRequest("x"), list[Told], own=False) == {}
