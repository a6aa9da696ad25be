"""The five processes on one machine: ports, keys, sockets and a configuration file for each."""

from __future__ import annotations

import os
import random
import secrets
import socket
from collections.abc import Container, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prfaas.certs import make_certs
from prfaas.settings import (
    AgentPeer,
    AuthorisedClient,
    EngineEndpoint,
    InstanceAddress,
    PeerEndpoint,
    Settings,
    TlsSettings,
)
from prfaas.up.config_file import write_config
from prfaas.up.process import ProcessSpec

PEER, INSTANCE, ENGINE = "p", "p-0", "d-0"
GATEWAY, D_AGENT, P_AGENT = "gateway", "d-agent", "p-agent"
"""Names of the processes, also in their certificates."""
CERTS = "certs"
CERT_DAYS = 30
READY_TIMEOUT_S = 180.0
_OUTGOING_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST_PORT, _PORTS_TRIED = 16384, 1000


@dataclass(frozen=True, slots=True)
class StackPlan:
    """What differs from one stack to the next; `base` has everything else, limits among it."""

    base: Settings
    model: Path
    served_model_name: str
    gateway_port: int = 0
    threads: int = 1
    pin: bool = True
    tls: bool = False
    """Mutual TLS between gateway and agents, with certificates made for this stack."""
    prefill_host: str = "127.0.0.1"
    """Where P's agent listens and is dialled; elsewhere than on loopback only with `tls`."""


@dataclass(frozen=True, slots=True)
class Ports:
    """The loopback ports of one stack."""

    gateway: int
    d_engine: int
    d_agent: int
    p_engine: int
    p_agent: int


