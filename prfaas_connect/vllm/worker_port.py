"""A worker process's connection to the agent: it joins the engine that the scheduler connected."""

from __future__ import annotations

import threading
from typing import Protocol

import numpy as np
import numpy.typing as npt

from prfaas_connect.port.engine import EngineHandler, EnginePort
from prfaas_connect.port.messages import PORT_VERSION, Join, PortError, PortMessage

MAX_REFUSALS = 20
"""Some 15 s: by then the agent has no such connection any more, and names are never used again."""


class JoinedPort(Protocol):
    """What is needed of `EnginePort`."""

    def start(self) -> None: ...

    def close(self) -> None: ...

    @property
    def connected(self) -> bool: ...

    def send(self, message: PortMessage, blob: bytes | memoryview = b"") -> bool: ...

    def ring_reserve(self, nbytes: int) -> int | None: ...

    def ring(self, offset: int, nbytes: int) -> npt.NDArray[np.uint8]: ...

    def staging(self, offset: int, nbytes: int) -> npt.NDArray[np.uint8]: ...


class WorkerPort:
    """Owns the port of one rank, and replaces it when the engine's connection is another.

    `use` names the connection and never waits; `close` ends it. The worker's thread calls both.
    """

    def __init__(self, path: str, rank: int, handler: EngineHandler) -> None:
        self._path = path
        self._rank = rank
        self._handler = handler
        self._port: JoinedPort | None = None
        self.connection = ""

    def use(self, connection: str) -> None:
        """Join this connection unless that is done; an empty name changes nothing."""
        if connection in ("", self.connection):
            return
        self._leave()
        self.connection = connection
        self._port = self.join(Join(PORT_VERSION, connection, self._rank))
        self._port.start()

    def join(self, join: Join) -> JoinedPort:
        """A port that has not started."""
        return EnginePort(
            self._path, join, self._handler, reconnect_s=0.05, max_refusals=MAX_REFUSALS
        )

    def close(self) -> None:
        """Leave, and end the threads."""
        port, self._port = self._port, None
        if port is not None:
            port.close()

    @property
    def port(self) -> JoinedPort | None:
        """The port of the present connection, once it is up."""
        return self._port if self._port is not None and self._port.connected else None

    def staging(self, connection: str, offset: int, nbytes: int) -> npt.NDArray[np.uint8] | None:
        """View of staged bytes, good for as long as it is kept; None while not connected there.

        Raises PortError where the bytes are outside staging.
        """
        port = self.port
        if port is None or connection != self.connection:
            return None
        try:
            return port.staging(offset, nbytes)
        except PortError:
            if port.connected:
                raise
            return None

    def _leave(self) -> None:
        port, self._port = self._port, None
        if port is not None:
            # Its threads may be in the middle of a handshake; the model does not wait for them.
            threading.Thread(target=port.close, name="kvport-leaving", daemon=True).start()
