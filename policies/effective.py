"""Which policy with which parameters settings come to, a policy file read."""

from __future__ import annotations

from policies.policy_file import load_policy_file
from prfaas.settings import PolicySettings


def effective(settings: PolicySettings) -> PolicySettings:
    """The settings themselves, or those of the file that they name. Raises ConfigError."""
    return settings if settings.file is None else load_policy_file(settings.file).settings()
