"""What each process of a gateway with workers runs, from its start to its end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gateway.app import Gateway, load_tokenizer, run_gateway
from gateway.live_policy import ACTIVE, Effective, MakePolicy
from gateway.members import Members
from gateway.workers.everyone import Worker
from gateway.workers.files import policies_of, policy_copy, tenants_copy
from gateway.workers.link import WorkerLink
from gateway.workers.log_lock import share_handlers
from gateway.workers.place import Place
from gateway.workers.state_process import StateProcess
from prfaas.clock import SYSTEM_CLOCK
from prfaas.limits import Limits
from prfaas.settings import (
    DiscoverySettings,
    PolicySettings,
    Settings,
    StateSettings,
)

logger = logging.getLogger(__name__)

EXCHANGE_S = 0.02
"""Between two exchanges of a worker with the process that keeps the state."""
EXCHANGE_TIMEOUT_S = 1.0
CONNECT_S = 60.0
"""A worker that starts waits so long for the state, which may be starting too."""
MEMBER_TTL_S = 3.0


async def serve_state(place: Place, settings: Settings, make_policy: MakePolicy) -> None:
    """Keep the state of all workers until SIGTERM, or until the supervisor is gone.

    Raises ConfigError.
    """
    share_handlers(place.directory / "log.lock")
    process = StateProcess(place, settings, make_policy, SYSTEM_CLOCK)
    async with process.running(), _stopping(place) as stop:
        _tell_ready(place)
        await stop.wait()


async def serve_worker(
    place: Place, settings: Settings, make_policy: MakePolicy, effective: Effective
) -> None:
    """Serve requests until SIGTERM, or until the supervisor is gone; then drain.

    Raises ConfigError and StateUnavailable.
    """
    share_handlers(place.directory / "log.lock")
    link = WorkerLink(place.state_socket, place.index, SYSTEM_CLOCK, EXCHANGE_TIMEOUT_S)
    members = await link.members(CONNECT_S)
    chosen = worker_settings(settings, members, place)
    gateway = Gateway(
        chosen,
        make_policy(chosen.gateway.policy),
        load_tokenizer(settings.gateway),
        make_policy=make_policy,
        effective=effective,
        worker=Worker(place, link),
    )
    await run_gateway(gateway, lambda port: _tell_ready(place), place.life_fd)


def worker_settings(settings: Settings, members: Members, place: Place) -> Settings:
    """Of one worker: members as the state has them, files as the state found them good, and its
    share of what the gateway bounds.
    """
    gateway, workers = settings.gateway, place.workers
    tenants = gateway.tenants
    fields: dict[str, object] = {
        "port": place.port,
        "engines": members.engines,
        "peers": members.peers,
        "discovery": DiscoverySettings(),
        "state": StateSettings(
            interval_s=EXCHANGE_S,
            timeout_s=EXCHANGE_TIMEOUT_S,
            member_ttl_s=MEMBER_TTL_S,
            expected_gateways=workers,
        ),
        "tenants": tenants.model_copy(
            update={
                "file": None if tenants.file is None else tenants_copy(place.directory),
                "active_requests": _share(tenants.active_requests, workers),
            }
        ),
    }
    for role, policy in policies_of(gateway).items():
        if policy.file is not None:
            name = "policy" if role == ACTIVE else role
            fields[name] = PolicySettings(file=policy_copy(place.directory, role))
    limits = settings.limits
    shares = {
        name: _share(getattr(limits, name), workers)
        for name in ("gateway_max_in_flight", "gateway_waiting", "engine_active_requests")
    }
    return settings.model_copy(
        update={
            "gateway": gateway.model_copy(update=fields),
            "limits": Limits.model_validate({**dict(limits), **shares}),
        }
    )


def _share(most: int | None, workers: int) -> int | None:
    """0 stays 0, which is no bound; None, what engines say, is divided as requests come."""
    return None if most is None else -(-most // workers)


def _tell_ready(place: Place) -> None:
    os.write(place.ready_fd, b"1")
    os.close(place.ready_fd)


@asynccontextmanager
async def _stopping(place: Place) -> AsyncIterator[asyncio.Event]:
    """An event for SIGTERM, SIGINT and the supervisor's end."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, stop.set)
    loop.add_reader(place.life_fd, stop.set)
    try:
        yield stop
    finally:
        loop.remove_reader(place.life_fd)
        for number in numbers:
            loop.remove_signal_handler(number)
