"""The whole system as processes, for tests: started on a thread of its own, broken at will."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from signal import SIGCONT, Signals
from typing import Any, TypeVar

from prometheus_client.parser import text_string_to_metric_families

from prfaas.settings import Settings, load_settings
from prfaas.testing.link import LinkShape
from prfaas.testing.link_process import LinkProcess
from prfaas.up.process import ManagedProcess, ProcessSpec
from prfaas.up.stack import READY_TIMEOUT_S, Stack, StackPlan, free_ports

T = TypeVar("T")
STOP_GRACE_S = 10.0


@dataclass(frozen=True, slots=True)
class Answer:
    """One completion: status, choice and usage, or the error body."""

    status: int
    body: dict[str, Any]
    request_id: str
    retry_after: str | None = None
    """The header of that name."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(self.body["choices"][0]["token_ids"])

    @property
    def finish_reason(self) -> str:
        return str(self.body["choices"][0]["finish_reason"])

    @property
    def cached_tokens(self) -> int:
        return int(self.body["usage"]["prompt_tokens_details"]["cached_tokens"])


class RunningStack:
    """Owns the five processes of a Stack; every method may be called from any thread."""

    def __init__(
        self,
        stack: Stack,
        specs: tuple[ProcessSpec, ...],
        link: LinkProcess | None = None,
        metrics_ports: Mapping[str, int] | None = None,
        *,
        ready_timeout_s: float = READY_TIMEOUT_S,
    ) -> None:
        """`link`: the relay between D and P, not started yet. `metrics_ports`: of the agents."""
        self.stack = stack
        self._ready_timeout_s = ready_timeout_s
        self.metrics_ports = metrics_ports or {}
        self._link = link
        self._metrics_urls = {
            "gateway": stack.gateway_url,
            "d-engine": stack.d_engine_url,
            "p-engine": stack.p_engine_url,
            **{n: f"http://127.0.0.1:{port}" for n, port in self.metrics_ports.items()},
        }
        self._specs = {spec.name: spec for spec in specs}
        self._processes: dict[str, ManagedProcess] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="stack", daemon=True)

    def start(self) -> None:
        """Start all processes and wait until they are ready and the pair has been probed."""
        self._thread.start()
        if self._link is not None:
            self._run(self._link.__aenter__())
        self._run(self._start(list(self._specs)))
        self.wait_link_ready()

    def stop(self) -> dict[str, int | None]:
        """SIGTERM to all, gateway first; exit statuses by name."""
        try:
            return self._run(self._stop())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    @property
    def pids(self) -> dict[str, int]:
        """Processes that were started and not ended here, by name."""
        return {name: process.pid for name, process in self._processes.items()}

    def bend(self, act: Callable[[LinkProcess], Coroutine[Any, Any, T]]) -> T:
        """Do something to the link between D and P."""
        assert self._link is not None
        return self._run(act(self._link))

    def kill(self, name: str) -> None:
        """SIGKILL one process."""
        self._run(self._processes.pop(name).kill())

    def restart(self, name: str) -> None:
        """Start a process that was killed or stopped."""
        self._run(self._start([name]))

    def add(self, spec: ProcessSpec) -> None:
        """Start one more process, which then is as the others."""
        self._specs[spec.name] = spec
        self.restart(spec.name)

    def signal(self, name: str, number: Signals) -> None:
        """Any signal, SIGSTOP and SIGCONT among them."""
        os.kill(self._processes[name].pid, number)

    def ensure_up(self) -> None:
        """Start what has ended, and let go on what was stopped."""
        gone = [name for name in self._specs if not self._reached(name, SIGCONT)]
        if gone:
            self._run(self._start(gone))

    def whole_again(self) -> RunningStack:
        """Itself, everything up and the link ready, whatever the test before has left of it."""
        self.ensure_up()
        self.wait_link_ready()
        return self

    def wait_end(self, name: str) -> int:
        """The exit status of a process that is about to end."""
        status = self._run(self._processes[name].wait())
        del self._processes[name]
        return status

    def _reached(self, name: str, number: Signals) -> bool:
        try:
            self.signal(name, number)
        except (KeyError, ProcessLookupError):
            return False
        return True

    def terminate(self, name: str) -> int | None:
        """SIGTERM and wait; its exit status."""
        return self._run(self._processes.pop(name).stop(STOP_GRACE_S))

    def log(self, name: str) -> str:
        return self._specs[name].log.read_text(errors="replace")

    def complete(
        self,
        prompt: list[int],
        *,
        url: str | None = None,
        timeout_s: float = 60.0,
        headers: Mapping[str, str] | None = None,
        **fields: Any,
    ) -> Answer:
        """One greedy completion with token ids in and out; by default through the gateway."""
        body = {
            "model": self.stack.plan.served_model_name,
            "prompt": prompt,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **fields,
        }
        return self.post(
            f"{url or self.stack.gateway_url}/v1/completions", body, timeout_s, headers
        )

    def post(
        self,
        url: str,
        body: object,
        timeout_s: float = 60.0,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """POST JSON; error statuses are answers too."""
        data = json.dumps(body).encode()
        sent = {"content-type": "application/json", **(headers or {})}
        request = urllib.request.Request(url, data, sent)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as reply:
                return Answer(reply.status, json.load(reply), reply.headers["x-request-id"] or "")
        except urllib.error.HTTPError as exc:
            with exc:
                request_id = exc.headers["x-request-id"] or ""
                return Answer(exc.code, json.load(exc), request_id, exc.headers["retry-after"])

    def get(self, url: str) -> Any:
        """GET JSON."""
        with urllib.request.urlopen(url, timeout=30) as reply:
            return json.load(reply)

    def record(self, request_id: str, *, url: str | None = None) -> dict[str, Any]:
        """What the gateway remembers of a request, once its outcome is there where one is due."""
        gateway_url = url or self.stack.gateway_url

        def look() -> dict[str, Any] | None:
            found: dict[str, Any] = self.get(f"{gateway_url}/prfaas/requests/{request_id}")
            due = found["transfer_id"] is not None and found["outcome"] is None
            return None if due else found

        return wait_until(look, 10, f"outcome of {request_id}")

    def metrics(self, name: str) -> dict[str, float]:
        """Prometheus samples of one process as `name{label="value"}`."""
        with urllib.request.urlopen(f"{self._metrics_urls[name]}/metrics", timeout=30) as reply:
            text = reply.read().decode()
        return {
            sample.name + _label_text(sample.labels): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def integrity(self, url: str) -> dict[str, Any]:
        """Runs the engine's pool check; the counts it found."""
        found: dict[str, Any] = self.get(f"{url}/debug/integrity")
        return found

    def wait_link_ready(self, timeout_s: float = 60.0, *, url: str | None = None) -> None:
        """Until the gateway sees D connected, and P paired, probed and with fresh telemetry."""
        gateway_url = url or self.stack.gateway_url

        def ready() -> bool:
            cluster = self.get(f"{gateway_url}/prfaas/cluster")
            fresh_s, remotes = cluster["max_age_s"] / 2, cluster["remotes"]
            d_ready = bool(cluster["local"]["offload_ready"])
            return (
                d_ready
                and bool(remotes)
                and all(
                    remote["ready"]
                    and max(remote["load"]["age_s"], remote["link"]["age_s"]) < fresh_s
                    for remote in remotes
                )
            )

        wait_until(ready, timeout_s, "the link to be ready")

    def _run(self, coro: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coro, self._loop).result(self._ready_timeout_s)

    async def _start(self, names: list[str]) -> None:
        started = []
        for name in names:
            process = ManagedProcess(self._specs[name])
            self._processes[name] = process
            await process.start()
            started.append(process)
        await asyncio.gather(*(process.wait_ready(self._ready_timeout_s) for process in started))

    async def _stop(self) -> dict[str, int | None]:
        statuses: dict[str, int | None] = {}
        gateways = [name for name in self._processes if name.startswith("gateway")]
        for names in (gateways, [name for name in self._processes if name not in gateways]):
            stopping = [self._processes.pop(name).stop(STOP_GRACE_S) for name in names]
            statuses |= zip(names, await asyncio.gather(*stopping), strict=True)
        if self._link is not None:
            await self._link.__aexit__()
        return statuses


def _label_text(labels: Mapping[str, str]) -> str:
    inner = ",".join(f'{name}="{value}"' for name, value in sorted(labels.items()))
    return f"{{{inner}}}" if inner else ""


def wait_until(condition: Callable[[], T | None], timeout_s: float, what: str) -> T:
    """The first true value of `condition()`. Raises AssertionError after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = condition()
        if found:
            return found
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout_s} s for {what}")
        time.sleep(0.02)


@contextlib.contextmanager
def running_stack(
    directory: Path,
    model: Path,
    *,
    base: Settings | None = None,
    gateway: Mapping[str, Any] | None = None,
    agent: Mapping[str, Any] | None = None,
    d_engine: Mapping[str, Any] | None = None,
    p_engine: Mapping[str, Any] | None = None,
    prefill: Mapping[str, Any] | None = None,
    link: LinkShape | None = None,
    tls: bool = False,
) -> Iterator[RunningStack]:
    """A started stack in a private `directory`; ended on exit.

    `link`: D and the gateway reach P through a bendable link of this shape.
    """
    directory.mkdir(mode=0o700, exist_ok=True)
    plan = StackPlan(base or load_settings(), model, "test-model", threads=1, pin=False, tls=tls)
    stack = Stack.create(plan, directory)
    d_metrics, p_metrics, link_port = free_ports(3, but=astuple(stack.ports))
    relay = None
    if link is not None:
        relay = LinkProcess("127.0.0.1", stack.ports.p_agent, link, listen_port=link_port)
    prefill_port = link_port if link is not None else None
    specs = (
        *stack.engines_and_agents(
            prefill_port=prefill_port,
            # What these tests break or slow down is to come all the same.
            agent={"metrics_port": d_metrics, "slower_by": 0, **(agent or {})},
            d_engine=d_engine,
            p_engine=p_engine,
            prefill={"metrics_port": p_metrics, **(prefill or {})},
        ),
        stack.gateway(prefill_port=prefill_port, settings=gateway),
    )
    running = RunningStack(stack, specs, relay, {"d-agent": d_metrics, "p-agent": p_metrics})
    try:
        running.start()
        yield running
    finally:
        running.stop()
