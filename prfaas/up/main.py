"""`prfaas up`: start everything, show it, stay up, stop cleanly."""

from __future__ import annotations

import asyncio
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvloop
from rich.console import Console

from prfaas.errors import ConfigError, PrfaasError
from prfaas.settings import Settings
from prfaas.up.client import OpenAIClient
from prfaas.up.demo import Demo
from prfaas.up.paths import default_cache_dir
from prfaas.up.stack import READY_TIMEOUT_S, Stack, StackPlan, engine_cores, free_ports
from prfaas.up.supervisor import Supervisor

DEFAULT_PORT = 8000
_DEMO_MODEL_NAME = "smollm2-135m-instruct"
_REQUEST_TIMEOUT_S = 180.0
_STOP_MARGIN_S = 5.0
_DEATH_S = 1.0


@dataclass(frozen=True, slots=True)
class UpOptions:
    """What the command line said. `model` None: the demo model; `port` None: 8000, or a free one
    where it shows everything once."""

    settings: Settings
    model: Path | None
    port: int | None
    threads: int
    pin: bool
    once: bool
    tls: bool


def run_up(options: UpOptions) -> int:
    """Run until stopped, or once; the exit status. Raises ConfigError before anything starts."""
    console = Console(highlight=False)
    port = _gateway_port(options)
    with _progress(console) as progress:
        model, name = _model(options.model, progress)
    directory = Path(tempfile.mkdtemp(prefix="prfaas-"))
    plan = StackPlan(options.settings, model, name, port, options.threads, options.pin, options.tls)
    status = 1
    try:
        status = uvloop.run(_Up(options, Stack.create(plan, directory), console).run())
    finally:
        if status == 0:
            shutil.rmtree(directory, ignore_errors=True)
        else:
            console.print(f"logs and configuration are kept in {directory}", markup=False)
    return status


