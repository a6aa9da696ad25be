"""The whole system as processes, for tests: started on a thread of its own, broken at will."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from prfaas.settings import Settings, load_settings
from prfaas.up.process import ManagedProcess, ProcessSpec
from prfaas.up.stack import READY_TIMEOUT_S, Stack, StackPlan

T = TypeVar("T")
STOP_GRACE_S = 10.0


@dataclass(frozen=True, slots=True)
class Answer:
    """One completion: status, choice and usage, or the error body."""

    status: int
    body: dict[str, Any]
    request_id: str

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

    def __init__(self, stack: Stack, specs: tuple[ProcessSpec, ...]) -> None:
        self.stack = stack
        self._specs = {spec.name: spec for spec in specs}
        self._processes: dict[str, ManagedProcess] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="stack", daemon=True)

    def start(self) -> None:
        """Start all processes and wait until they are ready and the pair has been probed."""
        self._thread.start()
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

    def kill(self, name: str) -> None:
        """SIGKILL one process."""
        self._run(self._processes.pop(name).kill())

    def restart(self, name: str) -> None:
        """Start a process that was killed or stopped."""
        self._run(self._start([name]))

    def signal(self, name: str, number: signal.Signals) -> None:
        """Any signal, SIGSTOP and SIGCONT among them."""
        os.kill(self._processes[name].pid, number)

    def terminate(self, name: str) -> int | None:
        """SIGTERM and wait; its exit status."""
        return self._run(self._processes.pop(name).stop(STOP_GRACE_S))

    def log(self, name: str) -> str:
        return self._specs[name].log.read_text(errors="replace")

    def complete(
        self, prompt: list[int], *, url: str | None = None, timeout_s: float = 60.0, **fields: Any
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
        return self.post(f"{url or self.stack.gateway_url}/v1/completions", body, timeout_s)

    def post(self, url: str, body: object, timeout_s: float = 60.0) -> Answer:
        """POST JSON; error statuses are answers too."""
        data = json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as reply:
                return Answer(reply.status, json.load(reply), reply.headers["x-request-id"] or "")
        except urllib.error.HTTPError as exc:
            with exc:
                return Answer(exc.code, json.load(exc), exc.headers["x-request-id"] or "")

    def get(self, url: str) -> Any:
        """GET JSON."""
        with urllib.request.urlopen(url, timeout=30) as reply:
            return json.load(reply)

    def record(self, request_id: str) -> dict[str, Any]:
        """What the gateway remembers of a request, once its outcome is there where one is due."""

        def look() -> dict[str, Any] | None:
            found: dict[str, Any] = self.get(
                f"{self.stack.gateway_url}/prfaas/requests/{request_id}"
            )
            due = found["decision"]["target"] == "remote" and found.get("outcome") is None
            return None if due else found

        return wait_until(look, 10, f"outcome of {request_id}")

    def integrity(self, url: str) -> dict[str, Any]:
        """Runs the engine's pool check; the counts it found."""
        found: dict[str, Any] = self.get(f"{url}/debug/integrity")
        return found

    def wait_link_ready(self, timeout_s: float = 60.0) -> None:
        """Until the gateway sees the instance paired, probed and with fresh telemetry."""

        def ready() -> bool:
            cluster = self.get(f"{self.stack.gateway_url}/prfaas/cluster")
            fresh_s, remotes = cluster["max_age_s"] / 2, cluster["remotes"]
            return bool(remotes) and all(
                remote["ready"] and max(remote["load"]["age_s"], remote["link"]["age_s"]) < fresh_s
                for remote in remotes
            )

        wait_until(ready, timeout_s, "the link to be ready")

    def _run(self, coro: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coro, self._loop).result(READY_TIMEOUT_S)

    async def _start(self, names: list[str]) -> None:
        started = []
        for name in names:
            process = ManagedProcess(self._specs[name])
            self._processes[name] = process
            await process.start()
            started.append(process)
        await asyncio.gather(*(process.wait_ready(READY_TIMEOUT_S) for process in started))

    async def _stop(self) -> dict[str, int | None]:
        statuses: dict[str, int | None] = {}
        for name in reversed(list(self._processes)):
            statuses[name] = await self._processes.pop(name).stop(STOP_GRACE_S)
        return statuses


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
    prefill_port: int | None = None,
    tls: bool = False,
) -> Iterator[RunningStack]:
    """A started stack in a private `directory`; ended on exit."""
    directory.mkdir(mode=0o700, exist_ok=True)
    plan = StackPlan(base or load_settings(), model, "test-model", threads=1, pin=False, tls=tls)
    stack = Stack.create(plan, directory)
    specs = stack.engines_and_agents(
        prefill_port=prefill_port,
        agent=agent,
        d_engine=d_engine,
        p_engine=p_engine,
        prefill=prefill,
    )
    running = RunningStack(stack, (*specs, stack.gateway(settings=gateway)))
    try:
        running.start()
        yield running
    finally:
        running.stop()
