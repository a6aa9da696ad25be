"""A real redis-server for tests, on loopback or a unix socket, that can be stopped and started."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from prfaas.settings import TlsSettings

WHY_SKIPPED = "redis-server is not installed"
START_S = 20.0


def found() -> bool:
    """Whether there is one to start."""
    return shutil.which("redis-server") is not None


class RedisServer:
    """Owns one process, which keeps its data in memory only. `url` leads to it."""

    def __init__(
        self,
        directory: Path,
        tls: TlsSettings | None = None,
        acl: tuple[str, ...] = (),
        replica_of: RedisServer | None = None,
        sentinel_of: tuple[str, RedisServer] | None = None,
    ) -> None:
        """`acl`: lines of an ACL file. `sentinel_of`: a Sentinel that watches it by that name, and
        notices within half a second that it is gone.
        """
        self._directory = directory
        self._replica_of = replica_of
        self._sentinel_of = sentinel_of
        self._tls = tls
        self._process: asyncio.subprocess.Process | None = None
        self._acl = directory / "users.acl" if acl else None
        if self._acl is not None:
            self._acl.write_text("".join(f"{line}\n" for line in acl))
        with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
            self.port = int(taken.getsockname()[1])

    def url(self, user: str = "", password: str = "") -> str:
        who = f"{user}:{password}@" if password else ""
        scheme = "rediss" if self._tls is not None else "redis"
        return f"{scheme}://{who}127.0.0.1:{self.port}/0"

    async def start(self) -> None:
        """Empty. Raises TimeoutError where it does not come up."""
        command = ["redis-server"]
        if self._sentinel_of is None:
            command += ["--save", "", "--appendonly", "no", "--repl-diskless-sync-delay", "0"]
        else:
            command += [str(self._sentinel_file(*self._sentinel_of)), "--sentinel"]
        if self._replica_of is not None:
            command += ["--replicaof", "127.0.0.1", str(self._replica_of.port)]
        command += ["--bind", "127.0.0.1", "--dir", str(self._directory), "--daemonize", "no"]
        if self._acl is not None:
            command += ["--aclfile", str(self._acl)]
        if self._tls is None:
            command += ["--port", str(self.port)]
        else:
            command += ["--port", "0", "--tls-port", str(self.port), "--tls-auth-clients", "yes"]
            command += ["--tls-cert-file", str(self._tls.cert)]
            command += ["--tls-key-file", str(self._tls.key)]
            command += ["--tls-ca-cert-file", str(self._tls.ca)]
        self._process = await asyncio.create_subprocess_exec(
            *command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        async with asyncio.timeout(START_S):
            while True:
                with contextlib.suppress(OSError):
                    _, writer = await asyncio.open_connection("127.0.0.1", self.port)
                    writer.close()
                    return
                await asyncio.sleep(0.01)

    def _sentinel_file(self, name: str, primary: RedisServer) -> Path:
        """It writes there what it finds out."""
        file = self._directory / f"sentinel-{self.port}.conf"
        file.write_text(
            f"sentinel monitor {name} 127.0.0.1 {primary.port} 1\n"
            f"sentinel down-after-milliseconds {name} 500\n"
            f"sentinel failover-timeout {name} 5000\n"
        )
        return file

    def freeze(self) -> None:
        """It takes connections and says nothing, until `thaw`."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    async def stop(self) -> None:
        """At once, and what it knew is gone. Idempotent."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)


@asynccontextmanager
async def redis_server(
    directory: Path, tls: TlsSettings | None = None, acl: tuple[str, ...] = ()
) -> AsyncIterator[RedisServer]:
    """One that runs. `directory` is for it alone."""
    server = RedisServer(directory, tls, acl)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()
