"""One session P serves, from its admission to its end, whatever becomes of its control streams."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from prfaas.clock import Clock
from prfaas.errors import Cancelled, PrefillTimeout, PrfaasError, ProtocolError
from prfaas.frames import Frame, FrameType, parse_all
from prfaas.rpc import convert
from prfaas.send_session import SendSession, SendState
from remote_prefill.access import Client
from remote_prefill.exports import ExportHub
from remote_prefill.retention import Ticket
from remote_prefill.sender import Sender
from remote_prefill.served_link import ServedLink
from remote_prefill.streams import ControlStream

log = logging.getLogger(__name__)

LAST_WRITE_S = 1.0
LAST_FRAMES_S = 1.0
"""After an error so long for the last frames to leave."""


class ServedSession:
    """Owns the session's machine, ticket and place on the link until `run` has ended.

    Control streams come and go: `attend` serves one. Without any the session goes on until its
    lease ends.
    """

    def __init__(
        self,
        machine: SendSession,
        client: Client,
        ticket: Ticket,
        hub: ExportHub,
        link: ServedLink,
        *,
        lease_s: float,
        limit_s: float,
        clock: Clock,
    ) -> None:
        self.machine = machine
        self.client = client
        self.ticket = ticket
        self.hub = hub
        self.link = link
        self.lease_s = lease_s
        self.opened_s = self.heard_s = clock.now()
        self.resumes = 0
        self.stats_since_start = 0
        self._limit_s = limit_s
        self._clock = clock
        self._raw_bytes = ticket.nbytes
        self._stop_error: PrfaasError | None = None
        self._changed = asyncio.Event()
        self._told: dict[FrameType, Frame] = {}
        self._outgoing: asyncio.Queue[Frame | None] | None = None
        link.add(machine)

    @property
    def waits(self) -> bool:
        """For retention: the engine does not know of it."""
        return not self.ticket.granted.is_set()

    def stop(self, error: PrfaasError) -> None:
        """End the session with `error`; the first one counts."""
        self._stop_error = self._stop_error or error
        self._changed.set()

    def tell(self, frame: Frame) -> None:
        """Send a control frame, and again on every stream that resumes the session."""
        self._told[frame.type] = frame
        if self._outgoing is not None:
            self._outgoing.put_nowait(frame)

    async def run(self, sender: Sender) -> str:
        """To the end; the kind of the error, empty where the receiver has verified everything."""
        work = asyncio.ensure_future(sender.run())
        work.add_done_callback(self._worked)
        try:
            await self._until_ended()
            return ""
        except PrfaasError as exc:
            error = exc
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            if self.machine.ended:
                self._release()
        # A silent or cancelled other side takes no frame, and its bytes are to be freed now.
        try:
            if error.phase != "lease" and not isinstance(error, Cancelled):
                await self._fail(error)
        finally:
            self._release()
        return error.kind

    async def attend(self, stream: ControlStream) -> None:
        """Serve one control stream until it or the session ends; a newer one takes its place."""
        outgoing: asyncio.Queue[Frame | None] = asyncio.Queue()
        if self._outgoing is not None:
            self._outgoing.put_nowait(None)
        self._outgoing = outgoing
        for frame in self._told.values():
            outgoing.put_nowait(frame)
        writer = asyncio.ensure_future(self._write(stream, outgoing))
        reader = asyncio.ensure_future(self._read(stream, outgoing))
        try:
            await asyncio.wait({writer, reader}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if self._outgoing is outgoing:
                self._outgoing = None
            reader.cancel()
            # gRPC cannot end a stream in the middle of a write.
            outgoing.put_nowait(None)
            try:
                await asyncio.wait({writer}, timeout=LAST_WRITE_S)
            finally:  # gRPC may cancel this wait
                writer.cancel()
                await asyncio.gather(writer, reader, return_exceptions=True)

    def heard(self, frame: Frame) -> None:
        """A control frame from the other side. Raises ProtocolError."""
        self.heard_s = self._clock.now()
        machine = self.machine
        before = machine.verified_bytes
        machine.receive(frame)
        self.link.meter.heard(machine.verified_bytes - before, machine.report)
        self.link.bytes_per_s = machine.receive_bytes_per_s or self.link.bytes_per_s
        if not machine.ended:
            missing = self._raw_bytes - machine.ledger.raw_bytes
            self.ticket.shrink(missing + machine.retained_bytes)
        self._changed.set()
        self.link.wake()

    async def _write(self, stream: ControlStream, outgoing: asyncio.Queue[Frame | None]) -> None:
        while (frame := await outgoing.get()) is not None:
            await stream.write(frame.serialize())

    async def _read(self, stream: ControlStream, outgoing: asyncio.Queue[Frame | None]) -> None:
        """Until it closes or breaks: they look the same from here, and a broken one is resumed.

        One that carries broken bytes is as good as broken, and the other side has to know.
        """
        while isinstance(data := await stream.read(), bytes):
            try:
                frames = list(parse_all(data))
            except PrfaasError as exc:
                log.info("a control stream of %r is broken: %s", self.machine, exc)
                outgoing.put_nowait(unreadable(exc))
                return
            try:
                for frame in frames:
                    self.heard(frame)
            except PrfaasError as exc:
                self.stop(exc)
                await asyncio.Event().wait()  # the writer ends the stream, with the error

    def _worked(self, work: asyncio.Task[None]) -> None:
        if work.cancelled():
            return
        error = work.exception()
        if isinstance(error, PrfaasError):
            self.stop(error)
        elif error is not None:
            log.error("session failed %r", self.machine, exc_info=error)
            self.stop(PrfaasError(f"internal error: {error!r}"))

    async def _until_ended(self) -> None:
        """Return once COMPLETE. Raises what ended it otherwise."""
        while not self.machine.ended:
            if self._stop_error is not None:
                raise self._stop_error
            now = self._clock.now()
            lease_s = self.heard_s + self.lease_s - now
            total_s = self.opened_s + self._limit_s - now
            if lease_s <= 0:
                raise PrefillTimeout(
                    f"the other side was silent for {self.lease_s:.1f} s", phase="lease"
                )
            if total_s <= 0:
                raise PrefillTimeout(f"not taken within {self._limit_s:.1f} s", phase="total")
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(lease_s, total_s)):
                    await self._changed.wait()
        if self.machine.state is SendState.CANCELLED:
            raise Cancelled("the other side has cancelled")

    async def _fail(self, error: PrfaasError) -> None:
        """Tell the error, and give the last frames time to leave."""
        with contextlib.suppress(ProtocolError):
            self.tell(self.machine.fail(error))
        self.link.wake()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_FRAMES_S):
                while not self.machine.ended:
                    self.link.taken.clear()
                    await self.link.taken.wait()

    def _release(self) -> None:
        self.machine.cancel()
        self.link.remove(self.machine)
        self.ticket.release()
        if self._outgoing is not None:
            self._outgoing.put_nowait(None)


def unreadable(error: PrfaasError) -> Frame:
    """ERROR of no session: a frame came broken, so nobody knows what it was about."""
    return Frame(FrameType.ERROR, 0, payload=convert.error_to_bytes(error))
