"""Instances are found by the names of the agent's own configuration, and by nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from prfaas.errors import ConfigError, InvalidRequest
from prfaas.settings import Settings
from prfaas.transfer import PlanStep
from remote_prefill.agent_main import AgentServer


async def test_a_plan_keeps_its_order_and_names_an_instance_once(decode_site: Any) -> None:
    d = await decode_site({"fra/p0": 1, "fra/p1": 1, "ams/p0": 1}, engine=None)
    plan = [PlanStep("ams", "p0"), PlanStep("fra", "p1"), PlanStep("ams", "p0")]
    assert [link.name for link in d.agent.pool.find(plan)] == ["ams/p0", "fra/p1"]
    assert d.agent.pool.find([]) == []
    assert d.agent.pool.ready_count == 0
    assert {(i.peer, i.instance, i.ready) for i in d.agent.pool.links()} == {
        ("fra", "p0", False),
        ("fra", "p1", False),
        ("ams", "p0", False),
    }


@pytest.mark.parametrize("step", [PlanStep("fra", "p2"), PlanStep("127.0.0.1:1", "p0")])
async def test_a_name_that_is_not_configured_is_refused(decode_site: Any, step: PlanStep) -> None:
    d = await decode_site({"fra/p0": 1}, engine=None)
    with pytest.raises(InvalidRequest, match=f"{step.peer}/{step.instance} is not one of"):
        d.agent.pool.find([PlanStep("fra", "p0"), step])


async def test_an_instance_configured_twice_is_a_config_error(tmp_path: Path) -> None:
    instances = [{"name": "p0", "address": "127.0.0.1:1"}] * 2
    agent = {"socket": tmp_path / "s", "peers": [{"name": "fra", "instances": instances}]}
    with pytest.raises(ConfigError, match="fra/p0 is there twice"):
        AgentServer(Settings.model_validate({"agent": agent}))
