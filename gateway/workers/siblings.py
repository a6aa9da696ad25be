"""Processes of one gateway ask each other: whichever is asked from outside answers for all."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from typing import TypeVar

import msgspec

from gateway.workers.frames import Frames
from gateway.workers.place import Place, name_of
from prfaas.errors import ProtocolError

logger = logging.getLogger(__name__)

TIMEOUT_S = 1.0
"""Who has not answered by then is left out."""
MAX_ASKED = 64
"""Questions that one process answers at once."""

R = TypeVar("R")


class AskMetrics(msgspec.Struct, frozen=True, tag=True):
    """Answered with a list of families."""


class AskRequests(msgspec.Struct, frozen=True, tag=True):
    """The latest ones, answered with a list of `Told`."""

    limit: int


class AskRequest(msgspec.Struct, frozen=True, tag=True):
    """One request by its id, answered with a list of at most one `Told`."""

    request_id: str


class AskCluster(msgspec.Struct, frozen=True, tag=True):
    """Answered with `ClusterPart`."""


class AskDashboard(msgspec.Struct, frozen=True, tag=True):
    """Answered with `DashboardPart`."""

    asker: int
    """What it was told before is not told again."""
    first: bool
    """It was told nothing yet."""
    whole: bool
    """The state too, not only requests."""


class Told(msgspec.Struct, frozen=True, array_like=True):
    """A record in JSON, and when its request came."""

    received: float
    json: bytes


Ask = AskMetrics | AskRequests | AskRequest | AskCluster | AskDashboard


class _Reply(msgspec.Struct, frozen=True):
    answer: msgspec.Raw


class Siblings:
    """Owns the socket at which this process is asked; close it with `close`."""

    def __init__(self, place: Place, answer: Callable[[Ask], object]) -> None:
        self._place = place
        self._answer = answer
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._encoder = msgspec.msgpack.Encoder()

    async def start(self) -> None:
        path = self._place.socket_of(self._place.index)
        path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._connected, path)
        os.chmod(path, 0o600)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def index(self) -> int:
        """Of this process."""
        return self._place.index

    async def ask(
        self, ask: Ask, kind: type[R], *, state: bool = False, own: bool = True
    ) -> dict[int, R]:
        """What each worker says by its index, this one first unless `own` is False; `state`: the
        process that keeps it (index -1) is asked too. Who does not answer is left out.
        """
        this = self._place.index
        others = [at for at in range(-1 if state else 0, self._place.workers) if at != this]
        answers = await asyncio.gather(*(self._ask_one(at, ask, kind) for at in others))
        found: dict[int, R] = {this: self._said(ask, kind)} if own else {}
        for at, answer in zip(others, answers, strict=True):
            if answer is not None:
                found[at] = answer
        return found

    def _said(self, ask: Ask, kind: type[R]) -> R:
        """By this process, in the same form."""
        return msgspec.msgpack.decode(self._encoder.encode(self._answer(ask)), type=kind)

    async def _ask_one(self, index: int, ask: Ask, kind: type[R]) -> R | None:
        frames: Frames[_Reply] | None = None
        try:
            async with asyncio.timeout(TIMEOUT_S):
                path = self._place.socket_of(index)
                frames = Frames(*await asyncio.open_unix_connection(path), _Reply)
                frames.put(ask)
                reply = await frames.next()
                return None if reply is None else msgspec.msgpack.decode(reply.answer, type=kind)
        except (OSError, TimeoutError):
            return None
        except (ProtocolError, msgspec.MsgspecError) as exc:
            logger.error("%s answers otherwise: %s", name_of(index), exc)
            return None
        finally:
            if frames is not None:
                await frames.abort()

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(Frames(reader, writer, Ask)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, frames: Frames[Ask]) -> None:
        """One question, and whatever more comes."""
        try:
            async with asyncio.timeout(10 * TIMEOUT_S):
                if len(self._tasks) > MAX_ASKED:
                    return
                while (ask := await frames.next()) is not None:
                    packed = self._encoder.encode(self._answer(ask))
                    frames.put(_Reply(msgspec.Raw(packed)))
                    await frames.drain()
        except (ProtocolError, TimeoutError) as exc:
            logger.error("somebody asks otherwise: %s", exc)
        except Exception:
            logger.exception("a question of another process could not be answered")
        finally:
            with contextlib.suppress(Exception):
                await frames.abort()
