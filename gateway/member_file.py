"""The file that lists engines and peers: read as a whole or not at all."""

from __future__ import annotations

from pathlib import Path

import yaml
from pydantic import Field, ValidationError

from gateway.members import Members
from prfaas.errors import ConfigError
from prfaas.section import Section
from prfaas.settings import EngineEndpoint, PeerEndpoint, validation_message

MAX_BYTES = 4 << 20

Stamp = tuple[int, int, int]


class _File(Section):
    """Lists as in the configuration."""

    engines: tuple[EngineEndpoint, ...] = Field(())
    peers: tuple[PeerEndpoint, ...] = Field(())


def read_members(file: Path) -> Members:
    """YAML or JSON with `engines` and `peers`. Raises ConfigError naming file and key."""
    try:
        with file.open("rb") as opened:
            raw = opened.read(MAX_BYTES + 1)
    except OSError as exc:
        raise ConfigError(f"cannot read {file}: {exc.strerror}") from exc
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"{file} is larger than {MAX_BYTES} bytes")
    try:
        data = yaml.safe_load(raw)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as exc:
        raise ConfigError(f"{file} is not YAML: {exc}") from exc
    if not isinstance(data, dict):  # an empty file is one that is just being written
        raise ConfigError(f"{file}: the top level must be a mapping with engines and peers")
    try:
        listed = _File.model_validate(data)
    except ValidationError as exc:
        raise ConfigError(f"{file}: {validation_message(exc)}") from exc
    return Members(listed.engines, listed.peers)


def stamp_of(file: Path) -> Stamp | None:
    """Changes when the file does, also behind a link that is moved; None where there is none."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
