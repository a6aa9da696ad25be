"""What each process is given, and what ends it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.app import Gateway, run_gateway
from gateway.members import Members
from gateway.workers.place import Place
from gateway.workers.process import _stopping, worker_settings
from policies.registry import make_policy
from prfaas.limits import Limits
from prfaas.settings import EngineEndpoint, Settings
from prfaas.testing.gateway_setup import gateway_settings


def place_at(directory: Path, life_fd: int = -1, workers: int = 3) -> Place:
    return Place(1, workers, 0, directory, 4711, life_fd, -1)


def test_a_worker_has_its_share_and_what_the_state_knows(tmp_path: Path) -> None:
    settings = gateway_settings(
        limits={"gateway_max_in_flight": 10, "gateway_waiting": 7, "engine_active_requests": 0},
        policy={"file": tmp_path / "p.yaml"},
        canary={"name": "always_local"},
        tenants={"file": tmp_path / "t.yaml", "active_requests": 4},
        discovery={"file": tmp_path / "m.yaml"},
        state={"redis": "redis://127.0.0.1:1"},
    )
    members = Members((EngineEndpoint(name="found", url="http://127.0.0.1:1"),))
    found = worker_settings(settings, members, place_at(tmp_path / "d"))
    gateway, limits = found.gateway, found.limits
    assert (gateway.engines, gateway.peers) == (members.engines, ())
    assert gateway.discovery.file is None
    assert gateway.state.redis is None, "only one process speaks to Redis"
    assert gateway.port == 4711
    assert gateway.policy.file == tmp_path / "d" / "policy-active.yaml"
    assert gateway.canary == settings.gateway.canary
    assert gateway.tenants.file == tmp_path / "d" / "tenants.yaml"
    assert gateway.tenants.active_requests == 2
    assert (limits.gateway_max_in_flight, limits.gateway_waiting) == (4, 3)
    assert limits.engine_active_requests == 0, "no bound stays none"
    assert limits.request_timeout_s == settings.limits.request_timeout_s
    assert (
        worker_settings(
            Settings(limits=Limits()), Members(), place_at(tmp_path)
        ).limits.engine_active_requests
        == Limits().engine_active_requests
    )


async def test_the_end_of_the_supervisor_ends_a_worker() -> None:
    settings = gateway_settings(d_watch=None, peers=())
    gateway = Gateway(settings, make_policy(settings.gateway.policy), None)
    reader, writer = os.pipe()
    ports: list[int] = []

    def ready(port: int) -> None:
        ports.append(port)
        os.close(writer)

    async with asyncio.timeout(60):
        await run_gateway(gateway, ready, reader)
    os.close(reader)
    assert ports


@pytest.mark.parametrize("how", ["signal", "pipe"])
async def test_what_ends_the_state(tmp_path: Path, how: str) -> None:
    reader, writer = os.pipe()
    ends: dict[str, Callable[[], Any]] = {
        "signal": lambda: os.kill(os.getpid(), signal.SIGTERM),
        "pipe": lambda: os.close(writer),
    }
    async with asyncio.timeout(60), _stopping(place_at(tmp_path, reader)) as stop:
        assert not stop.is_set()
        ends[how]()
        await stop.wait()
    os.close(reader)
    if how == "signal":
        os.close(writer)
