"""P's agent: its engine, its retention and the sessions it serves; no gRPC in here."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from prfaas.clock import SYSTEM_CLOCK, Clock
from prfaas.codecs import Quality, agent_codecs
from prfaas.errors import (
    Cancelled,
    ContextTooLong,
    EngineUnavailable,
    InvalidRequest,
    Overloaded,
    PeerUnavailable,
    SessionLost,
    UnknownModel,
)
from prfaas.frames import Frame
from prfaas.kvport import EngineConn, PortClosed, RankConn
from prfaas.limits import Limits
from prfaas.rpc import convert
from prfaas.send_session import SendSession, SendState
from prfaas.session_messages import Handshake, SessionOpen
from prfaas.settings import PrefillSettings
from prfaas.telemetry import LinkInfo
from prfaas.trace_context import parse_traceparent
from prfaas_connect.port.messages import (
    Abort,
    Fetch,
    FetchDone,
    KvEvents,
    PortError,
    PrefillEnd,
    Record,
    Release,
    Stats,
)
from remote_prefill.access import Access, Client
from remote_prefill.codec_choice import CodecChoice, EncodePaces
from remote_prefill.engine_source import EngineSource
from remote_prefill.exports import ExportHub
from remote_prefill.identity import codecs_for, handshake_of, tell_left_out
from remote_prefill.link_sampler import LinkSampler
from remote_prefill.metrics import PrefillMetrics
from remote_prefill.mirror import EngineMirror
from remote_prefill.numeric_probe import is_probe
from remote_prefill.retention import RetentionPool
from remote_prefill.sender import Sender, SenderOptions
from remote_prefill.served_link import LinkTable
from remote_prefill.served_session import ServedSession
from remote_prefill.spans import add_session
from remote_prefill.vllm_engine import vllm_beside
from remote_prefill.watch import WatchFeed

if TYPE_CHECKING:
    from prfaas.tracing import Spans

log = logging.getLogger(__name__)

RETRY_AFTER_S = 1.0
STOP_TIMEOUT_S = 2.0
STATS_TO_SHOW = 2


class PrefillAgent:
    """Owns sessions, retention, codec threads and the task that looks at the links; `close` ends
    them. Needs a running loop.

    `on_engine` runs for the life of each engine connection; a connection's end fails its sessions.
    """

    def __init__(
        self,
        settings: PrefillSettings,
        limits: Limits,
        *,
        clock: Clock = SYSTEM_CLOCK,
        spans: Spans | None = None,
    ) -> None:
        """`spans` is borrowed; None: nothing is traced."""
        self._spans = spans
        self.settings = settings
        self.limits = limits
        self.clock = clock
        self.metrics = PrefillMetrics()
        self.feed = WatchFeed(f"{settings.peer}/{settings.instance}", limits, self._links)
        self.codecs = agent_codecs(settings.codecs, settings.codec_calibration, settings.zstd_level)
        self._paces = EncodePaces(clock, settings.codec_threads, self.metrics.encoded)
        self.draining = False
        self.access = Access(settings, limits)
        self.links = LinkTable(clock)
        self._sampler = LinkSampler(self.links.look)
        self.sessions: dict[tuple[str, int], ServedSession] = {}
        """By the client's identity and its number, so that nobody meets another's session."""
        self.retention = RetentionPool(settings.retention_bytes, limits.prefill_queue_sessions)
        self._executor = ThreadPoolExecutor(settings.codec_threads, "codec")
        self._mirror = EngineMirror(
            settings.instance,
            self.feed,
            free_retention=lambda: self.retention.free_bytes,
            queued=self._queued,
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._conn: EngineConn | None = None
        self._hub: ExportHub | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._publish()
        self.metrics.gauges(
            sessions=lambda: len(self.sessions),
            queued=lambda: self.retention.waiting,
            retention_used=lambda: self.retention.used_bytes,
            ring_records=lambda: self._hub.unfreed_records if self._hub else 0,
            engine_connected=lambda: self._conn is not None,
        )
        self.metrics.watch_links(self._links)

    def __repr__(self) -> str:
        state = "DRAINING" if self.draining else "READY" if self._conn else "NO_ENGINE"
        return f"<PrefillAgent {self.feed.agent} {state} sessions={len(self.sessions)}>"

    # --- engine ---

    async def on_engine(self, conn: EngineConn) -> None:
        """Serve one engine connection until it ends."""
        vllm = vllm_beside(
            self.settings, conn, on_stats=self._on_stats, on_events=self._on_events,
            clock=self.clock,
        )  # fmt: skip
        hub = ExportHub(conn, vllm.submitter if vllm else None)
        self._conn, self._hub = conn, hub
        self._mirror.connected(conn)
        log.info("engine connected engine=%r model=%r", conn.hello.engine, conn.hello.model)
        tell_left_out(self.codecs, conn.hello)
        try:
            if vllm is not None:
                vllm.start()
            async for message, _ in conn:
                try:
                    self._on_message(conn, hub, message)
                except PortClosed:
                    break
        finally:
            conn.close()
            hub.close()
            if vllm is not None:
                await vllm.close()
            if self._conn is conn:
                self._conn = self._hub = None
                self._mirror.disconnected()
            log.info("engine gone engine=%r", conn.hello.engine)

    async def on_rank(self, conn: EngineConn, rank: RankConn) -> None:
        """Serve one more process of the engine until it leaves."""
        hub = self._hub
        if hub is None or self._conn is not conn:
            return
        try:
            await hub.serve_rank(rank)
        except PortError as exc:
            log.error("%r broke the port protocol: %s", rank, exc)

    def _on_message(self, conn: EngineConn, hub: ExportHub, message: object) -> None:
        try:
            if isinstance(message, Record):
                hub.on_record(message)
            elif isinstance(message, PrefillEnd):
                hub.on_end(message)
            elif isinstance(message, Stats):
                self._on_stats(message)
            elif isinstance(message, KvEvents):
                self._on_events(message)
            elif isinstance(message, Fetch):
                conn.send(FetchDone(message.session, "local", "not_a_decode_agent"))
            elif not isinstance(message, Abort | Release):
                raise PortError(f"{type(message).__name__} is not for an agent")
        except PortError as exc:
            log.error("engine broke the port protocol: %s", exc)
            conn.close()

    def _on_stats(self, stats: Stats | None) -> None:
        self._mirror.stats(stats)
        self._announce()

    def _on_events(self, events: KvEvents) -> None:
        self._mirror.kv_events(events)

    @property
    def engine(self) -> EngineConn | None:
        """The connected engine, if it can prefill."""
        conn = self._conn
        return conn if conn is not None and "prefill" in conn.hello.roles else None

    @property
    def serving(self) -> bool:
        """What the health service says."""
        return self.engine is not None and not self.draining

    def require_engine(self) -> tuple[EngineConn, ExportHub]:
        """Raises EngineUnavailable, or PeerUnavailable while draining."""
        if self.draining:
            raise PeerUnavailable(f"{self.feed.agent} is draining", retry_after_s=RETRY_AFTER_S)
        conn, hub = self.engine, self._hub
        if conn is None or hub is None:
            text = "no engine is connected" if self._conn is None else "its engine has no prefill"
            raise EngineUnavailable(f"{self.feed.agent}: {text}", retry_after_s=RETRY_AFTER_S)
        return conn, hub

    def handshake(self, theirs: Handshake, client: Client) -> Handshake:
        """Our side, with the link to use. Raises IncompatibleLayout naming the field, Forbidden,
        EngineUnavailable, Overloaded.
        """
        conn, _ = self.require_engine()
        client.require_model(conn.hello.model)
        codecs = codecs_for(self.codecs, conn.hello)
        mine = handshake_of(
            self.feed.agent, conn.hello, conn.layout, codecs, self.settings.instance
        )
        mine.require_compatible(theirs)
        codecs.negotiate(theirs.codecs)
        link = self.links.open(client.identity, theirs.name, theirs.link)
        return replace(mine, link=link.token)

    # --- sessions ---

    def admit(self, frame: Frame, client: Client) -> ServedSession:
        """Check OPEN, reserve retention or join its queue, and start; the session ends by itself.

        Raises what the other side has to be told. Nothing is kept of a refused session.
        """
        request = convert.open_from_bytes(frame.payload)
        conn, hub = self.require_engine()
        client.require_model(conn.hello.model)
        if not is_probe(request, conn.hello):
            client.require_tenant(request.tenant)
        link = self.links.find(request.link, client.identity)
        key = (client.identity, frame.session)
        if key in self.sessions:
            raise InvalidRequest(f"session {frame.session:x} is open already", param="session")
        if len(self.sessions) >= self.limits.agent_max_sessions:
            raise Overloaded(
                f"{len(self.sessions)} sessions are open already", retry_after_s=RETRY_AFTER_S
            )
        its_own = sum(identity == client.identity for identity, _ in self.sessions)
        if its_own >= client.max_sessions:
            raise Overloaded(
                f"{its_own} sessions of {client.identity} are open already",
                retry_after_s=RETRY_AFTER_S,
            )
        quality = _check_open(request, conn, self.limits)
        codecs = codecs_for(self.codecs, conn.hello)
        codecs.negotiate(request.codecs, quality)
        machine = SendSession(
            session=frame.session,
            epoch=frame.epoch,
            request=request,
            layout=conn.layout,
            chunk_tokens=conn.hello.chunk_tokens,
        )
        nbytes = conn.layout.session_bytes(request.send_from, request.token_count)
        ticket = self.retention.request(nbytes, retry_after_s=RETRY_AFTER_S)
        served = ServedSession(
            machine,
            client,
            ticket,
            hub,
            link,
            lease_s=min(request.lease_s, self.limits.lease_s),
            limit_s=min(request.deadline_s, self.limits.transfer_timeout_s),
            clock=self.clock,
        )
        self.sessions[key] = served
        choice = CodecChoice(
            codecs.common(request.codecs, quality), self._paces, lambda: link.bytes_per_s
        )
        task = asyncio.create_task(self._serve(served, choice), name=f"session {frame.session:x}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._publish()
        return served

    def resume(self, frame: Frame, client: Client) -> ServedSession:
        """The session that RESUME goes on with. Raises SessionLost."""
        resume = convert.resume_from_bytes(frame.payload)
        link = self.links.find(resume.link, client.identity)
        served = self.sessions.get((client.identity, frame.session))
        if served is None or served.link is not link or served.machine.epoch != frame.epoch:
            raise SessionLost(f"session {frame.session:x} is not open here")
        served.heard(frame)
        served.resumes += 1
        self.metrics.resumes.inc()
        return served

    async def _serve(self, served: ServedSession, choice: CodecChoice) -> None:
        machine = served.machine
        sender = Sender(
            machine,
            ticket=served.ticket,
            start=partial(EngineSource.start, served.hub, machine.request, machine.epoch),
            gone=served.hub.closed,
            choice=choice,
            executor=self._executor,
            tell=served.tell,
            ready=served.link.wake,
            options=SenderOptions(
                min(1.0, self.limits.progress_timeout_s / 3), served.lease_s, self.clock
            ),
        )
        reason = "cancelled"
        try:
            reason = await served.run(sender)
        finally:
            self._end(served, reason)

    def _end(self, served: ServedSession, reason: str) -> None:
        """Count how a session has ended (`reason`: error kind or empty)."""
        machine, client = served.machine, served.client
        self.sessions.pop((client.identity, machine.session), None)
        self.feed.leave(machine.request.transfer_id)
        owner = (client.identity, client.counted_tenant(machine.request.tenant))
        self.metrics.client_sessions.labels(*owner, machine.state.value).inc()
        self.metrics.client_wire_bytes.labels(*owner).inc(machine.wire_bytes)
        self.metrics.sessions.labels(machine.state.value, reason).inc()
        self.metrics.quality_sessions.labels(machine.request.quality).inc()
        self.metrics.wire_bytes.inc(machine.wire_bytes)
        self.metrics.resent_bytes.inc(machine.resent_bytes)
        if machine.state is SendState.COMPLETE:
            self.metrics.raw_bytes.inc(machine.ledger.raw_bytes)
        self.metrics.session_seconds.observe(self.clock.now() - served.opened_s)
        parent = parse_traceparent(machine.request.traceparent)
        if self._spans is not None and parent is not None:
            add_session(
                self._spans,
                parent,
                transfer_id=machine.request.transfer_id,
                client=client.identity,
                state=machine.state.value,
                reason=reason,
                tokens=machine.request.token_count,
                wire_bytes=machine.wire_bytes,
                took_s=self.clock.now() - served.opened_s,
                clock=self.clock,
            )
        self._publish()
        log.info("session ended %r reason=%s", machine, reason or "none")

    def cancel(self, session: int, client: Client) -> bool:
        """End a session of this client by number; False where it has none of it."""
        served = self.sessions.get((client.identity, session))
        if served is None:
            return False
        served.stop(Cancelled("the other side has cancelled"))
        return True

    # --- end of the process ---

    def drain(self) -> None:
        """Refuse new sessions from now on."""
        self.draining = True
        self._mirror.drain()

    async def wait_idle(self) -> None:
        """Until no session is open."""
        await self._idle.wait()

    async def stop_sessions(self) -> None:
        """End all sessions with an error that sends their other side elsewhere."""
        for served in list(self.sessions.values()):
            served.stop(PeerUnavailable(f"{self.feed.agent} is shutting down"))
        try:
            await asyncio.wait_for(self.wait_idle(), STOP_TIMEOUT_S)
        except TimeoutError:
            log.warning("%d sessions did not stop in time", len(self.sessions))

    async def close(self) -> None:
        """End sessions that are still there, and the codec threads."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._sampler.close()
        self._executor.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._executor.shutdown)

    def _links(self) -> tuple[LinkInfo, ...]:
        """This end's view of the links, for gateways and metrics."""
        return self.links.infos(self.settings.peer, self.settings.instance)

    def _queued(self) -> tuple[int, int]:
        waiting = [served.machine.request for served in self.sessions.values() if served.waits]
        return sum(request.token_count for request in waiting), len(waiting)

    def _announce(self) -> None:
        """Name the transfers that the load now includes, so that no gateway counts them twice.

        The first Stats after a start may have been on its way before it; the second was not.
        """
        for served in self.sessions.values():
            if served.waits or served.stats_since_start >= STATS_TO_SHOW:
                continue
            served.stats_since_start += 1
            if served.stats_since_start == STATS_TO_SHOW:
                self.feed.start(served.machine.request.transfer_id)

    def _publish(self) -> None:
        if self.sessions:
            self._idle.clear()
        else:
            self._idle.set()
        self._mirror.publish()


