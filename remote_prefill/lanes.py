"""D's side of a link's lanes: long-lived streams that bring KV frames of any session."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import grpc
import grpc.aio

from prfaas.clock import Clock
from prfaas.errors import PeerUnavailable, PrfaasError, ProtocolError
from prfaas.frames import Frame, FrameType, parse_all
from prfaas.rpc import convert
from prfaas.session_messages import LaneAttach
from remote_prefill.streams import ClientStream, stream_error
from remote_prefill.transport import DATA

log = logging.getLogger(__name__)

RETRY_FIRST_S = 0.05
RETRY_MOST_S = 2.0
SILENT_S = 0.2
"""A lane that has brought nothing for so long, while something is to come, is looked after."""
LOOK_MOST_S = 3.2
"""The longest time between two looks in one silence."""
DRAIN_S = 10.0
"""A lane that is closed in order may take so long for the message under way."""


@dataclass(slots=True)
class LaneBook:
    """Numbers of a link's lanes: which are open, and how many ever were.

    A lane is open from before P can know of it until all that came on it was given to sessions.
    """

    open: dict[int, None] = field(default_factory=dict)
    opened: int = 0

    def begin(self) -> int:
        number = self.opened
        self.opened += 1
        self.open[number] = None
        return number

    def end(self, number: int) -> None:
        self.open.pop(number, None)


@dataclass(frozen=True, slots=True)
class LaneEvents:
    """What a link wants to hear of its lanes."""

    frames: Callable[[list[Frame], int], None]
    """KV frames of one message and its size. May raise PrfaasError: the lane is then given up."""
    lost: Callable[[], None]
    """A lane has ended; what was on it and did not come is lost."""
    refused: Callable[[PrfaasError], None]
    """The instance does not know the link."""
    opened: Callable[[], None]


class _Lane:
    """One stream of a LaneSet; its owner calls `close`."""

    def __init__(self, number: int, stream: ClientStream, now_s: float) -> None:
        self.number = number
        self.stream = stream
        self.attached = False
        self.greeting = b""
        """The ATTACH frame of this lane."""
        self._heard_s = self._looked_s = now_s
        self._looks = 0
        """In this silence."""
        self._writing: asyncio.Future[None] | None = None

    def heard(self, now_s: float) -> None:
        self._heard_s = now_s
        self._looks = 0

    def poke(self, now_s: float, silent_s: float) -> None:
        """Say ATTACH again where nothing has come for so long, twice as long each time."""
        if now_s - self._looked_s > 2 * LOOK_MOST_S:  # nothing was due meanwhile
            self._looks = 0
        pause_s = min(silent_s * 2**self._looks, LOOK_MOST_S)
        if now_s - max(self._heard_s, self._looked_s) < pause_s or self._is_writing:
            return
        self._looks += 1
        self._looked_s = now_s
        self._writing = asyncio.ensure_future(self._say(self.greeting))

    async def finish(self) -> None:
        """Have the other side close once it has sent what it is sending."""
        if self._writing is not None:
            await asyncio.wait({self._writing})
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            await self.stream.done_writing()

    async def close(self) -> None:
        self.stream.cancel()
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)

    @property
    def _is_writing(self) -> bool:
        return self._writing is not None and not self._writing.done()

    async def _say(self, data: bytes) -> None:
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            await self.stream.write(data)


class LaneSet:
    """Owns one lane on each of some channels, and opens it again when it breaks.

    `drain` closes them in order, `close` at once; either once. Borrows the channels.
    """

    def __init__(
        self,
        name: str,
        channels: Sequence[grpc.aio.Channel],
        token: bytes,
        book: LaneBook,
        events: LaneEvents,
        connect_timeout_s: float,
        clock: Clock,
    ) -> None:
        self.token = token
        self._name = name
        self._book = book
        self._events = events
        self._connect_timeout_s = connect_timeout_s
        self._random = random.Random()
        self._up = asyncio.Event()
        self._closing = False
        self._clock = clock
        self._lanes: dict[int, _Lane] = {}
        self._tasks = [
            asyncio.create_task(self._keep(channel), name=f"lane {name}") for channel in channels
        ]

    async def up(self) -> None:
        """Until one lane is attached. Raises PeerUnavailable."""
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                await self._up.wait()
        except TimeoutError:
            raise PeerUnavailable(f"{self._name}: no data channel in time") from None

    async def drain(self) -> None:
        """Take what is under way and open nothing more."""
        self._closing = True
        for lane in list(self._lanes.values()):
            await lane.finish()
        await asyncio.wait(self._tasks, timeout=DRAIN_S)
        await self.close()

    async def close(self) -> None:
        self._closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def poke(self, silent_s: float = 0.0) -> None:
        """Say something on every lane that has been silent for so long, longer each time.

        What is written on a connection that is gone comes back as an error, and ends the lane. Only
        that does where gRPC has read the last bytes and the reset with one event: it waits for
        another, until its keepalive.
        """
        for lane in self._lanes.values():
            lane.poke(self._clock.now(), silent_s)

    async def _keep(self, channel: grpc.aio.Channel) -> None:
        pause_s = RETRY_FIRST_S
        while not self._closing:
            lane = _Lane(self._book.begin(), channel.stream_stream(DATA)(), self._clock.now())
            try:
                await self._run(lane)
            except PrfaasError as exc:
                log.info("lane of %s ended kind=%s: %s", self._name, exc.kind, exc.message)
            except Exception:
                log.exception("lane of %s", self._name)
            if self._closing:
                return
            pause_s = RETRY_FIRST_S if lane.attached else min(pause_s * 2, RETRY_MOST_S)
            await asyncio.sleep(pause_s * self._random.uniform(0.5, 1.0))

    async def _run(self, lane: _Lane) -> None:
        """One lane to its end. Raises PrfaasError."""
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                await self._attach(lane)
            lane.attached = True
            self._lanes[lane.number] = lane
            self._up.set()
            self._events.opened()
            while isinstance(data := await lane.stream.read(), bytes):
                lane.heard(self._clock.now())
                self._events.frames(_kv_frames(data), len(data))
        except TimeoutError:
            raise PeerUnavailable(f"{self._name}: a lane was not attached in time") from None
        except grpc.RpcError as exc:
            raise stream_error(exc, peer=self._name, phase="lane") from exc
        finally:
            await lane.close()
            self._lanes.pop(lane.number, None)
            self._book.end(lane.number)
            if lane.attached:
                self._events.lost()

    async def _attach(self, lane: _Lane) -> None:
        payload = convert.attach_to_bytes(LaneAttach(self.token, lane.number))
        lane.greeting = Frame(FrameType.ATTACH, 0, payload=payload).serialize()
        await lane.stream.write(lane.greeting)
        data = await lane.stream.read()
        if not isinstance(data, bytes):
            raise PeerUnavailable(f"{self._name}: a lane was not attached")
        for frame in parse_all(data):
            if frame.type is FrameType.ERROR:
                error = convert.error_from_bytes(frame.payload)
                self._events.refused(error)
                raise error
            if frame.type is not FrameType.ATTACH:
                raise ProtocolError(f"{frame} on a lane that is not attached")


def _kv_frames(data: bytes) -> list[Frame]:
    frames = list(parse_all(data))
    for frame in frames:
        if frame.type is not FrameType.KV:
            raise ProtocolError(f"{frame} on a lane")
    return frames
