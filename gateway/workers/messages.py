"""What workers and the process that keeps their state say to each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from pydantic import SecretStr, ValidationError

from gateway.members import Members
from prfaas.cluster_state import Report, Sent, Shared
from prfaas.errors import ProtocolError
from prfaas.settings import EngineEndpoint, PeerEndpoint, validation_message
from prfaas.telemetry import WatchUpdate

Plain = dict[str, Any]


class MembersAre(msgspec.Struct, frozen=True, tag=True):
    """Engines and peers from now on, as plain data; read it with `members`."""

    engines: tuple[Plain, ...]
    peers: tuple[Plain, ...]

    @staticmethod
    def of(members: Members) -> MembersAre:
        return MembersAre(
            tuple(map(_plain, members.engines)),
            tuple(map(_plain, members.peers)),
        )

    def members(self) -> Members:
        """Raises ProtocolError."""
        try:
            return Members(
                tuple(EngineEndpoint.model_validate(engine) for engine in self.engines),
                tuple(PeerEndpoint.model_validate(peer) for peer in self.peers),
            )
        except ValidationError as exc:
            raise ProtocolError(f"engines and peers: {validation_message(exc)}") from exc


# --- to workers: first the members and all that is known of each place, then what changes ---


class Fed(msgspec.Struct, frozen=True, tag=True):
    """An event of the agent at `place`, heard `age_s` ago."""

    place: str
    update: WatchUpdate
    age_s: float = 0.0


class Unfed(msgspec.Struct, frozen=True, tag=True):
    """The stream of the agent at `place` has ended."""

    place: str


class Answer(msgspec.Struct, frozen=True, tag=True):
    """To a `Tell`: all that was known at `at` is with the worker now."""

    at: float
    """On the monotonic clock that all processes of a machine share."""
    shared: Shared
    granted_tokens: int = 0
    """Of the fallback budget, by the other workers."""


class Heard(msgspec.Struct, frozen=True, tag=True):
    """What another worker or gateway has just sent."""

    sent: Sent


# --- from workers ---


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The first message of a worker."""

    index: int


class Tell(msgspec.Struct, frozen=True, tag=True):
    """One exchange."""

    report: Report
    granted_tokens: int = 0
    leaving: tuple[str, ...] = ()
    """Engines that have left and still answer requests of this worker."""


class TellSent(msgspec.Struct, frozen=True, tag=True):
    """What this one has just sent."""

    sent: Sent


class Leave(msgspec.Struct, frozen=True, tag=True):
    """This member is gone."""

    member_id: str


ToWorker = MembersAre | Fed | Unfed | Answer | Heard
FromWorker = Hello | Tell | TellSent | Leave


def _plain(endpoint: EngineEndpoint | PeerEndpoint) -> Plain:
    """With its secrets: the socket is for this user alone."""
    return {name: _revealed(value) for name, value in endpoint}


def _revealed(value: Any) -> Any:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, Mapping):
        return {key: _revealed(each) for key, each in value.items()}
    return value
