"""P's side of a link: the lanes to one D agent, and which session's frames leave next.

Lanes pull: each asks for the next message once its last one has been taken by the transport, so
the faster a lane, the more it carries, and small transfers need no stream of their own.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from prfaas.clock import Clock
from prfaas.errors import Overloaded, ProtocolError, SessionLost
from prfaas.frames import Frame
from prfaas.send_session import SendSession
from prfaas.telemetry import LinkInfo
from remote_prefill.link_sampler import LoopLoad
from remote_prefill.served_meter import ServedMeter
from remote_prefill.transport import UNSENT_BYTES

TOKEN_BYTES = 16
MAX_LINKS = 1024
MAX_LANES = 128
"""Of one link: twice what a D agent may configure, while certificates are exchanged."""
MESSAGE_S = 0.1
"""On a slow link, or one of which nothing is known, a message is what a lane carries in this time,
but not under LEAST_MESSAGE_BYTES: all lanes send at once, and a message is of use only when it is
whole."""
LEAST_MESSAGE_BYTES = 64 << 10
MAX_NAME = 128
"""Characters of a D agent's name that are told on: it says what it likes."""
LOST_LANE_S = 2.0
"""So long after a lane broke, what was on it is sent again even if the receiver is silent."""


@dataclass(slots=True)
class ServedLane:
    """One Data stream. `close` lets its writer end after the message under way."""

    number: int
    peer: str = ""
    """Address of the other end, as gRPC says it."""
    queue_bytes: int = UNSENT_BYTES
    """What the kernel may hold of it unsent."""
    closing: bool = False
    sent_bytes: int = 0
    blocked_s: float = 0.0
    """Time spent in writes: the transport was full."""
    writing_since_s: float | None = None
    waiter: asyncio.Future[None] | None = field(default=None, repr=False)

    def resize_queue(self, nbytes: int) -> bool:
        """Whether that is another size: at once where it is more, else only where it is far less,
        for rates vary and to change it takes a search for the socket.
        """
        if nbytes <= self.queue_bytes < 4 * nbytes:
            return False
        self.queue_bytes = nbytes
        return True

    def close(self) -> None:
        self.closing = True
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


class ServedLink:
    """Lanes and open sessions of one D agent; borrows both."""

    def __init__(
        self, token: bytes, identity: str, name: str, clock: Clock, load: LoopLoad
    ) -> None:
        self.token = token
        self.identity = identity
        self.name = name
        self.lanes: dict[int, ServedLane] = {}
        self.sessions: deque[SendSession] = deque()
        self.meter = ServedMeter(clock, load)
        self.bytes_per_s = 0.0
        """What D has measured; 0: nothing yet."""
        self.taken = asyncio.Event()
        """Set whenever frames leave."""
        self._idle: deque[ServedLane] = deque()

    def __repr__(self) -> str:
        return f"<ServedLink {self.name} lanes={len(self.lanes)} sessions={len(self.sessions)}>"

    @property
    def lane_bytes_per_s(self) -> float:
        """A lane's share of what D has measured; 0: nothing yet."""
        return self.bytes_per_s / max(1, len(self.lanes))

    @property
    def idle(self) -> bool:
        """Nobody uses it."""
        return not self.lanes and not self.sessions

    def add(self, session: SendSession) -> None:
        self.sessions.append(session)

    def remove(self, session: SendSession) -> None:
        if session in self.sessions:
            self.sessions.remove(session)
            self.meter.ended(session)

    def attach(self, number: int, peer: str = "") -> ServedLane:
        """A lane; its owner calls `detach`. Raises ProtocolError."""
        if number in self.lanes or len(self.lanes) >= MAX_LANES:
            raise ProtocolError(f"{self.name}: lane {number} is open already, or one too many")
        lane = self.lanes[number] = ServedLane(number, peer)
        return lane

    def detach(self, lane: ServedLane) -> None:
        """The lane's stream has ended; what was on it is sent again once D says that it is lost,
        or says nothing for too long.
        """
        self.lanes.pop(lane.number, None)
        if lane in self._idle:
            self._idle.remove(lane)
        self.wake()
        if any(lane.number in session.lanes_used for session in self.sessions):
            asyncio.get_running_loop().call_later(LOST_LANE_S, self._give_up, lane.number)

    def look(self) -> None:
        """Called each LOOK_S: take note of how things stand."""
        self.meter.look(self.sessions, self.lanes.values())

    def info(self, peer: str, instance: str) -> LinkInfo:
        """This end's view of it, for the Watch feed; `peer` and `instance` are our own names."""
        return self.meter.info(
            LinkInfo(
                peer=peer,
                instance=instance,
                link_class="",
                ready=bool(self.lanes),
                agent=self.name[:MAX_NAME],
                goodput_bytes_per_s=self.bytes_per_s,
                sessions=len(self.sessions),
            )
        )

    def wake(self) -> None:
        """There may be something to send: let the lane that has been idle longest look."""
        while self._idle:
            lane = self._idle.popleft()
            if lane.waiter is not None and not lane.waiter.done():
                lane.waiter.set_result(None)
                return

    async def next_message(self, lane: ServedLane) -> bytes | None:
        """What leaves next on this lane, waiting for it; None once the lane closes."""
        waited = False
        while not lane.closing:
            frames = self._take(lane, waited)
            if frames:
                return message_of(frames)
            waited = True
            lane.waiter = asyncio.get_running_loop().create_future()
            self._idle.append(lane)
            try:
                await lane.waiter
            finally:
                lane.waiter = None
                if lane in self._idle:
                    self._idle.remove(lane)
        return None

    def _take(self, lane: ServedLane, waited: bool) -> list[Frame]:
        """Frames of the session whose turn it is.

        They are application-limited where the link had a lane to spare: this one waited for
        something to send, or another still does.
        """
        carried = int(self.lane_bytes_per_s * MESSAGE_S)
        most_bytes = max(LEAST_MESSAGE_BYTES, carried)
        for _ in range(len(self.sessions)):
            session = self.sessions[0]
            self.sessions.rotate(-1)
            limited = waited or bool(self._idle)
            frames = session.take(lane.number, app_limited=limited, most_bytes=most_bytes)
            if frames:
                self.taken.set()
                if any(each.sendable for each in self.sessions):
                    self.wake()
                return frames
        return []

    def _give_up(self, number: int) -> None:
        if number not in self.lanes:
            for session in self.sessions:
                session.lane_lost(number)
            self.wake()


