"""The tenants of a running gateway: found by their keys, read again when their file changes."""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from prfaas.clock import Clock
from prfaas.errors import ConfigError, Unauthorized
from prfaas.tenants import Tenant, TenantFile, hash_of, load_tenants

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""Between two looks at the file."""
MAX_KEY_CHARS = 512

Reloaded = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose key a request came with."""

    tenant: Tenant
    key_id: str
    expires_wall: float | None


class TenantDirectory:
    """Owns the tenants as the file last said well. `run` follows the file until cancelled."""

    def __init__(self, path: Path, clock: Clock, reloaded: Reloaded) -> None:
        """`reloaded` hears `loaded` or `refused` after each change. Raises ConfigError."""
        self._path = path
        self._clock = clock
        self._reloaded = reloaded
        self._stamp = _stamp(path)
        self._take(load_tenants(path))

    def __repr__(self) -> str:
        return f"<TenantDirectory {len(self.tenants)} tenants, {len(self._callers)} keys>"

    def _take(self, file: TenantFile) -> None:
        self.tenants = {tenant.name: tenant for tenant in file.tenants}
        self._callers = {
            key.sha256: Caller(
                tenant, key.id, None if key.expires is None else key.expires.timestamp()
            )
            for tenant in file.tenants
            for key in tenant.keys
        }

    def caller(self, authorization: str) -> Caller:
        """Whose key `Authorization` carries. Raises Unauthorized, which does not repeat it."""
        if not authorization:
            raise Unauthorized("no API key was sent: it goes into `Authorization: Bearer KEY`")
        caller = self._callers.get(hash_of(_key_in(authorization)))
        if caller is None:
            raise Unauthorized("the API key is not valid")
        if caller.expires_wall is not None and self._clock.wall() >= caller.expires_wall:
            raise Unauthorized("the API key has expired")
        return caller

    async def run(self) -> None:
        """Follow the file until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Take over what has changed, where it is good."""
        stamp = await asyncio.to_thread(_stamp, self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            file = await asyncio.to_thread(load_tenants, self._path)
        except ConfigError as exc:
            logger.error("the tenants stay as they are: %s", exc.message)
            self._reloaded("refused")
            return
        self._take(file)
        logger.info("%d tenants with %d keys", len(self.tenants), len(self._callers))
        self._reloaded("loaded")


def _key_in(authorization: str) -> str:
    """`Bearer KEY`, or what a browser sends after asking for a password: `Basic` and base64 of
    `anything:KEY`. Raises Unauthorized.
    """
    scheme, _, key = authorization.strip().partition(" ")
    key = key.strip()
    if len(key) <= MAX_KEY_CHARS:
        if scheme.lower() == "bearer" and key:
            return key
        if scheme.lower() == "basic":
            try:
                return base64.b64decode(key, validate=True).decode().partition(":")[2]
            except ValueError:
                pass
    raise Unauthorized("the Authorization header is not `Bearer KEY`")


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Changes when the file does; None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