def _check_open(request: SessionOpen, conn: EngineConn, limits: Limits) -> Quality:
    """Its quality class."""
    hello = conn.hello
    if request.engine_epoch != hello.epoch:
        raise EngineUnavailable(
            "the prefill engine has restarted since the handshake", field="engine_epoch"
        )
    if request.model != hello.model:
        raise UnknownModel(f"model {request.model!r} is not {hello.model!r}", param="model")
    if request.quality not in list(Quality):
        raise InvalidRequest(
            f"quality {request.quality!r} is not one of {[str(q) for q in Quality]}",
            param="quality",
        )
    if request.deadline_s <= 0 or request.lease_s <= 0:
        raise InvalidRequest("deadline_s and lease_s must be positive", param="deadline_s")
    if not request.tokens or len(request.tokens) % 4:
        raise InvalidRequest(
            f"tokens: {len(request.tokens)} bytes are not a list of int32 ids", param="tokens"
        )
    longest = min(hello.max_tokens, limits.max_prompt_tokens)
    if request.token_count > longest:
        raise ContextTooLong(
            f"{request.token_count} tokens are more than the {longest} that fit", param="tokens"
        )
    if request.send_from >= request.token_count:
        raise InvalidRequest(
            f"send_from {request.send_from} is not below {request.token_count}", param="send_from"
        )
    ids = np.frombuffer(request.tokens, dtype="<i4")
    wrong = ids[(ids < 0) | (ids >= hello.vocab_size)]
    if wrong.size:
        raise InvalidRequest(
            f"token {int(wrong[0])} is not in the vocabulary of {hello.vocab_size}", param="tokens"
        )
    return Quality(request.quality)
