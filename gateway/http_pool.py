"""Connections to one engine: used again while they are fresh, bounded, and watched by one timer."""

from __future__ import annotations

import asyncio
import re
import ssl
from dataclasses import dataclass
from urllib.parse import urlsplit

from gateway.http1 import KnownHeads
from gateway.http_connection import Connection, State
from gateway.outbox import Outbox
from prfaas.errors import ConfigError, EngineUnavailable, Overloaded
from prfaas.limits import Limits

CONTROL_CONNECTIONS = 8
"""Beyond those that requests may hold: health probes and comparisons of tokenizers."""
RETRY_AFTER_S = 1.0
SLOWEST_SWEEP_S = 1.0
_PRINTED = re.compile("[!-~]+")


@dataclass(frozen=True, slots=True)
class Address:
    """Where an engine listens. `prefix` goes before every path."""

    host: str
    port: int
    tls: bool
    prefix: str
    authority: str

    @classmethod
    def of_url(cls, url: str) -> Address:
        """Raises ConfigError for what is no plain http or https URL."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as exc:
            raise ConfigError(f"engine url {url!r}: {exc}", field="url") from exc
        if not _PRINTED.fullmatch(url):
            raise ConfigError(
                "engine url: only printable ASCII characters, without spaces", field="url"
            )
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"engine url {url!r}: not http://host:port", field="url")
        if parts.username is not None or parts.query or parts.fragment:
            raise ConfigError("engine url: only host, port and path may be given", field="url")
        try:  # as whoever looks it up does, whose error is no OSError
            parts.hostname.encode("idna")
        except UnicodeError as exc:
            raise ConfigError(f"engine url {url!r}: not a host name", field="url") from exc
        tls = parts.scheme == "https"
        return cls(
            host=parts.hostname,
            port=port if port is not None else 443 if tls else 80,
            tls=tls,
            prefix=parts.path.rstrip("/"),
            authority=parts.netloc,
        )


class Pool:
    """Owns all connections to one engine; close it with `close`.

    The last one used is used next, so that a burst's connections grow old and are closed.
    """

    def __init__(self, address: Address, name: str, limits: Limits) -> None:
        self._address = address
        self._name = name
        self._limits = limits
        self._idle_s = limits.engine_idle_s
        self._most_idle = limits.engine_idle_connections
        self._max_connections = limits.gateway_max_in_flight + CONTROL_CONNECTIONS
        self._tls = ssl.create_default_context() if address.tls else None
        self._known = KnownHeads()
        self._outbox = Outbox()
        self._idle: list[Connection] = []
        self._all: set[Connection] = set()
        self._connecting = 0
        self._closed = False
        self._timer: asyncio.TimerHandle | None = None
        waits = (
            limits.engine_idle_s,
            limits.engine_send_timeout_s,
            limits.engine_silence_timeout_s,
        )
        self._sweep_s = min(SLOWEST_SWEEP_S, min(waits) / 4)
        self.peak = 0

    def __repr__(self) -> str:
        return f"<Pool {self._name} open={len(self._all)} idle={len(self._idle)} peak={self.peak}>"

    @property
    def open(self) -> int:
        return len(self._all)

    @property
    def idle(self) -> int:
        return len(self._idle)

    @property
    def at_work(self) -> int:
        return len(self._all) - len(self._idle)

    def take_idle(self) -> Connection | None:
        """One that is open, as far as can be known, and has not been idle for too long."""
        while self._idle:
            connection = self._idle.pop()
            if connection.usable(self._idle_s):
                return connection
            connection.abort()
        return None

    async def connect(self) -> Connection:
        """A new one. Raises EngineUnavailable in phase `connect`, Overloaded at the bound."""
        if self._closed:
            raise EngineUnavailable(f"engine {self._name}: the gateway stops", phase="connect")
        if len(self._all) + self._connecting >= self._max_connections:
            raise Overloaded(
                f"engine {self._name}: {self._max_connections} connections are open",
                retry_after_s=RETRY_AFTER_S,
            )
        loop = asyncio.get_running_loop()
        address = self._address
        self._connecting += 1
        try:
            async with asyncio.timeout(self._limits.connect_timeout_s):
                _, connection = await loop.create_connection(
                    lambda: Connection(self._limits, self._forget, self._known, self._outbox),
                    address.host,
                    address.port,
                    ssl=self._tls,
                    server_hostname=address.host if self._tls else None,
                )
        except (OSError, TimeoutError) as exc:
            raise EngineUnavailable(
                f"engine {self._name} cannot be reached", phase="connect"
            ) from exc
        finally:
            self._connecting -= 1
        if self._closed:
            connection.abort()
            raise EngineUnavailable(f"engine {self._name}: the gateway stops", phase="connect")
        self._all.add(connection)
        self.peak = max(self.peak, len(self._all))
        if self._timer is None:
            self._timer = loop.call_later(self._sweep_s, self._sweep)
        return connection

    def give_back(self, connection: Connection) -> None:
        """End an exchange: kept for the next one where that is possible, else closed."""
        if not connection.finish():
            return
        if self._closed or len(self._idle) >= self._most_idle:
            connection.abort()
        else:
            self._idle.append(connection)

    async def close(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for connection in self._all:
            connection.abort()
        self._idle.clear()
        await asyncio.sleep(0)  # the loop closes the sockets

    def _forget(self, connection: Connection) -> None:
        self._all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def _sweep(self) -> None:
        """Close what was idle for too long, oldest first, and let the busy keep their deadlines."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        for connection in tuple(self._all):
            if connection.state is State.IDLE:
                if now - connection.idle_since > self._idle_s:
                    connection.abort()
            else:
                connection.tick(now)
        self._timer = loop.call_later(self._sweep_s, self._sweep) if self._all else None
