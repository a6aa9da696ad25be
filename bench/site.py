"""The system under test: both sides as processes on a core each, with a bendable link between."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from local_engine.demo_model import fetch_demo_model
from prfaas.errors import PrfaasError
from prfaas.settings import load_settings
from prfaas.testing.link import LinkShape
from prfaas.testing.link_process import LinkMeasurement, LinkProcess
from prfaas.up.client import OpenAIClient, StreamedAnswer
from prfaas.up.cluster import paired, wait_cluster, wait_record
from prfaas.up.paths import default_cache_dir
from prfaas.up.stack import READY_TIMEOUT_S, Stack, StackPlan, engine_cores
from prfaas.up.supervisor import Supervisor

_REQUEST_TIMEOUT_S = 300.0
_PAIRED_TIMEOUT_S = 60.0
_STOP_GRACE_S = 15.0
_MODEL_NAME = "smollm2-135m-instruct"


class Link(Protocol):
    """A link that can be bent, and says what it really gives."""

    async def set_shape(self, shape: LinkShape) -> object: ...

    async def measure(self, seconds: float) -> LinkMeasurement: ...


@dataclass(frozen=True, slots=True)
class Site:
    """Clients of the running system; closed by `running_site`."""

    link: Link
    p_engine: OpenAIClient
    d_engine: OpenAIClient
    remote: OpenAIClient
    """Gateway that always offloads."""
    local: OpenAIClient
    """Gateway that never does, in front of the same engine."""
    serial: OpenAIClient
    """Gateway that always offloads, before a D that gets frames only when prefill has ended."""


@dataclass(frozen=True, slots=True)
class RemoteAnswer:
    """An answer whose prompt P prefilled, all but the last token, and what its KV cost."""

    answer: StreamedAnswer
    raw_bytes: int
    wire_bytes: int
    hidden_wire_bytes: int
    received_tokens: int
    phases: Mapping[str, float]


@asynccontextmanager
async def running_site(say: Callable[[str], None]) -> AsyncIterator[Site]:
    """Start everything, wait until both Ds are paired with P, and end everything."""
    model = fetch_demo_model(default_cache_dir(), say)
    base = load_settings()
    plan = StackPlan(base=base, model=model, served_model_name=_MODEL_NAME, threads=1)
    d_core, p_core = engine_cores(plan.pin)
    say(f"engines pinned: D on core {d_core}, P on core {p_core}; everything else floats")
    # No bursts of the link meter: here the link is what the benchmark says it is.
    quiet: dict[str, Any] = {"probe_bytes": 0, "slower_by": 0}
    always: dict[str, Any] = {"policy": {**dict(base.gateway.policy), "name": "always_remote"}}
    async with AsyncExitStack() as stack:
        directories = [
            Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="prfaas-bench-")))
            for _ in range(2)
        ]
        main, serial = (Stack.create(plan, directory) for directory in directories)
        link = await stack.enter_async_context(
            LinkProcess("127.0.0.1", main.ports.p_agent, LinkShape())
        )
        supervisor = await stack.enter_async_context(Supervisor(stop_grace_s=_STOP_GRACE_S))
        say("starting P, D and the D of the serial baseline")
        held = {**quiet, "hold_until_sealed": True}
        await supervisor.start(
            (
                *main.prefill_side(core=p_core),
                *main.decode_side(prefill_port=link.port, core=d_core, agent=quiet),
                *serial.decode_side(
                    prefill_port=link.port, core=d_core, agent=held, suffix="-serial"
                ),
            ),
            READY_TIMEOUT_S,
        )
        local_port = serial.ports.p_agent  # free: this stack runs no P of its own
        await supervisor.start(
            (
                main.gateway(prefill_port=link.port, settings=always),
                main.gateway(name="gateway-local", port=local_port, settings={"offload": False}),
                serial.gateway(name="gateway-serial", prefill_port=link.port, settings=always),
            ),
            READY_TIMEOUT_S,
        )

        async def client(url: str) -> OpenAIClient:
            return await stack.enter_async_context(OpenAIClient(url, timeout_s=_REQUEST_TIMEOUT_S))

        site = Site(
            link=link,
            p_engine=await client(main.p_engine_url),
            d_engine=await client(main.d_engine_url),
            remote=await client(main.gateway_url),
            local=await client(f"http://127.0.0.1:{local_port}"),
            serial=await client(serial.gateway_url),
        )
        for gateway in (site.remote, site.serial):
            await wait_cluster(gateway, "P to be paired", paired, _PAIRED_TIMEOUT_S)
        async with watched(supervisor):
            yield site


async def remote_answer(gateway: OpenAIClient, answer: StreamedAnswer) -> RemoteAnswer:
    """The cost of an offloaded request. Raises PrfaasError where P did not prefill it all."""
    outcome = (await wait_record(gateway, answer.request_id))["outcome"]
    if outcome is None or outcome["status"] != "staged" or outcome["remote_cached_tokens"]:
        raise PrfaasError(f"request {answer.request_id} was not all prefilled by P: {outcome}")
    return RemoteAnswer(
        answer=answer,
        raw_bytes=outcome["raw_bytes"],
        wire_bytes=outcome["wire_bytes"],
        hidden_wire_bytes=outcome["hidden_wire_bytes"],
        received_tokens=outcome["received_tokens"],
        phases=outcome["phases"],
    )


@asynccontextmanager
async def watched(supervisor: Supervisor) -> AsyncIterator[None]:
    """The body is cancelled, and the death raised, when a process of the site ends."""
    body = asyncio.current_task()
    assert body is not None
    watch = asyncio.create_task(supervisor.watch())
    watch.add_done_callback(lambda task: None if task.cancelled() else body.cancel())
    try:
        yield
    except asyncio.CancelledError:
        if watch.done() and not watch.cancelled():
            body.uncancel()
            watch.result()
        raise
    finally:
        watch.cancel()
        with contextlib.suppress(asyncio.CancelledError, PrfaasError):
            await watch
