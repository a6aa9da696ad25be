"""Policies by name; an unknown name is answered with the valid ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from policies.always_local import AlwaysLocal
from policies.always_remote import AlwaysRemote
from policies.balanced_random import BalancedRandom
from policies.least_ttft import LeastTtft
from policies.length_threshold import LengthThreshold
from policies.local_first import LocalFirst
from policies.paper import PaperScheduler
from policies.policy_file import load_policy_file
from policies.priced import Priced
from policies.uncached_ratio import UncachedRatio
from prfaas.errors import ConfigError
from prfaas.interfaces import RoutingPolicy
from prfaas.settings import PolicySettings

POLICIES: Mapping[str, Callable[[PolicySettings], RoutingPolicy[Any]]] = MappingProxyType(
    {
        cls.name: cls
        for cls in (
            AlwaysLocal,
            AlwaysRemote,
            BalancedRandom,
            LeastTtft,
            LengthThreshold,
            LocalFirst,
            PaperScheduler,
            Priced,
            UncachedRatio,
        )
    }
)


def make_policy(settings: PolicySettings) -> RoutingPolicy[Any]:
    """The policy that `settings` or its file names, with its parameters. Raises ConfigError."""
    if settings.file is not None:
        others = sorted(settings.model_fields_set - {"file"})
        if others:
            raise ConfigError(
                f"gateway.policy.file: the file says which policy runs; remove {', '.join(others)}",
                field="gateway.policy.file",
            )
        settings = load_policy_file(settings.file).settings()
    make = POLICIES.get(settings.name)
    if make is None:
        raise ConfigError(
            f"gateway.policy.name: {settings.name!r} is not one of {', '.join(sorted(POLICIES))}",
            field="gateway.policy.name",
        )
    return make(settings)
