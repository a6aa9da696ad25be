"""`prfaas plan`, `workload`, `simulate` and `profile`, as people run them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from prfaas.cli import cli
from prfaas.errors import ConfigError

SMALL: dict[str, Any] = {
    "scenario_version": 1,
    "name": "small",
    "local": {"prefill": "paper-h20", "instances": 4, "cache_tokens": 1_000_000},
    "peers": [{"profile": "paper-h200", "instances": 2, "link": {"gbit_per_s": 100.0}}],
    "prices": {
        "local_instance_per_hour": 10.0,
        "remote_instance_per_hour": 30.0,
        "egress_per_gb": 0.01,
    },
    "workload": {"requests": 300, "arrivals": {"rate_per_s": 0.8}},
}


def run(*words: str) -> Result:
    return CliRunner().invoke(cli, list(words))


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(SMALL))
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "t.jsonl"
    rows = [
        {"timestamp": 900 * n, "input_length": 1024 + 512 * (n % 30), "output_length": 20,
         "hash_ids": [*range(2 + n % 30)]}
        for n in range(200)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "{broken\n")
    return path


def test_plan_says_what_to_do_what_binds_and_what_it_costs(small: Path) -> None:
    done = run("plan", str(small), "--at-rate", "0.2")
    assert done.exit_code == 0, done.output
    for words in (
        "at 0.20 requests/s: 2 to ",
        "paper-h20 (derived)",
        "without queues",
        "with queues, the highest rate that holds",
        "binds",
        "D alone holds",
        "over other links",
        "for a thousand requests",
        "Pull directly, or through a shared cache layer? direct",
        "Move KV at once, or lazily? at once",
        "Reuse what P has",
    ):
        assert words in done.output


def test_plan_in_json_has_the_same_numbers(small: Path) -> None:
    found = json.loads(run("plan", str(small), "--at-rate", "0.2", "--json").stdout)
    assert found["advice"]["wanted"] < found["advice"]["running"] == 2
    assert found["plan"]["load"]["rate"] < found["paper"]["rate"]
    assert found["plan"]["binds"] in found["plan"]["gain"]
    rates = [row["rate"] for row in found["links"]]
    assert rates == sorted(rates, reverse=True)
    hour = found["costs"]["per_hour"]
    assert hour > 4 * 10 + 2 * 30
    per_request = hour / (found["plan"]["load"]["rate"] * 3600)
    assert found["costs"]["per_thousand_requests"] == pytest.approx(per_request * 1000)
    assert [answer["choice"] for answer in found["answers"]][:2] == ["direct", "at once"]


def test_plan_for_a_trace_counts_its_reuse_and_names_bad_rows(small: Path, trace: Path) -> None:
    done = run("plan", str(small), "--trace", str(trace))
    assert done.exit_code == 0, done.output
    assert "200 rows, 1 malformed ones left out: 1 x not JSON (line 201)" in done.output


def test_an_infeasible_objective_is_said_with_the_stage_and_ends_with_status_1(small: Path) -> None:
    done = run("plan", str(small), "--ttft-p90", "1")
    assert done.exit_code == 1
    assert "infeasible: TTFT P90 of 1 s cannot be held at any rate" in done.output
    assert "remote_prefill binds" in done.output
    rows = json.loads(run("plan", str(small), "--itl", "0.001", "--json").stdout)["links"]
    assert {(row["rate"], row["binds"]) for row in rows} == {(None, "decode")}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("plan", "--ttft-p90", "9", "--ttft-p99", "3"),
            "objectives: contradicts itself: P99 of TTFT (3 s) cannot be below P90 (9 s)",
        ),
        (("plan", "nowhere"), "no scenario 'nowhere'"),
        (("plan", "homogeneous", "--gbit-per-s", "5"), "has no peer"),
        (("simulate", "--policy", "best"), "'best' is not one of"),
        (("simulate", "--start", "1e9", "--prefill-nodes", "3"), "no request arrives after"),
        (("simulate", "--prefill-nodes", "8"), "8 of 8 nodes cannot prefill: at least one has to"),
        (("workload", "missing.jsonl"), "cannot read missing.jsonl"),
        (("profile", "show", "h300"), "no profile 'h300'"),
    ],
)
def test_what_is_wrong_is_said(words: tuple[str, ...], message: str) -> None:
    done = run(*words)
    assert done.exit_code != 0
    assert isinstance(done.exception, ConfigError)
    assert message in done.exception.message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"local": {**SMALL["local"], "cache": 5}}, "local.cache: the unit is missing; did you"),
        ({"objectives": {"ttft_p90_s": 2.0, "ttft_p99_s": 1.0}}, "contradicts itself"),
        ({"speed": 1}, "speed: unknown key"),
        ({"local": 5}, "local: is not a mapping of keys"),
        ({"local": {**SMALL["local"], "instances": 1}, "peers": []}, "(local.instances: 1) leaves"),
        ({"workload": {"kind": "sesions"}}, "workload.kind: Input should be 'lengths'"),
        ({"peers": SMALL["peers"] * 2}, "names must differ"),
        ({"local": {**SMALL["local"], "prefill_instances": 4}}, "no instance is left to decode"),
        ({"local": {**SMALL["local"], "prefill": "h200-qwen3-235b"}}, "not the same model"),
        ({"quality": "tight", "local": {**SMALL["local"], "prefill": "h200-ring-2.5-1t"},
          "peers": [{**SMALL["peers"][0], "profile": "h200-ring-2.5-1t"}]}, "no wire ratio"),
        ({"faults": [{"kind": "peer_down", "peer": "x", "at_s": 0, "for_s": 1}]}, "no peer 'x'"),
    ],
)  # fmt: skip
def test_a_scenario_that_is_wrong_is_an_error_that_names_the_key(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(yaml.safe_dump({**SMALL, **change}))
    done = run("plan", str(path))
    assert isinstance(done.exception, ConfigError), done.output
    assert message in done.exception.message


def peers(*profiles: str) -> list[dict[str, Any]]:
    return [
        {"name": f"p{n}", "profile": name, "instances": 1, "link": {"gbit_per_s": 50.0}}
        for n, name in enumerate(profiles)
    ]


def test_peers_of_one_kind_are_planned_as_one(small: Path, tmp_path: Path) -> None:
    one = json.loads(run("plan", str(small), "--json").stdout)
    path = tmp_path / "two.yaml"
    path.write_text(yaml.safe_dump({**SMALL, "peers": peers("paper-h200", "paper-h200")}))
    assert json.loads(run("plan", str(path), "--json").stdout)["plan"] == one["plan"]
    assert "2 peers are taken as one" in run("plan", str(path)).stdout
    done = run("simulate", str(path), "--policy", "paper")
    assert "of 4 nodes prefill, as the planner has it" in done.output
    path.write_text(yaml.safe_dump({**SMALL, "peers": peers("paper-h200", "paper-h20")}))
    done = run("simulate", str(path), "--policy", "paper")
    assert isinstance(done.exception, ConfigError), done.output
    assert "p0 (paper-h200) and p1 (paper-h20) differ" in done.exception.message
    assert "--prefill-nodes" in done.exception.message


def test_simulate_needs_a_node_that_prefills_at_d(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(yaml.safe_dump({**SMALL, "local": {**SMALL["local"], "prefill_instances": 0}}))
    done = run("simulate", str(path))
    assert isinstance(done.exception, ConfigError), done.output
    assert "no node prefills at D" in done.exception.message
    both = {"prefill": "paper-h20", "instances": 2, "colocated": True}
    path.write_text(yaml.safe_dump({**SMALL, "local": both}))
    done = run("simulate", str(path), "--prefill-nodes", "1")
    assert isinstance(done.exception, ConfigError), done.output
    assert "nodes that do both: they are not split" in done.exception.message


def test_simulate_compares_policies_and_asks_the_planner_for_the_split(small: Path) -> None:
    done = run("simulate", str(small), "--policy", "always_local", "--policy", "paper")
    assert done.exit_code == 0, done.output
    assert "of 4 nodes prefill, as the planner has it" in done.output
    lines = [line.split()[0] for line in done.stdout.splitlines()[2:] if not line.startswith(" ")]
    assert lines == ["always_local", "paper"]


def test_simulate_in_json_is_the_same_each_time_and_follows_the_seed(small: Path) -> None:
    words = ("simulate", str(small), "--prefill-nodes", "2", "--policy", "least_ttft", "--json")
    one = run(*words).stdout
    assert one == run(*words).stdout
    assert one != run(*words, "--seed", "3").stdout
    found = json.loads(one)[0]
    assert found["requests"] == 300
    assert found["rate_per_s"] == pytest.approx(0.8, rel=0.2)


def test_simulate_speeds_a_trace_up_to_a_rate(small: Path, trace: Path) -> None:
    words = ("simulate", str(small), "--trace", str(trace), "--policy", "always_local", "--json")
    done = run(*words, "--rate", "2.5", "--prefill-nodes", "2")
    assert json.loads(done.stdout)[0]["rate_per_s"] == pytest.approx(2.5, rel=0.02)
    assert "1 malformed" in done.stderr


def test_policy_parameters_come_from_a_configuration_file(small: Path, tmp_path: Path) -> None:
    config = tmp_path / "policy.yaml"
    words = (
        "simulate",
        str(small),
        "--prefill-nodes",
        "2",
        "--policy",
        "length_threshold",
        "--json",
    )
    for tokens, few in ((60_000, True), (100, False)):
        config.write_text(yaml.safe_dump({"gateway": {"policy": {"threshold_tokens": tokens}}}))
        share = json.loads(run(*words, "--policy-file", str(config)).stdout)[0]["offload_share"]
        assert (share < 0.3) is few
    config.write_text(yaml.safe_dump({"gateway": {"policy": {"threshold": 5}}}))
    assert "threshold" in str(run(*words, "--policy-file", str(config)).exception)
    for nothing in ("", "gateway: {port: 9000}"):
        config.write_text(nothing)
        error = str(run(*words, "--policy-file", str(config)).exception)
        assert "neither a policy file (it has no policy_version) nor a configuration file" in error


def test_workload_describes_a_trace(trace: Path) -> None:
    done = run("workload", str(trace))
    assert done.exit_code == 0, done.output
    assert "200 requests in 179.1 s: 1.11 a second" in done.stdout
    assert "of requests, all whole blocks" in done.stdout
    assert "1 malformed" in done.stderr
    found = json.loads(run("workload", str(trace), "--json").stdout)
    assert found["reuse_share_unbounded"] >= found["reuse_share"] > 0.5
    less = json.loads(run("workload", str(trace), "--json", "--cache-tokens", "1024").stdout)
    assert less["reuse_share"] < found["reuse_share"]


def test_a_generated_workload_is_written_and_read_back(small: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    made = run("workload", "--scenario", str(small), "--write", str(out), "--json")
    read = run("workload", str(out), "--json")
    one, other = json.loads(made.stdout), json.loads(read.stdout)
    assert one["prompt"] == other["prompt"]
    assert one["rate_per_s"] == pytest.approx(other["rate_per_s"], rel=0.01)
    assert isinstance(run("workload", str(out), "--write", "x").exception, ConfigError)


def test_workload_plots_are_drawn(trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("w.png", "w.svg"):
        done = run("workload", str(trace), "--plots", str(tmp_path / name))
        assert done.exit_code == 0, done.output
        assert (tmp_path / name).stat().st_size > 5000


def test_profiles_are_listed_and_shown_as_files_that_engines_read(tmp_path: Path) -> None:
    from local_engine.paced_profile import load_profile

    listed = run("profile", "list").stdout
    assert "paper-h200" in listed
    assert "rubin-cpx" in listed
    for name in ("paper-h200", "8xb200:qwen3-235b"):
        path = tmp_path / "p.yaml"
        path.write_text(run("profile", "show", name, "--tokenizer", "bytes").stdout)
        assert load_profile(path).tokenizer == tmp_path / "bytes"


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "--gbit-per-s", "inf"],
        ["plan", "--at-rate", "nan"],
        ["plan", "--ttft-p90", "inf"],
        ["simulate", "--rate", "inf"],
        ["simulate", "--start", "nan"],
    ],
)
def test_numbers_that_are_not_finite_are_refused_by_name(arguments: list[str]) -> None:
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 2
    assert f"'{arguments[1]}': {arguments[2]} is not a finite number" in done.output
