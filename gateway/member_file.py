"""The file that lists engines and peers: read as a whole or not at all."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, ValidationError

from gateway.members import Members
from prfaas.errors import ConfigError
from prfaas.following import read_mapping
from prfaas.section import Section
from prfaas.settings import EngineEndpoint, PeerEndpoint, validation_message


class _File(Section):
    """Lists as in the configuration."""

    engines: tuple[EngineEndpoint, ...] = Field(())
    peers: tuple[PeerEndpoint, ...] = Field(())


def read_members(file: Path) -> Members:
    """YAML or JSON with `engines` and `peers`. Raises ConfigError naming file and key."""
    data = read_mapping(file, "engines and peers")
    try:
        listed = _File.model_validate(data)
    except ValidationError as exc:
        raise ConfigError(f"{file}: {validation_message(exc)}") from exc
    return Members(listed.engines, listed.peers)
