"""What a gateway's configuration lacks for what gateways share."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.app import check_settings
from policies.registry import make_policy
from prfaas.check.findings import Level
from prfaas.check.gateway_part import Parts, check_gateway
from prfaas.settings import Settings, StateSettings

URL = "http://127.0.0.1:1"


async def reached(_: StateSettings) -> None:
    """It is there."""


@pytest.mark.parametrize(
    ("fields", "warned"),
    [
        ({}, True),
        ({"cache_secret": "secret"}, False),
        ({"engines": [{"name": "d-0", "url": URL}]}, False),
        ({"state": {"redis": "redis://h", "share_prefixes": False}}, False),
        ({"state": {}}, False),
    ],
)
async def test_gateways_that_share_no_prefixes_are_told_why(
    fields: dict[str, Any], warned: bool
) -> None:
    gateway = {
        "engines": [{"name": f"d-{at}", "url": URL} for at in range(2)],
        "state": {"redis": "redis://h"},
        **fields,
    }
    parts = Parts(check_settings, make_policy, reached)
    findings = await check_gateway(Settings(gateway=gateway), parts, 5.0)
    found = [each for each in findings.items if each.what == "gateway.cache_secret"]
    assert [each.level for each in found] == [Level.WARN] * warned
