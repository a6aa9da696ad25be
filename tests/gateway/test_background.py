"""Loops beside the requests: an error is told and does not end them."""

from __future__ import annotations

import asyncio

import pytest

from gateway import background
from gateway.background import in_background


async def test_what_fails_is_told_and_begins_again_until_it_is_cancelled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(background, "AGAIN_S", 0.0)
    begun, well = [], asyncio.Event()

    async def run() -> None:
        begun.append(1)
        if len(begun) < 3:
            raise ZeroDivisionError
        well.set()
        await asyncio.Event().wait()

    task = in_background("the loop", run)
    await asyncio.wait_for(well.wait(), 20)
    assert caplog.text.count("the loop failed") == 2
    assert not task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()


async def test_what_ends_by_itself_has_ended() -> None:
    async def run() -> None:
        await asyncio.sleep(0)

    await asyncio.wait_for(in_background("the loop", run), 20)