def message_of(frames: list[Frame]) -> bytes:
    """One gRPC message: the only copy of the payloads on this side of gRPC."""
    parts: list[bytes | memoryview] = []
    for frame in frames:
        parts += (frame.header(), frame.payload)
    return b"".join(parts)


class LinkTable:
    """All links of a P agent, by their tokens; those that nobody uses make room for others."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._load = LoopLoad(clock)
        self._links: dict[bytes, ServedLink] = {}

    def __iter__(self) -> Iterator[ServedLink]:
        return iter(list(self._links.values()))

    def open(self, identity: str, name: str, previous: bytes) -> ServedLink:
        """The link of a handshake: the one before, if it is this client's and still there.

        Raises Overloaded.
        """
        known = self._links.get(previous)
        if known is not None and known.identity == identity:
            known.name = name
            return known
        if len(self._links) >= MAX_LINKS:
            unused = next((t for t, link in self._links.items() if link.idle), None)
            if unused is None:
                raise Overloaded(f"{len(self._links)} links are in use already", retry_after_s=1.0)
            del self._links[unused]
        token = secrets.token_bytes(TOKEN_BYTES)
        link = self._links[token] = ServedLink(token, identity, name, self._clock, self._load)
        return link

    def look(self) -> None:
        """Called each LOOK_S."""
        self._load.look()
        for link in self._links.values():
            link.look()

    def infos(self, peer: str, instance: str) -> tuple[LinkInfo, ...]:
        """The links of all D agents that shook hands, as the Watch feed shows them. Of a D agent
        that has come anew, the link that was heard last: what it left behind is not used.
        """
        latest: dict[tuple[str, str], ServedLink] = {}
        for link in self._links.values():
            known = latest.get((link.identity, link.name))
            if known is None or link.meter.age_s <= known.meter.age_s:
                latest[link.identity, link.name] = link
        return tuple(link.info(peer, instance) for link in latest.values())

    def close_lanes(self) -> None:
        """Let every lane end after the message under way."""
        for link in self._links.values():
            for lane in link.lanes.values():
                lane.close()

    def find(self, token: bytes, identity: str) -> ServedLink:
        """Raises SessionLost (field `link`): the handshake was with another process."""
        link = self._links.get(token)
        if link is None or link.identity != identity:
            raise SessionLost("this link is not known here: shake hands again", field="link")
        return link
