"""Messages between a link's owner and its emulator: JSON over a SOCK_SEQPACKET pair."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from bench.wanlink.shape import LinkChange, LinkShape, LinkStats, WayStats

MAX_MESSAGE_BYTES = 65536
PREFIX_BITS = 30


@dataclass(frozen=True, slots=True)
class Start:
    """All that an emulator needs to know: its namespaces, their addresses, and the link."""

    owner_pid: int
    namespaces: tuple[str, str]
    addresses: tuple[str, str]
    shape: LinkShape
    mtu: int
    seed: int
    cpu: int | None
    realtime: bool


@dataclass(frozen=True, slots=True)
class Failed:
    """The emulator's answer to what it could not do."""

    reason: str


Message = Start | LinkChange | LinkStats | Failed


def send(sock: socket.socket, message: Message) -> None:
    sock.send(json.dumps([type(message).__name__, asdict(message)]).encode())


def receive(sock: socket.socket) -> Message | None:
    """The next message, or None when the other end is closed; OSError if the socket fails."""
    data = sock.recv(MAX_MESSAGE_BYTES)
    if not data:
        return None
    kind, values = json.loads(data)
    return _PARSERS[kind](values)


def _start(values: dict[str, Any]) -> Start:
    values["shape"] = LinkShape(**values["shape"])
    values["namespaces"] = tuple(values["namespaces"])
    values["addresses"] = tuple(values["addresses"])
    return Start(**values)


def _stats(values: dict[str, Any]) -> LinkStats:
    values["ab"], values["ba"] = WayStats(**values["ab"]), WayStats(**values["ba"])
    return LinkStats(**values)


_PARSERS: dict[str, Callable[[dict[str, Any]], Message]] = {
    "Start": _start,
    "LinkChange": lambda values: LinkChange(**values),
    "LinkStats": _stats,
    "Failed": lambda values: Failed(**values),
}
