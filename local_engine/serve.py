"""The process `prfaas engine`: loads, serves, drains, stops."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

from aiohttp import web

from local_engine.assemble import Assembled, assemble
from local_engine.http.app import build_app
from local_engine.http.state import ServerState, Serving
from local_engine.metrics import EngineMetrics
from prfaas.clock import Deadline
from prfaas.errors import ConfigError
from prfaas.http_log import server_logger
from prfaas.settings import EngineSettings, Settings
from prfaas.tracing_on import open_spans

if TYPE_CHECKING:
    from prfaas.tracing import Spans

log = logging.getLogger(__name__)

T = TypeVar("T")

KEEP_ALIVE_S = 75.0
"""Longer than a gateway keeps an idle connection, so that it never sends into a closing one."""
CLOSE_TIMEOUT_S = 2.0
"""For handlers to write their last error once the engine has ended their requests."""


async def serve(settings: Settings, ready: Callable[[int], None] | None = None) -> None:
    """Serve until SIGTERM or SIGINT, then drain; a second signal ends what still runs.

    Listens at once and answers 503 while the model loads. `ready` gets the port when requests are
    welcome. Raises ConfigError, with the port closed again.
    """
    state = ServerState(settings.limits)
    spans = open_spans(settings.tracing, "engine")
    try:
        with _signals() as signals:
            async with _listening(state, settings.engine, spans) as port:
                load = _in_thread(lambda: _load(settings), lambda late: late.engine.close())
                assembled = await _unless(signals.stop, load)
                if assembled is None:
                    return
                try:
                    state.become_ready(_serving(assembled))
                    print(_ready_line(assembled, settings.engine.host, port), flush=True)
                    if ready is not None:
                        ready(port)
                    await signals.stop.wait()
                    await _drain(assembled, state, signals)
                finally:
                    await asyncio.to_thread(assembled.engine.close)
    finally:
        state.close()
        if spans is not None:
            await asyncio.to_thread(spans.close)


def _load(settings: Settings) -> Assembled:
    assembled = assemble(settings)
    try:
        assembled.engine.start()
    except BaseException:
        assembled.engine.close()
        raise
    return assembled


def _serving(assembled: Assembled) -> Serving:
    what = f"paced-{assembled.paced}" if assembled.paced else assembled.model_identity[:12]
    return Serving(
        engine=assembled.engine,
        tokenizer=assembled.tokenizer,
        metrics=EngineMetrics(
            assembled.model_name,
            assembled.engine.stats,
            version=assembled.engine_version,
            paced=assembled.paced,
            late_s=assembled.late_s,
        ),
        model_name=assembled.model_name,
        max_context=assembled.max_context,
        vocab_size=assembled.vocab_size,
        system_fingerprint=f"prfaas-{assembled.engine_version}-{what}",
        created=int(time.time()),
        paced=assembled.paced,
    )


def _ready_line(assembled: Assembled, host: str, port: int) -> str:
    settings = assembled.settings
    compute = f"paced by {assembled.paced}" if assembled.paced else settings.dtype
    return (
        f"prfaas engine: {assembled.model_name} on http://{host}:{port} "
        f"({compute}, {settings.device}, KV {settings.kv_dtype}, "
        f"{assembled.kv_tokens} tokens in blocks of {settings.block_tokens})"
    )


async def _drain(assembled: Assembled, state: ServerState, signals: _Signals) -> None:
    """Finish what runs within the limit, or until the next signal."""
    state.become_draining()
    stats = assembled.engine.stats()
    log.info("draining: %d running, %d waiting", stats.running, stats.waiting)
    deadline = Deadline.after(state.limits.drain_timeout_s)
    if not await _unless(signals.force, asyncio.ensure_future(assembled.engine.drain(deadline))):
        log.warning("requests that still ran were cancelled")


@contextlib.asynccontextmanager
async def _listening(
    state: ServerState, settings: EngineSettings, spans: Spans | None
) -> AsyncIterator[int]:
    """The HTTP server; yields its port. Raises ConfigError when the address cannot be had."""
    app = build_app(state, debug_endpoints=settings.debug_endpoints, spans=spans)
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        logger=server_logger(),
        keepalive_timeout=KEEP_ALIVE_S,
        shutdown_timeout=CLOSE_TIMEOUT_S,
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, settings.host, settings.port)
        try:
            await site.start()
        except OSError as error:
            raise ConfigError(
                f"engine.port: cannot listen on {settings.host}:{settings.port}: {error.strerror}",
                field="port",
            ) from error
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()


class _Signals:
    """The first SIGTERM or SIGINT sets `stop`, the second `force`."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.force = asyncio.Event()

    def received(self) -> None:
        (self.force if self.stop.is_set() else self.stop).set()


@contextlib.contextmanager
def _signals() -> Iterator[_Signals]:
    signals = _Signals()
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, signals.received)
    try:
        yield signals
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


async def _unless(event: asyncio.Event, work: asyncio.Future[T]) -> T | None:
    """The result of `work`, or None if the event comes first; `work` is cancelled then."""
    interrupted = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait((interrupted, work), return_when=asyncio.FIRST_COMPLETED)
        return await work if work.done() else None
    finally:
        interrupted.cancel()
        if not work.done():
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)


def _in_thread(work: Callable[[], T], discard: Callable[[T], None]) -> asyncio.Future[T]:
    """Run `work` in a thread that does not keep the process alive: loading cannot be stopped.

    A result that nobody waits for any more goes to `discard`.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            if outcome.set_running_or_notify_cancel():
                outcome.set_exception(error)
        else:
            if outcome.set_running_or_notify_cancel():
                outcome.set_result(result)
            else:
                discard(result)

    threading.Thread(target=run, name="load", daemon=True).start()
    return asyncio.wrap_future(outcome)
