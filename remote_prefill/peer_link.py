"""One prefill instance as D's agent sees it: pairing, probes, measurements, sessions."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import random
import secrets
from collections.abc import Callable
from dataclasses import replace

from prfaas.clock import Deadline
from prfaas.dialling import Endpoint, checked_endpoint
from prfaas.errors import EngineUnavailable, PeerUnavailable, PrefillTimeout, PrfaasError
from prfaas.placement import StagingMap
from prfaas.session_messages import Handshake, SessionOpen
from prfaas.settings import AgentPeer, InstanceAddress
from prfaas.telemetry import LinkInfo
from remote_prefill.identity import handshake_of
from remote_prefill.lanes import LaneEvents
from remote_prefill.link_meter import LinkMeter
from remote_prefill.link_options import LinkOptions, LocalEngine
from remote_prefill.numeric_probe import compare, probe_map, probe_tokens
from remote_prefill.peer_channels import PeerChannels
from remote_prefill.peer_sessions import PeerSessions
from remote_prefill.receiver import OwnMemory, Receiver, Target

log = logging.getLogger(__name__)

RETRY_FIRST_S = 0.1
RETRY_MOST_S = 5.0
PAIRING_PINGS = 3
NO_ENGINE = "no engine is connected here"


class PeerState(enum.StrEnum):
    """How far the pairing with an instance is."""

    NO_ENGINE = "no_engine"
    """This side has no engine to pair."""
    PAIRING = "pairing"
    READY = "ready"
    DOWN = "down"
    """Failed; tried again after a pause."""


class PeerLink:
    """Owns the channels to one instance and the task that pairs and watches it; `close` ends both.

    Not ready before handshake and numeric probe have passed for the two engines now connected.
    """

    def __init__(self, peer: AgentPeer, instance: InstanceAddress, options: LinkOptions) -> None:
        self.peer = peer.name
        self.instance = instance.name
        self.name = f"{peer.name}/{instance.name}"
        self.state = PeerState.NO_ENGINE
        self.detail = NO_ENGINE
        self.remote: Handshake | None = None
        self.meter = LinkMeter(options.clock, options.load)
        self._link_class = peer.link_class
        self._options = options
        endpoint = endpoint_of(peer, instance, options)
        self._channels = PeerChannels(
            self.name,
            endpoint,
            peer.channels,
            options.limits,
            options.clock,
            LaneEvents(
                frames=lambda frames, nbytes: self.sessions.on_frames(frames, nbytes),
                lost=lambda: self.sessions.on_lane_lost(),
                refused=self.suspect,
                opened=options.metrics.lanes_opened.labels(peer.name, instance.name).inc,
            ),
        )
        self.sessions = PeerSessions(peer.name, instance.name, self._channels, self.meter, options)
        self._link_lost = False
        """The other side has forgotten the link: shake hands anew."""
        self._silent = False
        """A transfer had stopped: look whether every channel answers."""
        self._ready = asyncio.Event()
        self._local: LocalEngine | None = None
        self._changed = asyncio.Event()
        self._random = random.Random()
        self._task = asyncio.create_task(self._run(), name=f"link {self.name}")

    def __repr__(self) -> str:
        rate = self.meter.goodput_bytes_per_s * 8 / 1e6
        return (
            f"<Peer {self.name} {self.state.name} sessions={len(self.sessions)} "
            f"goodput={rate:.1f}Mb/s rtt={self.meter.rtt_s * 1e3:.1f}ms>"
        )

    @property
    def ready(self) -> bool:
        return self.state is PeerState.READY

    @property
    def open_streams(self) -> int:
        """Control streams, those of sessions that have ended included."""
        return self._channels.streams + self.sessions.closing

    def info(self) -> LinkInfo:
        """As the Watch feed shows it; ages are those of this moment."""
        meter = self.meter
        remaining = sum(
            book.layout.extent_bytes(book.start, book.end, book.chunk_tokens) - book.raw_bytes
            for book in (session.ledger for session in self.sessions)
        )
        return LinkInfo(
            peer=self.peer,
            instance=self.instance,
            link_class=self._link_class,
            ready=self.ready,
            detail=self.detail,
            goodput_bytes_per_s=meter.goodput_bytes_per_s,
            rtt_s=meter.rtt_s,
            in_flight_bytes=int(remaining / meter.wire_ratio),
            wire_ratio=meter.wire_ratio,
            age_s=meter.age_s,
            sessions=len(self.sessions),
            goodput_age_s=meter.goodput_age_s,
            limit=meter.limit,
            rate_bytes_per_s=meter.rate_bytes_per_s,
            queueing_s=meter.queueing_s,
            stalled_s=meter.stalled_s,
            stalls=meter.stalls,
            held_bytes=meter.held_bytes,
            free_staging_bytes=self._options.free_staging(),
        )

    async def close(self) -> None:
        """End pairing and every channel; sessions must have ended before."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._set(PeerState.DOWN, "it is not dialled any more")
        await self.sessions.close()
        await self._channels.close()

    def set_local(self, local: LocalEngine | None) -> None:
        """Another engine here, or none: the pair has to be made anew."""
        self._local = local
        if local is None:
            self._set(PeerState.NO_ENGINE, NO_ENGINE)
        else:
            self._set(PeerState.PAIRING, "pairing")
        self._changed.set()

    def suspect(self, error: PrfaasError) -> None:
        """A session failed in a way that may mean that the instance is gone or has changed."""
        if isinstance(error, PrefillTimeout) and error.phase == "progress":
            self._silent = True
            self._changed.set()
        if isinstance(error, PeerUnavailable | EngineUnavailable):
            # While it pairs anew, those that lost the link of before may only now say so.
            if error.field == "link" and self.ready:
                self._link_lost = True
                # No session is opened with a token that nobody knows.
                self._set(PeerState.PAIRING, f"{self.name}: it has restarted")
            self._changed.set()

    async def wait_ready(self, limit_s: float) -> None:
        """Until the pair is ready, for so long at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._ready.wait()

    def require_ready(self) -> Handshake:
        """The other side's handshake. Raises PeerUnavailable with what is in the way."""
        if not self.ready or self.remote is None:
            raise PeerUnavailable(f"{self.name}: {self.detail or self.state.value}")
        return self.remote

    async def fetch(
        self,
        request: SessionOpen,
        *,
        session: int,
        epoch: int,
        staging: StagingMap,
        target: Target,
        deadline: Deadline,
        watch: Callable[[Receiver], None],
    ) -> None:
        """One session at this instance; `watch` gets its receiver before it starts.

        Raises PrfaasError; what came by then is in the receiver's ledger.
        """
        remote = self.require_ready()
        await self.sessions.receive(
            request,
            remote,
            session=session,
            epoch=epoch,
            layout=staging.layout,
            sink=staging,
            target=target,
            deadline=deadline,
            watch=watch,
        )

    # --- pairing ---

    async def _run(self) -> None:
        """Pair, watch, and begin again when anything changes."""
        pause_s = RETRY_FIRST_S
        while True:
            local = self._local
            self._changed.clear()
            if local is None:
                self._set(PeerState.NO_ENGINE, NO_ENGINE)
                await self._changed.wait()
                continue
            try:
                await self._pair(local)
                pause_s = RETRY_FIRST_S
                await self._stay(local)
            except Exception as exc:
                if self._local is not local:
                    continue
                if not isinstance(exc, PrfaasError):
                    log.exception("pairing with %s", self.name)
                    exc = PrfaasError(f"{self.name}: internal error: {exc!r}")
                self._failed(exc)
                if isinstance(exc, PrefillTimeout):
                    self._channels.distrust()
                await self._pause(pause_s)
                pause_s = min(pause_s * 2, RETRY_MOST_S)

    async def _pair(self, local: LocalEngine) -> None:
        """Connect, handshake, ping, numeric probe, burst. Raises PrfaasError."""
        options = self._options
        self.meter.reset_clock()
        mine = handshake_of(
            options.settings.name, local.conn.hello, local.conn.layout, local.codecs
        )
        if self.state is not PeerState.DOWN:
            self._set(PeerState.PAIRING, "pairing")
        await self._channels.connect()
        mine = replace(mine, link=self._channels.token)
        remote = await self._channels.handshake(mine)
        self._link_lost = False
        mine.require_compatible(remote)
        local.codecs.negotiate(remote.codecs)
        await self._channels.attach(remote.link)
        for _ in range(PAIRING_PINGS):
            await self._channels.ping(self.meter)
        worst = await self._numeric_probe(local, remote)
        if options.settings.probe_bytes:
            await self._channels.burst(options.settings.probe_bytes, self.meter)
        if self._local is not local:
            raise EngineUnavailable("the engine here has changed while pairing")
        self.remote = remote
        options.metrics.pairings.labels(self.peer, self.instance, "ok").inc()
        self._set(PeerState.READY, "")
        log.info("paired %r probe_error=%.3g", self, worst)

    async def _numeric_probe(self, local: LocalEngine, remote: Handshake) -> float:
        """Largest error between the two engines. Raises IncompatibleLayout over the tolerance."""
        options, hello = self._options, local.conn.hello
        ours = await local.probe()
        tokens = probe_tokens(hello.vocab_size, hello.max_tokens)
        theirs = probe_map(local.conn.layout, len(tokens))
        request = SessionOpen(
            transfer_id=f"probe-{secrets.token_hex(8)}",
            model=remote.model,
            tokens=tokens.astype("<i4").tobytes(),
            send_from=0,
            salt="",
            use_cache=False,
            quality="exact",
            codecs=local.codecs.names,
            deadline_s=options.limits.first_frame_timeout_s,
            lease_s=options.limits.lease_s,
            engine_epoch=remote.engine_epoch,
        )
        await self.sessions.receive(
            request,
            remote,
            session=new_session_id(),
            epoch=1,
            layout=theirs.layout,
            sink=theirs,
            target=OwnMemory(),
            deadline=Deadline.after(request.deadline_s, options.clock),
            watch=lambda receiver: None,
        )
        return compare(ours, theirs, options.settings.probe_tolerance)

    async def _stay(self, local: LocalEngine) -> None:
        """Ping, and measure while idle, until something changes. Raises PrfaasError."""
        options, meter = self._options, self.meter
        interval_s = options.limits.watch_stale_s / 4
        while self._local is local:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await self._changed.wait()
            self._changed.clear()
            if self._link_lost:
                raise PeerUnavailable(f"{self.name}: it has restarted")
            if self._silent:
                self._silent = False
                await self._channels.check(meter)
            await self._channels.renew()
            epoch = await self._channels.ping(meter)
            if self.remote is None or epoch != self.remote.engine_epoch:
                what = "has restarted" if epoch else "is gone"
                raise EngineUnavailable(f"{self.name}: its engine {what}")
            quiet = meter.goodput_age_s > options.settings.probe_interval_s
            if quiet and not len(self.sessions) and options.settings.probe_bytes:
                await self._channels.burst(options.settings.probe_bytes, meter)

    def _failed(self, error: PrfaasError) -> None:
        if (self.state, self.detail) != (PeerState.DOWN, error.message):
            log.warning("peer %s is down kind=%s: %s", self.name, error.kind, error.message)
        self._options.metrics.pairings.labels(self.peer, self.instance, error.kind).inc()
        self._set(PeerState.DOWN, error.message)

    async def _pause(self, pause_s: float) -> None:
        """Wait before the next try, spread so that many agents do not come at once; a change here
        ends the wait.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s * self._random.uniform(0.5, 1.0)):
                await self._changed.wait()

    def _set(self, state: PeerState, detail: str) -> None:
        self.state, self.detail = state, detail
        if state is PeerState.READY:
            self._ready.set()
        else:
            self._ready.clear()
            self.remote = None


def endpoint_of(peer: AgentPeer, instance: InstanceAddress, options: LinkOptions) -> Endpoint:
    """Where it is dialled. Raises ConfigError where that must not be."""
    key = f"agent.peers {peer.name}/{instance.name}"
    return checked_endpoint(instance.address, options.tls, instance.tls_name, key)


def new_session_id() -> int:
    """A session number that nobody guesses."""
    return secrets.randbits(64)
