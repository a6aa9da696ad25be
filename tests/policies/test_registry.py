"""Policies are found by name, and a wrong name is answered with the right ones."""

import subprocess
import sys

import pytest

from policies.registry import POLICIES, make_policy
from prfaas.errors import ConfigError
from prfaas.settings import PolicySettings


def test_every_policy_is_made_under_its_own_name() -> None:
    for name in POLICIES:
        assert make_policy(PolicySettings(name=name)).name == name


def test_the_default_setting_names_a_policy() -> None:
    assert make_policy(PolicySettings()).name == "least_ttft"


def test_unknown_name_is_answered_with_the_valid_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        make_policy(PolicySettings(name="fastest"))
    assert caught.value.message == (
        "gateway.policy.name: 'fastest' is not one of "
        "always_local, always_remote, balanced_random, least_ttft, length_threshold, local_first, "
        "paper, priced, uncached_ratio"
    )


def test_policies_import_without_torch() -> None:
    code = "import policies.registry, sys; assert 'torch' not in sys.modules; print('ok')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.strip() == "ok", done.stderr
