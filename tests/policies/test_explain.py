"""Explaining a logged decision: replayed as logged, and each flip is real and the nearest one."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from policies.explain import Explanation, Logged, explain, find, settings_of
from policies.inputs import inputs_of
from policies.registry import POLICIES, make_policy
from prfaas.cli import cli
from prfaas.errors import ConfigError
from prfaas.late_binding import Move
from prfaas.logs import REQUESTS, JsonFormatter
from prfaas.settings import PolicySettings
from prfaas.snapshot import Reason, RequestFacts, Snapshot, Target
from prfaas.testing.contracts import busy_snapshot, long_request


def line(
    name: str = "least_ttft",
    facts: RequestFacts | None = None,
    snapshot: Snapshot | None = None,
    request_id: str = "r1",
    **changes: Any,
) -> str:
    """As the gateway logs it."""
    policy = make_policy(PolicySettings(name=name))
    facts, snapshot = facts or long_request(), snapshot or busy_snapshot()
    state = policy.initial_state()
    row = {
        "request_id": request_id,
        "decision": policy.decide(facts, snapshot, state),
        "policy": name,
        "policy_state": state,
        "facts": facts,
        "snapshot": snapshot,
        **changes,
    }
    return "2026-01-01 INFO gateway.request " + msgspec.json.encode(row).decode() + "\n"


def explained(tmp_path: Path, text: str, **settings: Any) -> Explanation:
    log = tmp_path / "gateway.log"
    log.write_text(text)
    logged = find(log, None)
    return explain(logged, PolicySettings.model_validate({"name": logged.policy, **settings}))


def find_in(tmp_path: Path, text: str) -> Logged:
    log = tmp_path / "text.log"
    log.write_text(text)
    return find(log, None)


def test_the_logged_parameters_are_replayed(tmp_path: Path) -> None:
    log = tmp_path / "gateway.log"
    log.write_text(line("least_ttft", policy_parameters={"remote_margin": 0.9}))
    logged = find(log, None)
    assert settings_of(logged).remote_margin == 0.9
    assert explain(logged, settings_of(logged)).replayed.target is Target.LOCAL
    shown = CliRunner().invoke(cli, ["explain", str(log)])
    assert "replayed  local" in shown.output
    log.write_text(line("least_ttft"))
    assert settings_of(find(log, None)) == PolicySettings(name="least_ttft")


def test_parameters_of_another_version_are_an_error(tmp_path: Path) -> None:
    log = tmp_path / "gateway.log"
    log.write_text(line("least_ttft", policy_parameters={"remote_marge": 0.9}))
    with pytest.raises(ConfigError, match=r"r1: policy_parameters\.remote_marge"):
        settings_of(find(log, None))


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_replays_what_it_logged(tmp_path: Path, name: str) -> None:
    found = explained(tmp_path, line(name))
    assert found.same
    assert found.replayed == found.logged.decision


@pytest.mark.parametrize("name", ["least_ttft", "paper", "priced", "local_first"])
def test_flips_are_real_and_nothing_flips_before_them(tmp_path: Path, name: str) -> None:
    found = explained(tmp_path, line(name))
    policy, logged = make_policy(PolicySettings(name=name)), found.logged
    inputs = {moved.name: moved for moved in inputs_of(logged.facts, logged.snapshot)}
    state = policy.initial_state()
    seen = 0
    for flip in found.flips:
        moved = inputs.get(flip.name)
        if moved is None:
            continue
        seen += 1
        there = policy.decide(*moved.put(logged.facts, logged.snapshot, flip.at), state)
        assert there == flip.decision
        assert there.target is not found.replayed.target
        # A little nearer to what it was, nothing has changed yet.
        nearer = flip.at + (flip.now - flip.at) * 0.005
        if moved.as_is(nearer) != flip.at and abs(nearer - flip.at) > 2 * moved.grain:
            here = policy.decide(*moved.put(logged.facts, logged.snapshot, nearer), state)
            assert here.target is found.replayed.target, flip.name
    assert seen >= 8


def test_the_queue_that_would_have_kept_it_home_is_where_both_take_as_long(tmp_path: Path) -> None:
    found = explained(tmp_path, line(), remote_margin=0.0)
    flip = next(flip for flip in found.flips if flip.name == "peer/prefill-0 queue")
    local, remote = flip.decision.estimates
    assert flip.decision.reason is Reason.LOCAL_FASTER
    assert remote.ttft_s == pytest.approx(local.ttft_s, rel=0.01)


def test_a_parameter_is_moved_like_an_input(tmp_path: Path) -> None:
    found = explained(tmp_path, line("length_threshold"))
    (flip,) = [flip for flip in found.flips if flip.name == "policy threshold_tokens"]
    assert (flip.now, flip.at, flip.decision.target) == (2048, 4000, Target.LOCAL)
    assert "peer/prefill-0 round trip" in found.firm


def test_what_no_input_alone_changes_is_said(tmp_path: Path) -> None:
    found = explained(tmp_path, line("always_local"))
    assert found.flips == ()
    assert len(found.firm) > 10


def test_an_overridden_decision_and_other_parameters_are_told_apart(tmp_path: Path) -> None:
    log = tmp_path / "gateway.log"
    decided = make_policy(PolicySettings()).decide(
        long_request(), busy_snapshot(), make_policy(PolicySettings()).initial_state()
    )
    off = replace(decided, target=Target.LOCAL, reason=Reason.OFFLOAD_OFF, plan=())
    log.write_text(line(decision=off))
    done = CliRunner().invoke(cli, ["explain", str(log)])
    assert done.exit_code == 0, done.output
    assert "overrode the policy" in done.output
    log.write_text(line(decision=replace(off, reason=Reason.LOCAL_FASTER)))
    assert "other parameters" in CliRunner().invoke(cli, ["explain", str(log)]).output


def test_moves_of_a_request_that_waited_are_shown(tmp_path: Path) -> None:
    log = tmp_path / "gateway.log"
    there = Move("local", "peer/prefill-0", "peer_idle", 1.5, 4.25, 2.0)
    home = Move("peer/prefill-0", "local", "local_idle", 3.0, 2.5, 1.0)
    log.write_text(line(moves=(there, home)) + line(request_id="r2"))
    asked = ["explain", str(log), "--request-id", "r1"]
    shown = CliRunner().invoke(cli, asked).output.splitlines()
    assert shown[3] == (
        "moved     1.5 s after it came, from local to peer/prefill-0 (peer_idle): "
        "gains 2.25 s, 2 instead of 4.25 s from then on"
    )
    assert shown[4].startswith("moved     3 s after it came, from peer/prefill-0 to local (local_")
    data = json.loads(CliRunner().invoke(cli, [*asked, "--json"]).output)
    assert data["moves"][0] == {
        "after_s": 1.5,
        "from": "local",
        "to": "peer/prefill-0",
        "why": "peer_idle",
        "stay_s": 4.25,
        "go_s": 2.0,
        "gain_s": 2.25,
    }
    assert data["moves"][1]["gain_s"] == 1.5
    assert "moved " not in CliRunner().invoke(cli, ["explain", str(log)]).output


def test_a_log_in_json_is_read_too(tmp_path: Path) -> None:
    log = tmp_path / "gateway.log"
    row = line().partition("request ")[2].strip()
    record = logging.makeLogRecord({"name": REQUESTS, "msg": row, "levelname": "INFO"})
    log.write_text(JsonFormatter().format(record) + "\n")
    assert find(log, "r1") == find_in(tmp_path, line())


def test_the_command_finds_a_request_and_asks_other_policies(tmp_path: Path) -> None:
    log = tmp_path / "gateway.log"
    short = RequestFacts("r2", 40)
    log.write_text("starting {}\nnot { json\n" + line() + line(facts=short, request_id="r2"))
    last = CliRunner().invoke(cli, ["explain", str(log)])
    assert last.exit_code == 0, last.output
    assert last.output.startswith("r2: 40 prompt tokens")
    done = CliRunner().invoke(
        cli, ["explain", str(log), "--request", "r1", "--policy", "always_local", "--json"]
    )
    data = json.loads(done.output)
    assert (data["request_id"], data["same"], data["flips"]) == ("r1", False, [])
    policy = tmp_path / "policy.yaml"
    policy.write_text(
        "policy_version: 1\npolicy: length_threshold\nparameters: {threshold_tokens: 9000}\n"
    )
    options = ["explain", str(log), "--request", "r1", "--policy-file", str(policy)]
    assert "local (below_threshold)" in CliRunner().invoke(cli, options).output


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nothing here\n", "no line with a decision"),
        (line(policy=5), "gateway.log:1: not a line that this version wrote"),
        (line().replace(":4001", ':"many"'), "gateway.log:1"),
        (line(moves=[{"from": "local"}]), "gateway.log:1: not a line that this version wrote"),
        (line("priced", policy_state={"closed": "x"}), "the logged state is not priced's"),
        (line(policy="mine"), "'mine' is not one of"),
    ],
)
def test_what_cannot_be_explained_is_named(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        explained(tmp_path, text)


def test_a_request_that_is_not_there_is_named(tmp_path: Path) -> None:
    log = tmp_path / "gateway.log"
    log.write_text(line())
    with pytest.raises(ConfigError, match="no decision of 'r9'"):
        find(log, "r9")
    with pytest.raises(ConfigError, match="cannot read"):
        find(tmp_path / "none.log", None)