class _Up:
    """One run; owns the processes while `run` runs."""

    def __init__(self, options: UpOptions, stack: Stack, console: Console) -> None:
        self._options = options
        self._stack = stack
        self._console = console
        self._stop = asyncio.Event()

    async def run(self) -> int:
        """Everything from start to clean stop; the exit status."""
        self._handle_signals()
        grace_s = self._options.settings.limits.drain_timeout_s + _STOP_MARGIN_S
        supervisor = Supervisor(stop_grace_s=grace_s)
        status = 1
        try:
            status = await self._until_stopped(supervisor)
        except PrfaasError as exc:
            self._say(f"\n{exc.message}")
        finally:
            status = max(status, await self._stop_all(supervisor))
        return status

    async def _stop_all(self, supervisor: Supervisor) -> int:
        """Stop in order; 1 where a process did not end as it should."""
        self._say("\nstopping")
        try:
            statuses = await supervisor.stop_all()
        except asyncio.CancelledError:
            self._say("killed what was left")
            return 1
        failed = {name: ended for name, ended in statuses.items() if ended != 0}
        for name, ended in failed.items():
            self._say(f"{name} ended with status {ended}")
        return 1 if failed else 0

    async def _until_stopped(self, supervisor: Supervisor) -> int:
        """The work, unless a process dies (raises) or a signal comes (0) first."""
        work = asyncio.create_task(self._work(supervisor))
        watch = asyncio.create_task(supervisor.watch())
        stop = asyncio.create_task(self._stop.wait())
        tasks = {work, watch, stop}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if work.done() and work.exception() is not None:
                # Where a process died, its death says more than what it did to the work.
                await asyncio.wait({watch}, timeout=_DEATH_S)
            if watch.done():
                watch.result()
            return work.result() if work.done() else int(self._options.once)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _work(self, supervisor: Supervisor) -> int:
        await self._start(supervisor)
        problems = await self._show(supervisor)
        for problem in problems:
            self._say(f"not as it should be: {problem}")
        if self._options.once:
            return 1 if problems else 0
        self._say(
            f"\nready at {self._stack.gateway_url}, dashboard at "
            f"{self._stack.gateway_url}/dashboard; Ctrl-C stops it. Try:\n"
            f"curl -s {self._stack.gateway_url}/v1/chat/completions "
            "-H 'content-type: application/json' "
            f"""-d '{{"model": "{self._stack.plan.served_model_name}", "messages": """
            """[{"role": "user", "content": "What is a prefill?"}]}'"""
            f"\nconfiguration and logs are in {self._stack.directory}"
        )
        await asyncio.Event().wait()
        return 0

    async def _start(self, supervisor: Supervisor) -> None:
        plan = self._stack.plan
        d_core, p_core = engine_cores(plan.pin)
        pinned = f" (D on core {d_core}, P on core {p_core})" if d_core is not None else ""
        with _progress(self._console) as progress:
            progress(f"loading {plan.served_model_name} twice, at D and at P{pinned}")
            specs = self._stack.engines_and_agents(d_core=d_core, p_core=p_core)
            await supervisor.start(specs, READY_TIMEOUT_S)
            progress("starting the gateway")
            await supervisor.start((self._stack.gateway(),), READY_TIMEOUT_S)
        processes = ", ".join(f"{p.spec.name} {p.pid}" for p in supervisor.processes)
        self._say(f"running: {processes}")
        if plan.tls:
            self._say("gateway and agents speak mutual TLS, with certificates made for this run")

    async def _show(self, supervisor: Supervisor) -> list[str]:
        """The demonstration; a second gateway, with offload off, lives only as long as it does."""
        (local_port,) = free_ports(1)
        local = self._stack.gateway(
            name="gateway-local", port=local_port, settings={"offload": False}
        )
        await supervisor.start((local,), READY_TIMEOUT_S)
        d_core, p_core = engine_cores(self._stack.plan.pin)
        urls = (
            self._stack.gateway_url,
            f"http://127.0.0.1:{local_port}",
            self._stack.d_engine_url,
            self._stack.p_engine_url,
        )
        async with AsyncExitStack() as clients:
            gateway, local_gateway, d_engine, p_engine = [
                await clients.enter_async_context(OpenAIClient(url, timeout_s=_REQUEST_TIMEOUT_S))
                for url in urls
            ]
            demo = Demo(
                console=self._console,
                gateway=gateway,
                local_gateway=local_gateway,
                d_engine=d_engine,
                p_engine=p_engine,
                d_core=d_core,
                p_core=p_core,
            )
            await demo.run()
        await supervisor.stop("gateway-local")
        return demo.problems

    def _handle_signals(self) -> None:
        """The first signal stops in order, the second forces."""
        loop = asyncio.get_running_loop()
        main = asyncio.current_task()
        assert main is not None

        def on_signal() -> None:
            if self._stop.is_set():
                main.cancel()
            self._stop.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal)

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)


def _model(given: Path | None, progress: Callable[[str], None]) -> tuple[Path, str]:
    """Path and served name of the model. Raises ConfigError where there is none."""
    if given is None:
        from local_engine.demo_model import fetch_demo_model

        return fetch_demo_model(default_cache_dir(), progress), _DEMO_MODEL_NAME
    if not given.exists():
        raise ConfigError(f"--model: {given} does not exist")
    path = given.resolve()
    return path, path.stem if path.is_file() else path.name


def _gateway_port(options: UpOptions) -> int:
    """The port asked for, if it is free. Raises ConfigError."""
    if options.port is None and options.once:
        return free_ports(1)[0]
    port = DEFAULT_PORT if options.port is None else options.port
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", port))
        except OSError as exc:
            raise ConfigError(f"--port: {port} cannot be used ({exc.strerror})") from exc
        return int(sock.getsockname()[1])


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[str], None]]:
    """Lines of progress: one that changes on a terminal, one after another elsewhere."""
    if not console.is_terminal:
        yield lambda message: console.print(message, markup=False)
        return
    with console.status("") as status:
        yield status.update
