"""Policy files: a policy and its parameters, versioned; the tuner writes and gateways load them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from policies.parameters import SPANS, parameters_of
from prfaas.errors import ConfigError
from prfaas.profile import Part, parse_as, read_yaml
from prfaas.queue_settings import QueueSettings
from prfaas.settings import PolicySettings, validation_message

Value = float | int | None


class Made(Part):
    """Where the parameters come from, for people."""

    study: str = Field("", description="Study that found them: its name in the storage.")
    storage: str = Field("", description="File or URL that holds the study, without its password.")
    command: str = Field("", description="Searches so again, in a storage that has no such study.")
    scenario: str = Field("", description="Scenario they were found on.")
    workload: str = Field("", description="Workload, and the part that trained.")
    objective: str = Field("", description="What was sought.")
    trials: int = Field(0, ge=0, description="Trials of the study.")
    seed: int = Field(0, ge=0, description="Of the search.")
    trained: float | None = Field(None, description="Value on the part that trained.")
    tested: float | None = Field(None, description="Value on the part that did not.")


class PolicyFile(Part):
    """One policy with its parameters; frozen, nothing to close."""

    policy_version: Literal[1] = Field(description="Version of this file's format.")
    policy: str = Field(description="Registered policy name.")
    parameters: Mapping[str, Value] = Field(
        default_factory=dict,
        description="As in `gateway.policy`; defaults where left out.",
    )
    queue: QueueSettings | None = Field(
        None,
        description="Order in which requests wait in the gateway; none: what `gateway.queue` says.",
    )
    made: Made | None = Field(None, description="Where they come from.")

    @field_validator("policy")
    @classmethod
    def _registered(cls, policy: str) -> str:
        if policy not in SPANS:
            meant = _meant(policy, SPANS)
            raise ValueError(f"no policy {policy!r}{meant or '; there are ' + ', '.join(SPANS)}")
        return policy

    @model_validator(mode="after")
    def _parameters_are_the_policys(self) -> Self:
        known = parameters_of(self.policy)
        problems = [_problem(key, self.policy) for key in self.parameters if key not in known]
        if problems:
            raise ValueError("; ".join(problems))
        try:
            self.settings()
        except ValidationError as error:
            raise ValueError(validation_message(error, "parameters")) from error
        return self

    def settings(self) -> PolicySettings:
        """What `make_policy` takes."""
        return PolicySettings.model_validate(
            {"name": self.policy, "queue": self.queue, **self.parameters}
        )


def load_policy_file(path: Path) -> PolicyFile:
    """Read and check a policy file. Raises ConfigError naming the file and every key at fault."""
    data = read_yaml(path)
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: a policy file is a mapping with policy_version and policy")
    for key in data:
        if key not in PolicyFile.model_fields:
            meant = _meant(str(key), PolicyFile.model_fields)
            known = f"; there are {', '.join(PolicyFile.model_fields)}"
            raise ConfigError(f"{path}: {key}: unknown key{meant or known}")
    return parse_as(PolicyFile, data, str(path), "policy file")


def is_policy_file(path: Path) -> bool:
    """Whether the file at `path` is meant as one, be it right or wrong."""
    data = read_yaml(path)
    return isinstance(data, dict) and "policy_version" in data


def to_yaml(file: PolicyFile) -> str:
    """The file's text; `load_policy_file` reads it back to an equal one."""
    data: dict[str, Any] = file.model_dump(exclude_none=False)
    data["parameters"] = dict(file.parameters)
    if file.queue is None:
        del data["queue"]
    if file.made is None:
        del data["made"]
    return yaml.safe_dump(data, sort_keys=False, width=100)


def _problem(key: str, policy: str) -> str:
    known = parameters_of(policy)
    with_unit = [name for name in known if name.startswith(f"{key}_")]
    where = f"parameters.{key}"
    if with_unit:
        return f"{where}: the unit is missing; did you mean {' or '.join(with_unit)}?"
    if key in PolicySettings.model_fields:
        return f"{where}: policy {policy} does not read it; it has {', '.join(known)}"
    return f"{where}: unknown key{_meant(key, known) or '; there are ' + ', '.join(known)}"


def _meant(word: str, known: Mapping[str, Any] | tuple[str, ...]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""
