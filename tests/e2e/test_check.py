"""`prfaas check` of a stack that runs: nothing to mend as it is, and each thing that is broken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.app import check_settings
from policies.registry import make_policy
from prfaas.check.findings import Findings, Level
from prfaas.check.gateway_part import Parts
from prfaas.check.run import check
from prfaas.cli import _reach_state
from prfaas.testing.stack import RunningStack
from prfaas.up.stack import free_ports

PARTS = Parts(check_settings, make_policy, _reach_state)


def wrong(findings: Findings) -> dict[str, str]:
    return {f"{f.what}: {f.found}": f.mend for f in findings if f.level is Level.FAIL}


async def of(file: Path) -> Findings:
    return await check(file, PARTS, 10.0)


@pytest.mark.parametrize("name", ["gateway", "d-agent", "p-agent", "d-engine", "p-engine"])
async def test_a_stack_that_runs_has_nothing_to_mend(fp32_one: RunningStack, name: str) -> None:
    findings = await of(fp32_one.stack.directory / f"{name}.yaml")
    assert wrong(findings) == {}
    assert findings.count(Level.OK) > 1


async def test_a_gateway_that_runs_agrees_with_all_that_it_names(fp32_one: RunningStack) -> None:
    findings = await of(fp32_one.stack.directory / "gateway.yaml")
    said = {f"{f.what}: {f.found}" for f in findings}
    model = fp32_one.stack.plan.served_model_name
    for each in (
        f"engine d-0: serves {model}",
        "engine d-0: its tokenizer agrees with gateway.tokenizer",
        "agent of d-0: knows gateway.transfer_key",
    ):
        assert each in said
    assert any(each.startswith("agent of d-0: link to p/p-0: ") for each in said)
    assert any(each.startswith("peer p/p-0: hears ") for each in said)


def _port(port: int) -> str:
    return f"127.0.0.1:{port}"


BROKEN: list[tuple[str, Any, str, str]] = [
    ("model", "other", "engine d-0: serves ", "set gateway.model to the name"),
    ("transfer_key", "another key", "agent of d-0: does not know gateway", "put the same key"),
    ("engines.0.url", "http://127.0.0.1:{free}", "engine d-0: http://127", "start the engine, or"),
    ("engines.0.agent", "127.0.0.1:{free}", "agent of d-0: connection refused", "start what"),
    ("engines.0.agent", "nowhere.invalid:1", "agent of d-0: gateway.engines d-0 agent: ", "tls"),
    ("engines.0.agent", "{peer}", "agent of d-0: its engine has the roles prefill", "which agent"),
    ("peers.0.peer", "q", "agent of d-0: knows no q/p-0", "exactly as in gateway.peers"),
    ("state.redis", "redis://127.0.0.1:{free}/0", "gateway.state.redis: Redis", "docs/state.md"),
    ("policy.name", "none", "gateway.policy: ", "policy files"),
    ("tokenizer", "/none", "gateway.tokenizer: /none is neither", "GGUF"),
    ("peers.0.watch", "127.0.0.1:{free}", "peer p/p-0: connection refused", "start what"),
]


@pytest.mark.parametrize(("key", "value", "found", "mend"), BROKEN, ids=[b[2] for b in BROKEN])
async def test_what_is_broken_is_named_with_how_to_mend_it(
    fp32_one: RunningStack, tmp_path: Path, key: str, value: Any, found: str, mend: str
) -> None:
    config = yaml.safe_load((fp32_one.stack.directory / "gateway.yaml").read_text())
    (free,) = free_ports(1)
    if isinstance(value, str):
        value = value.format(free=free, peer=_port(fp32_one.stack.ports.p_agent))
    *way, last = key.split(".")
    place: Any = config["gateway"]
    for step in way:
        place = place[int(step)] if step.isdigit() else place.setdefault(step, {})
    place[last] = value
    file = tmp_path / "gateway.yaml"
    file.write_text(yaml.safe_dump(config))
    problems = wrong(await of(file))
    said = [what for what in problems if what.startswith(found)]
    assert said, problems
    assert mend in problems[said[0]]
