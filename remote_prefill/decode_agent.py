"""D's agent: its engine, the fetches under way, and the feed of what became of them."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from prfaas.clock import SYSTEM_CLOCK, Clock
from prfaas.codecs import agent_codecs
from prfaas.kvport import EngineConn, PortClosed, RankConn
from prfaas.placement import StagingMap
from prfaas.settings import AgentPeer, Settings
from prfaas.snapshot import PREFIX_AT_D, Outcome
from prfaas.tls_files import TlsFiles
from prfaas_connect.port.messages import (
    Abort,
    Fetch,
    FetchDone,
    KvEvents,
    PortError,
    PortMessage,
    PrefillEnd,
    Record,
    Release,
    Stats,
)
from remote_prefill.admission import Admission, Admitter
from remote_prefill.credit import CreditPool
from remote_prefill.exports import ExportHub
from remote_prefill.fetch import RETRY_AFTER_S, FetchContext, FetchJob
from remote_prefill.identity import codecs_for, tell_left_out
from remote_prefill.link_options import LinkOptions, LocalEngine
from remote_prefill.link_sampler import LinkSampler, LoopLoad
from remote_prefill.metrics import AgentMetrics
from remote_prefill.mirror import EngineMirror
from remote_prefill.numeric_probe import local_probe
from remote_prefill.peer_discovery import PeerDiscovery
from remote_prefill.peer_pool import PeerPool
from remote_prefill.spans import add_fetch
from remote_prefill.staging import StagingPool
from remote_prefill.vllm_engine import VllmEngine, vllm_beside
from remote_prefill.watch import WatchFeed

if TYPE_CHECKING:
    from prfaas.tracing import Spans

log = logging.getLogger(__name__)


class EngineSide:
    """One engine connection: its exports, staging, fetches and probe; `close` when it has ended."""

    def __init__(
        self,
        conn: EngineConn,
        max_waiting: int,
        probe_timeout_s: float,
        vllm: VllmEngine | None = None,
    ) -> None:
        self.conn = conn
        self.hub = ExportHub(conn, vllm.submitter if vllm else None)
        self._vllm = vllm
        self.staging = StagingPool(conn.staging, max_waiting)
        self.jobs: dict[str, FetchJob] = {}
        self._probe_timeout_s = probe_timeout_s
        self._probe: asyncio.Task[StagingMap] | None = None

    async def probe(self) -> StagingMap:
        """Numeric probe of this engine, computed once; tried again after a failure."""
        if self._probe is None or (self._probe.done() and self._probe.exception() is not None):
            self._probe = asyncio.create_task(
                local_probe(self.conn, self.hub, self._probe_timeout_s)
            )
        return await asyncio.shield(self._probe)

    async def close(self, reason: str) -> None:
        """Everything of this connection is void."""
        self.hub.close()
        if self._vllm is not None:
            await self._vllm.close()
        if self._probe is not None:
            self._probe.cancel()
            await asyncio.gather(self._probe, return_exceptions=True)
        await asyncio.gather(*(job.abort("failed", reason) for job in list(self.jobs.values())))


class DecodeAgent:
    """Owns the links, codec threads and fetches of a D agent; `close` ends them.

    `on_engine` runs for the life of each engine connection; a connection's end aborts its fetches.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        tls: TlsFiles | None = None,
        clock: Clock = SYSTEM_CLOCK,
        spans: Spans | None = None,
    ) -> None:
        """`spans` is borrowed; None: nothing is traced."""
        mine = settings.agent
        self.settings = mine
        self.limits = settings.limits
        self.clock = clock
        self.metrics = AgentMetrics()
        self._spans = spans
        self.codecs = agent_codecs(mine.codecs, mine.codec_calibration)
        self.draining = False
        self.side: EngineSide | None = None
        self._executor = ThreadPoolExecutor(mine.codec_threads, "codec")
        options = LinkOptions(
            mine,
            self.limits,
            self.codecs,
            self._executor,
            self.metrics,
            clock,
            CreditPool(mine.window_bytes),
            tls,
            LoopLoad(clock),
            self._free_staging,
        )
        self._discovery = PeerDiscovery(
            mine, self.limits.control_timeout_s, self._peers_changed, self.metrics
        )
        self.pool = PeerPool(self._discovery.peers, options)
        self._following: asyncio.Task[None] | None = None
        if self._discovery.follows:
            self._following = asyncio.create_task(self._discovery.run(), name="peer discovery")
        self._sampler = LinkSampler(self.pool.look)
        self.feed = WatchFeed(mine.name, self.limits, self.pool.links)
        self._mirror = EngineMirror(
            mine.name,
            self.feed,
            free_staging=self._free_staging,
        )
        keys = [key.get_secret_value().encode() for key in mine.transfer_keys]
        self._admitter = Admitter(keys, self.pool)
        self._reported: OrderedDict[str, None] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.metrics.gauges(
            sessions=lambda: self.open_fetches,
            staging_used=lambda: self.side.staging.used_bytes if self.side else 0,
            staging_waiting=lambda: self.side.staging.waiting if self.side else 0,
            ready_instances=lambda: self.pool.ready_count,
            engine_connected=lambda: self.side is not None,
        )
        self.metrics.watch_links(self.pool.links)

    def __repr__(self) -> str:
        state = "DRAINING" if self.draining else "READY" if self.side else "NO_ENGINE"
        return f"<DecodeAgent {self.settings.name} {state} fetches={self.open_fetches}>"

    @property
    def open_fetches(self) -> int:
        return len(self.side.jobs) if self.side else 0

    async def _peers_changed(self, peers: tuple[AgentPeer, ...]) -> None:
        await self.pool.change(peers)
        self._mirror.publish()

    def _free_staging(self) -> int:
        return self.side.staging.free_bytes if self.side else 0

    @property
    def serving(self) -> bool:
        """What the health service says."""
        return self.side is not None and not self.draining

    # --- engine ---

    async def on_engine(self, conn: EngineConn) -> None:
        """Serve one engine connection until it ends."""
        vllm = vllm_beside(
            self.settings, conn, on_stats=self._mirror.stats, on_events=self._mirror.kv_events,
            clock=self.clock, fetches=lambda: self.open_fetches,
        )  # fmt: skip
        side = EngineSide(
            conn, self.limits.agent_max_sessions, self.limits.first_frame_timeout_s, vllm
        )
        self.side = side
        codecs = codecs_for(self.codecs, conn.hello)
        self._mirror.connected(conn)
        self.pool.set_local(LocalEngine(conn, side.hub, side.probe, codecs))
        self._publish()
        log.info("engine connected engine=%r model=%r", conn.hello.engine, conn.hello.model)
        tell_left_out(self.codecs, conn.hello)
        try:
            if vllm is not None:
                vllm.start()
            async for message, blob in conn:
                try:
                    self._on_message(side, message, blob)
                except PortClosed:
                    break
                except PortError as exc:
                    log.error("engine broke the port protocol: %s", exc)
                    break
        finally:
            conn.close()
            self.pool.set_local(None)
            await side.close("engine_unavailable")
            if self.side is side:
                self.side = None
                self._mirror.disconnected()
                self._publish()
            log.info("engine gone engine=%r", conn.hello.engine)

    async def on_rank(self, conn: EngineConn, rank: RankConn) -> None:
        """Serve one more process of the engine until it leaves."""
        side = self.side
        if side is None or side.conn is not conn:
            return
        try:
            await side.hub.serve_rank(rank)
        except PortError as exc:
            log.error("%r broke the port protocol: %s", rank, exc)

    def _on_message(self, side: EngineSide, message: PortMessage, blob: bytes) -> None:
        if isinstance(message, Record):
            side.hub.on_record(message)
        elif isinstance(message, PrefillEnd):
            side.hub.on_end(message)
        elif isinstance(message, Stats):
            self._mirror.stats(message)
        elif isinstance(message, KvEvents):
            self._mirror.kv_events(message)
        elif isinstance(message, Fetch):
            self._on_fetch(side, message, blob)
        elif isinstance(message, Abort):
            self._later(side, message.session, lambda job: job.abort("aborted", ""))
        elif isinstance(message, Release):
            self._later(side, message.session, lambda job: job.release(message))
        else:
            raise PortError(f"{type(message).__name__} is not for an agent")

    # --- fetches ---

    def _on_fetch(self, side: EngineSide, fetch: Fetch, tokens: bytes) -> None:
        if fetch.session in side.jobs:
            raise PortError(f"fetch: session {fetch.session!r} is open already")
        _check_fetch(fetch, tokens)
        admission = self._admitter.judge(fetch.params, self.clock.wall())
        params = admission.params
        if params is not None and not admission.reason:
            if fetch.have == fetch.want:
                admission = Admission(PREFIX_AT_D, "all of the prompt is here already", params)
            elif self.draining:
                admission = Admission("draining", "this agent is draining", params)
            elif len(side.jobs) >= self.limits.agent_max_sessions:
                text = f"{len(side.jobs)} fetches are open already"
                admission = Admission("overloaded", text, params)
        if admission.reason or params is None:
            self._turn_down(side, fetch, admission)
            return
        job = FetchJob(
            fetch,
            tokens,
            params,
            admission.links,
            FetchContext(
                conn=side.conn,
                staging=side.staging,
                limits=self.limits,
                metrics=self.metrics,
                clock=self.clock,
                hold_until_sealed=self.settings.hold_until_sealed,
                codecs=codecs_for(self.codecs, side.conn.hello),
                recompute_s=self._mirror.prefill_s,
                slower_by=self.settings.slower_by,
                changed=self._mirror.publish,
                ended=lambda job, outcome: self._ended(side, job, outcome),
            ),
        )
        side.jobs[fetch.session] = job
        self.feed.start(params.transfer_id)
        job.start()
        self._publish()

    def _turn_down(self, side: EngineSide, fetch: Fetch, admission: Admission) -> None:
        """Answer a fetch for which nobody is dialled."""
        needs_p = admission.reason != PREFIX_AT_D
        status = "refused" if admission.rejects and needs_p else "local"
        log.info("fetch turned down reason=%s: %s", admission.reason, admission.message)
        side.conn.send(
            FetchDone(
                session=fetch.session,
                status=status,
                reason=admission.reason,
                retry_after_s=RETRY_AFTER_S,
                message=admission.message,
            )
        )
        params = admission.params
        if params is None or admission.replay or params.transfer_id in self.feed.active:
            self.metrics.fetches.labels(status, admission.reason).inc()
            return
        self._report(
            Outcome(
                transfer_id=params.transfer_id,
                status=status,
                reason=admission.reason,
                have_tokens=fetch.have,
                want_tokens=fetch.want,
            )
        )

    def _later(
        self, side: EngineSide, session: str, act: Callable[[FetchJob], Coroutine[Any, Any, None]]
    ) -> None:
        """Run what ends a fetch; one that has ended already needs nothing."""
        job = side.jobs.get(session)
        if job is not None:
            task = asyncio.create_task(act(job))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _ended(self, side: EngineSide, job: FetchJob, outcome: Outcome) -> None:
        side.jobs.pop(job.fetch.session, None)
        if outcome.quality:
            self.metrics.quality_fetches.labels(job.params.quality, outcome.quality).inc()
        for phase, seconds in outcome.phases.items():
            self.metrics.phase_seconds.labels(phase).observe(seconds)
        if self._spans is not None and job.parent is not None and job.span is not None:
            took_s = outcome.phases.get("total", 0.0)
            add_fetch(self._spans, job.span, job.parent.span_id, outcome, took_s, self.clock)
        log.info("fetch ended %r status=%s reason=%s", job, outcome.status, outcome.reason or "-")
        self._report(outcome)
        self._publish()

    def _report(self, outcome: Outcome) -> None:
        """Into the feed, each transfer id once."""
        self.metrics.fetches.labels(outcome.status, outcome.reason).inc()
        if outcome.transfer_id in self._reported:
            return
        self._reported[outcome.transfer_id] = None
        if len(self._reported) > self.limits.outcome_history:
            self._reported.popitem(last=False)
        self.feed.finish(outcome)

    # --- end of the process ---

    def drain(self) -> None:
        """Turn down new fetches from now on."""
        self.draining = True
        self._mirror.drain()

    async def wait_idle(self) -> None:
        """Until no fetch is open."""
        await self._idle.wait()

    async def close(self) -> None:
        """End links and threads, once the port has closed."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._sampler.close()
        await self.pool.close()
        self._executor.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._executor.shutdown)

    def _publish(self) -> None:
        if self.open_fetches:
            self._idle.clear()
        else:
            self._idle.set()
        self._mirror.publish()


def _check_fetch(fetch: Fetch, tokens: bytes) -> None:
    """Raises PortError: the engine contradicts itself."""
    if len(tokens) != 4 * (fetch.want + 1):
        raise PortError(f"fetch: {len(tokens)} bytes of tokens, want is {fetch.want}")
    if not 0 <= fetch.have <= fetch.want:
        raise PortError(f"fetch: have {fetch.have} is above want {fetch.want}")
    if fetch.uncached != fetch.want - fetch.have:
        raise PortError(f"fetch: uncached {fetch.uncached} is not want less have")
