"""Profiles by name: shipped ones, files, and rooflines such as `8xb200:qwen3-235b`."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from policies.roofline import SHIPPED, roofline, shipped_chips, shipped_models
from prfaas.errors import ConfigError
from prfaas.profile import Profile, load_profile

_NOT_PROFILES = ("chips.yaml", "models.yaml")
_ROOFLINE = re.compile(r"^(\d+)x([a-z0-9-]+):([a-z0-9.-]+)$")


def shipped_names() -> list[str]:
    """Names of the shipped profiles, rooflines aside."""
    return sorted(p.stem for p in SHIPPED.glob("*.yaml") if p.name not in _NOT_PROFILES)


def find_profile(spec: str) -> Profile:
    """The profile `spec` names: a shipped name, `NxCHIP:MODEL`, or a YAML file.

    Raises ConfigError that says what there is.
    """
    if spec in shipped_names():
        return load_profile(SHIPPED / f"{spec}.yaml")
    match = _ROOFLINE.match(spec.lower())
    if match is not None:
        return _roofline(int(match[1]), match[2], match[3])
    if Path(spec).suffix in (".yaml", ".yml"):
        return load_profile(Path(spec))
    raise ConfigError(
        f"no profile {spec!r}: give a YAML file, NxCHIP:MODEL for a roofline "
        f"(chips: {', '.join(shipped_chips())}; models: {', '.join(shipped_models())}), "
        f"or one of {', '.join(shipped_names())}"
    )


def to_yaml(profile: Profile) -> str:
    """The profile as a file that `find_profile` and paced engines read."""
    data = profile.model_dump(mode="json", exclude_none=True)
    return yaml.safe_dump(data, sort_keys=False, width=100)


def _roofline(chips: int, chip_name: str, model_name: str) -> Profile:
    chip, model = shipped_chips().get(chip_name), shipped_models().get(model_name)
    if chip is None:
        raise ConfigError(f"no chip {chip_name!r}: there are {', '.join(shipped_chips())}")
    if model is None:
        raise ConfigError(f"no model {model_name!r}: there are {', '.join(shipped_models())}")
    if chips < 1:
        raise ConfigError("a roofline needs at least one chip")
    return roofline(chip, chips, model_name, model)
