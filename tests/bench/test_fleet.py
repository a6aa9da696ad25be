"""The fleets of the benchmark keep the paper's ratios, and the simulator gets the same ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.fleet import HOMOGENEOUS, PRFAAS
from bench.fleet_load import Asked, FleetLoad, drawn
from bench.fleet_site import (
    BYTES_OF_ONE,
    LINK_MBIT_S,
    TIME_SCALE,
    TOKENS_OF_ONE,
    output_tokens,
    prompt_tokens,
    simulated_site,
    write_fleet,
)
from local_engine.paced_profile import load_profile
from policies.profiles import find_profile
from policies.scenario import load_scenario
from prfaas.up.fleet import FleetPlan
from prfaas.up.fleet_file import read_fleet

LENGTHS = (1024, 8192, 32768, 131072)


@pytest.mark.parametrize("name", ["h20", "h200"])
def test_times_and_bytes_keep_the_papers_ratios(tmp_path: Path, name: str) -> None:
    write_fleet(tmp_path, **PRFAAS)
    here, paper = load_profile(tmp_path / f"{name}.yaml"), find_profile(f"paper-{name}")
    for tokens in LENGTHS:
        scaled_s = here.prefill_s(prompt_tokens(tokens))
        assert scaled_s == pytest.approx(TIME_SCALE * paper.prefill_s(tokens), rel=0.001)
    token_bytes = paper.model.token_bytes * TOKENS_OF_ONE / BYTES_OF_ONE
    assert here.model.token_bytes == pytest.approx(token_bytes, rel=0.001)
    answer_s = output_tokens() * here.step_s(1, 0)
    assert answer_s == pytest.approx(1024 * TIME_SCALE * paper.step_s(1, 0), rel=0.001)
    # Bytes are fewer and seconds shorter, and the link carries as many prompts a second.
    assert pytest.approx(100e3, rel=0.001) == LINK_MBIT_S * BYTES_OF_ONE * TIME_SCALE


@pytest.mark.parametrize("instances", [PRFAAS, HOMOGENEOUS])
def test_the_fleets_have_as_many_instances_as_the_papers(
    tmp_path: Path, instances: dict[str, int]
) -> None:
    file = write_fleet(tmp_path, **instances, gateways=3, redis="redis://127.0.0.1:1/0")
    plan = FleetPlan.create(read_fleet(file), file, tmp_path)
    assert plan.fleet.engines.count + len(plan.instances) == 12
    assert len(plan.gateways()) == 3
    assert len([*plan.prefill_side(), *plan.decode_side()]) == 24
    scenario, profiles = load_scenario(str(simulated_site(tmp_path, **instances)))
    assert scenario.local.instances == plan.fleet.engines.count
    assert sum(peer.instances for peer in scenario.peers) == len(plan.instances)
    for peer in plan.fleet.peers:
        live = load_profile(tmp_path / peer.engine["paced"])
        assert profiles.peers[peer.name].prefill == live.prefill


async def test_the_simulator_gets_the_requests_that_the_fleet_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []

    async def ask(self: FleetLoad, tokens: int) -> Asked:
        asked.append(tokens)
        return Asked("", 0.0, 0.0, 0.0)

    monkeypatch.setattr(FleetLoad, "_ask", ask)
    for words in (1, 2):
        await FleetLoad(["http://x"], 5, words).at_rate(200.0, 0.2)
        requests = drawn(5, 200.0, 0.2)
        assert asked == [request.prompt_tokens for request in requests]
        assert len(asked) > 20
        assert requests[0].arrival_s < requests[-1].arrival_s < 0.2
        asked.clear()
