"""Sessions under way at one instance: lanes, credit and control streams joined to receivers."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any

from prfaas.clock import Deadline
from prfaas.codecs import base_name
from prfaas.frames import Frame, FrameFlag
from prfaas.interfaces import KvSink
from prfaas.layout import KvLayout
from prfaas.receive_session import ReceiveSession, ReceiveState
from prfaas.session_messages import Feature, Handshake, SessionOpen
from remote_prefill.lanes import SILENT_S
from remote_prefill.link_meter import LinkMeter
from remote_prefill.link_options import LinkOptions
from remote_prefill.peer_channels import PeerChannels
from remote_prefill.receiver import Receiver, ReceiverContext, Target

CANCEL_FIRST_S = 0.1
CANCEL_MOST_S = 2.0


class PeerSessions:
    """Owns the receivers of one link, and the streams that are being closed; `close` ends those.

    Borrows the channels.
    """

    def __init__(
        self,
        peer: str,
        instance: str,
        channels: PeerChannels,
        meter: LinkMeter,
        options: LinkOptions,
    ) -> None:
        self._name = f"{peer}/{instance}"
        self._labels = (peer, instance)
        self._channels = channels
        self._meter = meter
        self._options = options
        self._receivers: dict[int, Receiver] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._closing = 0

    def __len__(self) -> int:
        return len(self._receivers)

    def __iter__(self) -> Iterator[ReceiveSession]:
        return (receiver.machine for receiver in self._receivers.values())

    @property
    def closing(self) -> int:
        """Streams that have not ended yet, of sessions that have."""
        return self._closing

    async def close(self) -> None:
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    async def receive(
        self,
        request: SessionOpen,
        remote: Handshake,
        *,
        session: int,
        epoch: int,
        layout: KvLayout,
        sink: KvSink,
        target: Target,
        deadline: Deadline,
        watch: Callable[[Receiver], None],
    ) -> None:
        """One session to COMPLETE; `watch` gets its receiver before it starts. Raises PrfaasError;
        what came by then is in the receiver's ledger.
        """
        options = self._options
        options.credit.join()
        try:
            machine = ReceiveSession(
                session=session,
                epoch=epoch,
                request=replace(
                    request,
                    link=remote.link,
                    credit_bytes=options.credit.share(layout),
                    on_demand=request.on_demand and Feature.ON_DEMAND in remote.features,
                ),
                layout=layout,
                codecs=options.codecs,
                chunk_tokens=remote.chunk_tokens,
            )
            context = self._context(layout)
            receiver = Receiver(machine, context, sink=sink, target=target, deadline=deadline)
            watch(receiver)
            with self._counted(receiver):
                try:
                    await receiver.run()
                finally:
                    self._spawn(self._farewell(receiver))
        finally:
            options.credit.leave()

    def on_frames(self, frames: list[Frame], nbytes: int) -> None:
        """One message of a lane."""
        if frames:
            limited = all(frame.flags & FrameFlag.APP_LIMITED for frame in frames)
            self._meter.message(nbytes, app_limited=limited)
        for session, group in groupby(frames, lambda frame: frame.session):
            receiver = self._receivers.get(session)
            mine = list(group)
            if receiver is not None:
                receiver.on_frames(mine)
            else:
                metrics = self._options.metrics
                metrics.dropped_frames.labels("late").inc(len(mine))
                wasted = sum(frame.wire_bytes for frame in mine)
                metrics.wasted_bytes.labels(*self._labels).inc(wasted)

    @property
    def decoding(self) -> int:
        """Messages given to the decoding threads and not done."""
        return sum(receiver.decoding for receiver in self._receivers.values())

    def look(self, backlog: bool) -> None:
        """Let the meter take note of how things stand; `backlog`: messages wait for a thread."""
        machines = [receiver.machine for receiver in self._receivers.values()]
        if any(machine.expecting for machine in machines):
            self._channels.poke(SILENT_S)
        self._meter.look(
            sessions=len(machines),
            draining=any(m.state is ReceiveState.SEALED and m.expecting for m in machines),
            backlog=backlog,
            held_bytes=sum(machine.pending_bytes for machine in machines),
        )

    def on_lane_lost(self) -> None:
        self._channels.poke()  # what has cut one may have cut others
        for receiver in self._receivers.values():
            receiver.lane_lost()

    def _context(self, layout: KvLayout) -> ReceiverContext:
        options = self._options
        return ReceiverContext(
            peer=self._name,
            layout=layout,
            codecs=options.codecs,
            executor=options.executor,
            meter=self._meter,
            limits=options.limits,
            clock=options.clock,
            lanes=self._channels.book,
            credit=options.credit,
            free_staging=options.free_staging,
            open_stream=self._channels.session_stream,
            broke=self._channels.poke,
        )

    async def _farewell(self, receiver: Receiver) -> None:
        """Have P free everything at once, or as soon as it can be reached; its lease ends what it
        does not hear of.
        """
        machine, now = receiver.machine, self._options.clock.now
        end_s = now() + machine.lease_s
        self._closing += 1
        try:
            told = await receiver.farewell()
        finally:
            self._closing -= 1
        pause_s = CANCEL_FIRST_S
        while not told and now() < end_s:
            told = await self._channels.cancel(machine.session)
            if not told:
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, CANCEL_MOST_S)

    @contextlib.contextmanager
    def _counted(self, receiver: Receiver) -> Iterator[None]:
        metrics, labels = self._options.metrics, self._labels
        machine = receiver.machine
        self._receivers[machine.session] = receiver
        try:
            yield
        finally:
            del self._receivers[machine.session]
            self._meter.session(machine.ledger.raw_bytes, machine.wire_bytes)
            metrics.raw_bytes.labels(*labels).inc(machine.ledger.raw_bytes)
            metrics.wire_bytes.labels(*labels).inc(machine.wire_bytes)
            for number, carried in machine.carried.items():
                name = base_name(self._options.codecs.by_id(number).name)
                metrics.codec_raw_bytes.labels(name).inc(carried.raw_bytes)
                metrics.codec_wire_bytes.labels(name).inc(carried.wire_bytes)
            metrics.wasted_bytes.labels(*labels).inc(machine.wasted_bytes)
            metrics.resumes.labels(*labels).inc(receiver.resumes)
            metrics.dropped_frames.labels("late").inc(machine.late)
            metrics.dropped_frames.labels("duplicate").inc(machine.duplicates)
            metrics.dropped_frames.labels("corrupt").inc(machine.corrupt)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
