"""A fleet on one machine: ports, keys and a configuration file for each of its processes."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prfaas.errors import ConfigError
from prfaas.settings import (
    AgentPeer,
    EngineEndpoint,
    InstanceAddress,
    PeerEndpoint,
    Settings,
    load_settings,
)
from prfaas.up.config_file import plain, write_config
from prfaas.up.fleet_file import Fleet, FleetPeer
from prfaas.up.process import ProcessSpec
from prfaas.up.stack import free_ports

_PATHS = ("paced", "model", "tokenizer", "file", "codec_calibration")
"""Settings that name files, relative to the fleet's own."""


@dataclass(frozen=True, slots=True)
class Instance:
    """One prefill instance: where its agent listens, and where the line to it begins."""

    peer: FleetPeer
    at: int
    port: int
    line_port: int

    @property
    def name(self) -> str:
        return f"p-{self.at}"

    @property
    def process(self) -> str:
        """What the names of its two processes begin with."""
        return f"{self.peer.name}-{self.name}"

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.line_port}"


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """Writes the files of all processes into `directory`, a private one."""

    fleet: Fleet
    directory: Path
    home: Path
    """Directory of the fleet's file."""
    base: Settings
    gateway_ports: tuple[int, ...]
    engine_ports: tuple[int, ...]
    agent_ports: tuple[int, ...]
    instances: tuple[Instance, ...]
    transfer_key: str = field(repr=False)
    cache_secret: str = field(repr=False)

    @staticmethod
    def create(fleet: Fleet, file: Path, directory: Path, port: int | None = None) -> FleetPlan:
        """Pick free ports and keys; `port`: of the first gateway, the others follow."""
        count = fleet.engines.count
        places = [(peer, at) for peer in fleet.peers for at in range(peer.instances)]
        ports = iter(free_ports(fleet.gateways + 2 * count + 2 * len(places)))
        gateways = [next(ports) for _ in range(fleet.gateways)]
        if port is not None:
            gateways = list(range(port, port + fleet.gateways))
        return FleetPlan(
            fleet=fleet,
            directory=directory,
            home=file.resolve().parent,
            base=load_settings(overrides={"limits": fleet.limits}),
            gateway_ports=tuple(gateways),
            engine_ports=tuple(next(ports) for _ in range(count)),
            agent_ports=tuple(next(ports) for _ in range(count)),
            instances=tuple(Instance(peer, at, next(ports), next(ports)) for peer, at in places),
            transfer_key=secrets.token_hex(32),
            cache_secret=secrets.token_hex(32),
        )

    @property
    def gateway_urls(self) -> tuple[str, ...]:
        return tuple(f"http://127.0.0.1:{port}" for port in self.gateway_ports)

    def prefill_side(self) -> tuple[ProcessSpec, ...]:
        """Engines and agents of all instances. Raises ConfigError, as the others do."""
        found = []
        for each in self.instances:
            socket = self.directory / f"{each.process}.sock"
            engine = {**self._engine(0), "port_socket": socket, "roles": ("prefill",)}
            agent = {
                **dict(self.base.prefill),
                "peer": each.peer.name,
                "instance": each.name,
                "socket": socket,
                "host": "127.0.0.1",
                "port": each.port,
            }
            found += [
                self._spec(f"{each.process}-engine", "engine", engine, each.peer.engine),
                self._spec(f"{each.process}-agent", "prefill", agent, each.peer.prefill),
            ]
        return tuple(found)

    def decode_side(self) -> tuple[ProcessSpec, ...]:
        """Agents and engines."""
        peers = tuple(
            AgentPeer(
                name=peer.name,
                link_class=peer.link_class,
                instances=tuple(
                    InstanceAddress(name=each.name, address=each.address)
                    for each in self.instances
                    if each.peer is peer
                ),
            )
            for peer in self.fleet.peers
        )
        found = []
        for at in range(self.fleet.engines.count):
            socket = self.directory / f"d-{at}.sock"
            agent = {
                **dict(self.base.agent),
                "name": f"d-{at}-agent",
                "socket": socket,
                "host": "127.0.0.1",
                "port": self.agent_ports[at],
                "transfer_keys": (self.transfer_key,),
                "peers": peers,
            }
            engine = {**self._engine(self.engine_ports[at]), "port_socket": socket}
            found += [
                self._spec(f"d-{at}-agent", "agent", agent, self.fleet.engines.agent),
                self._spec(f"d-{at}-engine", "engine", engine, self.fleet.engines.engine),
            ]
        return tuple(found)

    def gateways(self) -> tuple[ProcessSpec, ...]:
        """All of them in front of all engines."""
        engines = tuple(
            EngineEndpoint(
                name=f"d-{at}", url=f"http://127.0.0.1:{port}", agent=f"127.0.0.1:{watch}"
            )
            for at, (port, watch) in enumerate(
                zip(self.engine_ports, self.agent_ports, strict=True)
            )
        )
        peers = tuple(
            PeerEndpoint(
                peer=each.peer.name,
                instance=each.name,
                watch=each.address,
                link_class=each.peer.link_class,
            )
            for each in self.instances
        )
        section = {
            **dict(self.base.gateway),
            "host": "127.0.0.1",
            "model": self.fleet.model,
            "engines": engines,
            "peers": peers,
            "transfer_key": self.transfer_key,
            "cache_secret": self.cache_secret,
        }
        return tuple(
            self._spec(f"gateway-{at}", "gateway", {**section, "port": port}, self.fleet.gateway)
            for at, port in enumerate(self.gateway_ports)
        )

    def _engine(self, port: int) -> dict[str, Any]:
        return {
            **dict(self.base.engine),
            "host": "127.0.0.1",
            "port": port,
            "served_model_name": self.fleet.model,
            "threads": 1,
            "debug_endpoints": True,
        }

    def _spec(
        self, name: str, command: str, section: Mapping[str, Any], overrides: Mapping[str, Any]
    ) -> ProcessSpec:
        merged = {**section, **self._located(overrides)}
        try:
            load_settings(overrides={command: plain(merged)})
        except ConfigError as exc:
            raise ConfigError(f"{name}: {exc.message}", field=exc.field) from exc
        return write_config(self.directory, name, command, self.base, merged)

    def _located(self, overrides: Mapping[str, Any]) -> dict[str, Any]:
        """Files are named relative to the fleet's own."""
        found: dict[str, Any] = {}
        for key, value in overrides.items():
            if isinstance(value, Mapping):
                value = self._located(value)
            elif key in _PATHS and isinstance(value, str):
                value = str(self.home / value)
            found[key] = value
        return found
