"""Files that the process which keeps the state holds good for all workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gateway.live_policy import ACTIVE, CANARY, MakePolicy
from gateway.metrics import GatewayMetrics
from gateway.workers.good_copy import GoodCopy
from prfaas.settings import GatewaySettings, PolicySettings
from prfaas.tenants import load_tenants

SHADOW = "shadow"


def policies_of(gateway: GatewaySettings) -> dict[str, PolicySettings]:
    """By role."""
    roles = ((ACTIVE, gateway.policy), (CANARY, gateway.canary), (SHADOW, gateway.shadow))
    return {role: policy for role, policy in roles if policy is not None}


def policy_copy(directory: Path, role: str) -> Path:
    return directory / f"policy-{role}.yaml"


def tenants_copy(directory: Path) -> Path:
    return directory / "tenants.yaml"


def members_copy(directory: Path) -> Path:
    return directory / "members.yaml"


def good_copies(
    gateway: GatewaySettings, directory: Path, make_policy: MakePolicy, metrics: GatewayMetrics
) -> dict[str, GoodCopy]:
    """Of policies, by role, and of tenants. Raises ConfigError for what is no good at the start."""

    def loads(file: Path) -> object:
        return make_policy(PolicySettings(file=file))

    def refused(count: Callable[[], None]) -> Callable[[str], None]:
        """Workers count what they load."""
        return lambda result: count() if result == "refused" else None

    copies = {
        role: GoodCopy(
            f"the {role} policy",
            policy.file,
            policy_copy(directory, role),
            loads,
            refused(lambda role=role: metrics.policy_changed(role, "refused")),  # type: ignore[misc]
        )
        for role, policy in policies_of(gateway).items()
        if policy.file is not None
    }
    file = gateway.tenants.file
    if file is not None:
        copies["tenants"] = GoodCopy(
            "the file of tenants",
            file,
            tenants_copy(directory),
            load_tenants,
            refused(lambda: metrics.tenants.reloaded("refused")),
        )
    return copies
