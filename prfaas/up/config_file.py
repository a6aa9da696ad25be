"""The configuration file of one process, and how that process is started."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, SecretStr

from prfaas.settings import Settings
from prfaas.up.process import ProcessSpec


def write_config(
    directory: Path,
    name: str,
    command: str,
    base: Settings,
    section: Mapping[str, Any],
    core: int | None = None,
) -> ProcessSpec:
    """A private file in `directory` with `section` for `prfaas COMMAND`, and the process."""
    file = directory / f"{name}.yaml"
    content = {"config_version": base.config_version, "limits": base.limits, command: section}
    if base.tracing.endpoint:
        content["tracing"] = base.tracing
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as out:
        yaml.safe_dump(plain(content), out, sort_keys=False)
    arguments = ("-m", "prfaas", command, "--config", str(file))
    return ProcessSpec(name, arguments, directory / f"{name}.log", core)


def plain(value: object) -> object:
    """YAML's own types; secrets are written out, which is why the files are private."""
    if isinstance(value, BaseModel):
        return {name: plain(item) for name, item in value}
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(item) for item in value]
    return value