@dataclass(frozen=True, slots=True)
class Stack:
    """Writes the configuration files into `directory`, a private one, and names the processes."""

    plan: StackPlan
    directory: Path
    ports: Ports
    transfer_key: str = field(repr=False)
    cache_secret: str = field(repr=False)

    @staticmethod
    def create(plan: StackPlan, directory: Path) -> Stack:
        """Pick free ports and new keys. `directory` must be readable by its owner only."""
        if directory.stat().st_mode & 0o077:
            raise ValueError(f"{directory} is open to others")
        if plan.tls:
            make_certs(directory / CERTS, (GATEWAY, D_AGENT, P_AGENT), days=CERT_DAYS)
        chosen = free_ports(5)
        return Stack(
            plan=plan,
            directory=directory,
            ports=Ports(plan.gateway_port or chosen[0], *chosen[1:]),
            transfer_key=secrets.token_hex(32),
            cache_secret=secrets.token_hex(32),
        )

    @property
    def gateway_url(self) -> str:
        return f"http://127.0.0.1:{self.ports.gateway}"

    @property
    def d_engine_url(self) -> str:
        return f"http://127.0.0.1:{self.ports.d_engine}"

    @property
    def p_engine_url(self) -> str:
        return f"http://127.0.0.1:{self.ports.p_engine}"

    def engines_and_agents(
        self,
        *,
        prefill_port: int | None = None,
        d_core: int | None = None,
        p_core: int | None = None,
        agent: Mapping[str, Any] | None = None,
        d_engine: Mapping[str, Any] | None = None,
        p_engine: Mapping[str, Any] | None = None,
        prefill: Mapping[str, Any] | None = None,
    ) -> tuple[ProcessSpec, ...]:
        """P engine, P agent, D agent, D engine; parameters as of the two sides."""
        return (
            *self.prefill_side(core=p_core, engine=p_engine, agent=prefill),
            *self.decode_side(prefill_port=prefill_port, core=d_core, agent=agent, engine=d_engine),
        )

    def prefill_side(
        self,
        *,
        core: int | None = None,
        engine: Mapping[str, Any] | None = None,
        agent: Mapping[str, Any] | None = None,
    ) -> tuple[ProcessSpec, ...]:
        """P: engine and agent; `engine`, `agent`: settings that replace the base's."""
        section = {**self._p_engine(), **(engine or {})}
        return (
            self._process("p-engine", "engine", section, core=core),
            self._process("p-agent", "prefill", {**self._p_agent(), **(agent or {})}),
        )

    def decode_side(
        self,
        *,
        prefill_port: int | None = None,
        core: int | None = None,
        agent: Mapping[str, Any] | None = None,
        engine: Mapping[str, Any] | None = None,
        suffix: str = "",
    ) -> tuple[ProcessSpec, ...]:
        """D: agent and engine. `prefill_port`: where D finds P (default: P's own port).

        `agent`, `engine`: settings of that process that replace the base's. `suffix` tells two Ds
        apart.
        """
        agent_section = {**self._d_agent(prefill_port), **(agent or {})}
        engine_section = {**self._d_engine(), **(engine or {})}
        return (
            self._process(f"d-agent{suffix}", "agent", agent_section),
            self._process(f"d-engine{suffix}", "engine", engine_section, core=core),
        )

    def gateway(
        self,
        *,
        name: str = "gateway",
        port: int | None = None,
        prefill_port: int | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> ProcessSpec:
        """A gateway in front of D; `settings` replace the base's (`offload`, `policy`, ...)."""
        section = {
            **dict(self.plan.base.gateway),
            "host": "127.0.0.1",
            "port": self.ports.gateway if port is None else port,
            "model": self.plan.served_model_name,
            "tokenizer": self.plan.model,
            "engines": (
                EngineEndpoint(
                    name=ENGINE,
                    url=self.d_engine_url,
                    agent=_loopback(self.ports.d_agent),
                    tls_name=self._tls_name(D_AGENT),
                ),
            ),
            "peers": (
                PeerEndpoint(
                    peer=PEER,
                    instance=INSTANCE,
                    watch=self._prefill_address(prefill_port),
                    tls_name=self._tls_name(P_AGENT),
                ),
            ),
            "transfer_key": self.transfer_key,
            "cache_secret": self.cache_secret,
            "tls": self._tls(GATEWAY),
            **(settings or {}),
        }
        return self._process(name, "gateway", section)

    def _d_engine(self) -> dict[str, Any]:
        return self._engine(self.ports.d_engine, "d.sock")

    def _p_engine(self) -> dict[str, Any]:
        return {**self._engine(self.ports.p_engine, "p.sock"), "roles": ("prefill",)}

    def _engine(self, port: int, socket_name: str) -> dict[str, Any]:
        return {
            **dict(self.plan.base.engine),
            "host": "127.0.0.1",
            "port": port,
            "model": self.plan.model,
            "served_model_name": self.plan.served_model_name,
            "threads": self.plan.threads,
            "port_socket": self.directory / socket_name,
            "debug_endpoints": True,
        }

    def _d_agent(self, prefill_port: int | None) -> dict[str, Any]:
        instance = InstanceAddress(
            name=INSTANCE,
            address=self._prefill_address(prefill_port),
            tls_name=self._tls_name(P_AGENT),
        )
        return {
            **dict(self.plan.base.agent),
            "name": f"{ENGINE}-agent",
            "socket": self.directory / "d.sock",
            "host": "127.0.0.1",
            "port": self.ports.d_agent,
            "transfer_keys": (self.transfer_key,),
            "peers": (AgentPeer(name=PEER, instances=(instance,)),),
            "tls": self._tls(D_AGENT, GATEWAY),
        }

    def _p_agent(self) -> dict[str, Any]:
        return {
            **dict(self.plan.base.prefill),
            "peer": PEER,
            "instance": INSTANCE,
            "socket": self.directory / "p.sock",
            "host": self.plan.prefill_host,
            "port": self.ports.p_agent,
            "tls": self._tls(P_AGENT, GATEWAY, D_AGENT),
            "authorised": (self._d_client(),) if self.plan.tls else (),
        }

    def _prefill_address(self, port: int | None) -> str:
        return f"{self.plan.prefill_host}:{port or self.ports.p_agent}"

    def _d_client(self) -> AuthorisedClient:
        return AuthorisedClient(identity=D_AGENT, models=(self.plan.served_model_name,))

    def _tls(self, name: str, *peers: str) -> TlsSettings | None:
        """Of the process `name`, which `peers` may call."""
        if not self.plan.tls:
            return None
        certs = self.directory / CERTS
        return TlsSettings(
            cert=certs / name / "cert.pem",
            key=certs / name / "key.pem",
            ca=certs / "ca.pem",
            peers=peers,
        )

    def _tls_name(self, name: str) -> str | None:
        return name if self.plan.tls else None

    def _process(
        self, name: str, command: str, section: Mapping[str, Any], core: int | None = None
    ) -> ProcessSpec:
        return write_config(self.directory, name, command, self.plan.base, section, core)


def free_ports(count: int, *, but: Container[int] = ()) -> list[int]:
    """Loopback ports that nobody listens on now, and none of `but`.

    None of the range that outgoing connections are given: one of those could take a port before its
    process listens on it, or while that process is started anew.
    """
    with ExitStack() as held:
        ports: list[int] = []
        candidates = _port_candidates()
        while len(ports) < count:
            port = next(candidates)
            if port in but:
                continue
            sock = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                if port == 0:
                    raise
                continue
            ports.append(int(sock.getsockname()[1]))
        return ports


def _port_candidates() -> Iterator[int]:
    """Ports below the kernel's own range in random order; then 0, which is any."""
    try:
        lowest = int(_OUTGOING_PORTS.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        lowest = 0
    below = range(_LOWEST_PORT, lowest)
    # Not the seeded generator: processes that were seeded alike would all pick the same ports.
    yield from random.SystemRandom().sample(below, min(len(below), _PORTS_TRIED))
    while True:
        yield 0


def engine_cores(pin: bool) -> tuple[int | None, int | None]:
    """Cores for D and P: one each where this process may use two, else none."""
    if not pin or not hasattr(os, "sched_getaffinity"):
        return None, None
    cores = sorted(os.sched_getaffinity(0))
    return (cores[0], cores[1]) if len(cores) >= 2 else (None, None)


def _loopback(port: int) -> str:
    return f"127.0.0.1:{port}"
