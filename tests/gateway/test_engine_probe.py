"""The probe says when the engine comes and goes, once each."""

import asyncio
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager

import pytest

from gateway import engine_probe
from gateway.engine_probe import EngineProbe
from gateway.upstream import UpstreamResponse
from prfaas.testing.gateway_setup import until


class Flapping:
    """An engine whose health is a script; the last answer stays."""

    def __init__(self, *answers: bool) -> None:
        self.answers = list(answers)
        self.asked = 0

    async def healthy(self, timeout_s: float) -> bool:
        self.asked += 1
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    def post(
        self, path: str, headers: Mapping[str, str], body: bytes
    ) -> AbstractAsyncContextManager[UpstreamResponse]:
        raise NotImplementedError


async def test_changes_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_probe, "INTERVAL_S", 0.0)
    engine, changes = Flapping(False, True, True, False, False, True), []
    probe = EngineProbe(engine, 1.0, changes.append)
    assert not probe.reachable
    task = asyncio.create_task(probe.run())
    await until(lambda: engine.asked > 8, "the script to end")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert changes == [True, False, True]
    assert probe.reachable
