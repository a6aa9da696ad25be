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

from prfaas.errors import PeerUnavailable, PrfaasError, ProtocolError
from prfaas.frames import Frame, FrameType, parse_all
from prfaas.rpc import convert
from prfaas.session_messages import LaneAttach
from remote_prefill.streams import ClientStream, stream_error
from remote_prefill.transport import DATA

log = logging.getLogger(__name__)

RETRY_FIRST_S = 0.05
RETRY_MOST_S = 2.0
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
    ) -> None:
        self.token = token
        self._name = name
        self._book = book
        self._events = events
        self._connect_timeout_s = connect_timeout_s
        self._random = random.Random()
        self._up = asyncio.Event()
        self._closing = False
        self._streams: dict[int, ClientStream] = {}
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
        for stream in self._streams.values():
            with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
                await stream.done_writing()
        await asyncio.wait(self._tasks, timeout=DRAIN_S)
        await self.close()

    async def close(self) -> None:
        self._closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _keep(self, channel: grpc.aio.Channel) -> None:
        pause_s = RETRY_FIRST_S
        while not self._closing:
            try:
                if await self._run(channel):
                    pause_s = RETRY_FIRST_S
            except PrfaasError as exc:
                log.info("lane of %s ended kind=%s: %s", self._name, exc.kind, exc.message)
            except Exception:
                log.exception("lane of %s", self._name)
            if not self._closing:
                await asyncio.sleep(pause_s * self._random.uniform(0.5, 1.0))
                pause_s = min(pause_s * 2, RETRY_MOST_S)

    async def _run(self, channel: grpc.aio.Channel) -> bool:
        """One lane to its end; whether it was attached. Raises PrfaasError."""
        number = self._book.begin()
        stream: ClientStream = channel.stream_stream(DATA)()
        attached = False
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                await self._attach(stream, number)
            attached = True
            self._streams[number] = stream
            self._up.set()
            self._events.opened()
            while isinstance(data := await stream.read(), bytes):
                self._events.frames(_kv_frames(data), len(data))
            return True
        except TimeoutError:
            raise PeerUnavailable(f"{self._name}: a lane was not attached in time") from None
        except grpc.RpcError as exc:
            raise stream_error(exc, peer=self._name, phase="lane") from exc
        finally:
            stream.cancel()
            self._streams.pop(number, None)
            self._book.end(number)
            if attached:
                self._events.lost()

    async def _attach(self, stream: ClientStream, number: int) -> None:
        payload = convert.attach_to_bytes(LaneAttach(self.token, number))
        await stream.write(Frame(FrameType.ATTACH, 0, payload=payload).serialize())
        data = await stream.read()
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
