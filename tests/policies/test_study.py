"""Studies: resumable, honest about what they had not seen, and refused where they make no sense."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from policies.planner import Infeasible
from policies.policy_file import load_policy_file
from policies.registry import make_policy
from policies.study import (
    Problem,
    Progress,
    StudySpec,
    cost_per_million,
    finished,
    open_study,
    run_trials,
    tune,
)
from policies.tune_command import Reporter, TuneOptions, policy_file
from policies.workload.request import Request
from prfaas.cli import cli
from prfaas.errors import ConfigError
from prfaas.settings import PolicySettings
from prfaas.testing.redis_server import WHY_SKIPPED, found, redis_server

SCENARIO: dict[str, Any] = {
    "name": "small",
    "local": {"prefill": "paper-h20", "instances": 8, "prefill_instances": 3},
    "peers": [{"profile": "paper-h200", "instances": 4, "link": {"gbit_per_s": 100.0}}],
    "objectives": {"ttft_p90_s": 10.0, "ttft_p99_s": 20.0},
    "workload": {"requests": 400, "arrivals": {"rate_per_s": 2.5}},
}


def scenario_file(path: Path, **changes: Any) -> str:
    file = path / "scenario.yaml"
    file.write_text(yaml.safe_dump({**SCENARIO, **changes}))
    return str(file)


def spec(path: Path, **changes: Any) -> StudySpec:
    scenario = scenario_file(path, **changes.pop("scenario", {}))
    return replace(StudySpec(scenario, "length_threshold", "ttft"), **changes)


def test_a_study_finds_a_better_threshold_and_reports_what_it_had_not_seen(tmp_path: Path) -> None:
    wanted = spec(tmp_path)
    tuned = tune(wanted, str(tmp_path / "s.journal"), 8, 1)
    assert tuned.trials == 8
    assert tuned.trained.value < 100
    assert tuned.tested.value < 0.8 * tuned.default_tested.value
    assert list(tuned.history) == sorted(tuned.history, reverse=True)
    problem = Problem.read(wanted)
    rows = [*problem.training.requests, *problem.testing.requests]
    assert [r.number for r in rows] == list(range(400))
    assert problem.testing.requests[0].arrival_s == 0.0
    again = problem.score(tuned.parameters, "fcfs", problem.testing)
    assert again.summary == tuned.tested.summary


def test_a_killed_study_goes_on_and_does_not_count_what_was_half_done(tmp_path: Path) -> None:
    wanted, storage = spec(tmp_path), str(tmp_path / "s.journal")
    problem, study = Problem.read(wanted), open_study(wanted, storage, "a")
    run_trials(problem, study, 2, 0)
    study.ask()  # a trial that its process did not live to finish
    again = open_study(wanted, storage, "a")
    assert finished(again) == 2
    run_trials(problem, again, 4, 0)
    assert finished(open_study(wanted, storage, "a")) == 4


def test_several_processes_work_on_one_study(tmp_path: Path) -> None:
    tuned = tune(spec(tmp_path), str(tmp_path / "s.journal"), 6, 2)
    assert 6 <= tuned.trials <= 7


@pytest.mark.skipif(not found(), reason=WHY_SKIPPED)
async def test_machines_join_one_study_in_redis_wherever_their_files_are(tmp_path: Path) -> None:
    here, there = tmp_path / "a", tmp_path / "b"
    here.mkdir()
    there.mkdir()
    async with redis_server(tmp_path) as server:
        storage = server.url()
        one, other = spec(here), spec(there)
        study = await asyncio.to_thread(open_study, one, storage, "a")
        await asyncio.to_thread(run_trials, Problem.read(one), study, 1, 0)
        tuned = await asyncio.to_thread(tune, other, storage, 3, 1, name="a")
        assert tuned.trials == 3
        assert finished(open_study(one, storage, "a")) == 3
        changed = spec(there, scenario={"quality": "compact"})
        with pytest.raises(ConfigError, match="another scenario"):
            await asyncio.to_thread(open_study, changed, storage, "a")


def test_machines_join_one_study_in_a_database(tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path}/s.db"
    study = open_study(spec(tmp_path), storage, "a")
    run_trials(Problem.read(spec(tmp_path)), study, 1, 0)
    assert tune(spec(tmp_path), storage, 2, 1, name="a").trials == 2


@pytest.mark.parametrize(
    ("storage", "words"),
    [
        ("redis://me:secret@127.0.0.1:1/0", "127.0.0.1:1"),
        ("nodb://me:secret@there/x", "there"),
        ("mysql+nodriver://me:secret@there/x", "there"),
        ("sqlite:////no/such/folder/s.db", "unable to open"),
        ("/no/such/folder/s.journal", "No such file or directory"),
    ],
)
def test_a_storage_that_is_not_there_is_named_without_its_password(
    tmp_path: Path, storage: str, words: str
) -> None:
    with pytest.raises(ConfigError, match="storage") as error:
        open_study(spec(tmp_path), storage, "a")
    assert words in error.value.message
    assert "secret" not in error.value.message


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_storage_that_fails_while_the_study_runs_is_named(
    jobs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from optuna.storages.journal import JournalFileBackend

    path, written = str(tmp_path / "study.journal"), []
    append = JournalFileBackend.append_logs

    def fills_up(self: Any, logs: Any) -> None:
        written.append(logs)
        if len(written) > 4:
            raise OSError(28, "No space left on device")
        append(self, logs)

    monkeypatch.setattr(JournalFileBackend, "append_logs", fills_up)
    with pytest.raises(ConfigError, match=f"storage {path}: No space left on device"):
        tune(spec(tmp_path), path, trials=2, jobs=jobs)


def test_a_file_of_something_else_is_no_storage(tmp_path: Path) -> None:
    other = tmp_path / "policy.yaml"
    other.write_text("policy_version: 1\n")
    with pytest.raises(ConfigError, match="is not a journal of Optuna's"):
        open_study(spec(tmp_path), str(other), "a")
    assert other.read_text() == "policy_version: 1\n"


@pytest.mark.parametrize("option", ["--write", "--report"])
def test_what_cannot_be_written_is_refused_before_the_search(tmp_path: Path, option: str) -> None:
    there = spec(tmp_path).scenario
    words = ("tune", there, "--storage", str(tmp_path / "s.journal"), option)
    done = CliRunner().invoke(cli, [*words, str(tmp_path / "none" / "x")])
    assert isinstance(done.exception, ConfigError), done.output
    assert "none is no directory" in done.exception.message
    assert not (tmp_path / "s.journal").exists()


def test_progress_is_told_now_and_then_and_at_the_end(tmp_path: Path) -> None:
    told: list[Progress] = []
    tune(spec(tmp_path), str(tmp_path / "s.journal"), 3, 1, told=told.append)
    assert [(p.finished, p.trials) for p in told] == [(1, 3), (2, 3), (3, 3)]
    assert [p.best for p in told] == sorted((p.best for p in told), reverse=True)  # type: ignore[type-var]
    now, lines = [0.0], []
    reporter = Reporter("rate", lines.append, lambda: now[0])
    for at_s, done, best in ((1.0, 1, None), (3.0, 2, None), (4.0, 3, -2.5), (5.0, 4, -2.5)):
        now[0] = at_s
        reporter.tell(Progress(done, 4, best))
    assert lines == [
        "2 of 4 trials, none holds the objectives; about 3 s more",
        "4 of 4 trials, best 2.5 requests/s",
    ]


def test_a_killed_command_leaves_no_worker_behind_and_goes_on(tmp_path: Path) -> None:
    storage = str(tmp_path / "s.journal")
    command = [
        sys.executable, "-m", "prfaas", "tune", scenario_file(tmp_path), "--goal", "ttft",
        "--jobs", "2", "--trials", "100000", "--storage", storage, "--study", "a",
    ]  # fmt: skip
    running = subprocess.Popen(command, start_new_session=True)
    try:
        wanted = spec(tmp_path, policy="priced")
        for _ in range(600):
            time.sleep(0.1)
            if Path(storage).exists() and finished(open_study(wanted, storage, "a")) >= 4:
                break
    finally:
        running.kill()
        running.wait()
    for _ in range(300):
        if not group_is_there(running.pid):
            break
        time.sleep(0.1)
    assert not group_is_there(running.pid)
    done = finished(open_study(wanted, storage, "a"))
    assert done >= 4
    assert tune(wanted, storage, done + 1, 1, name="a").trials == done + 1


def group_is_there(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_the_defaults_are_tried_first(tmp_path: Path) -> None:
    wanted = spec(tmp_path, policy="priced")
    study = open_study(wanted, str(tmp_path / "s.journal"), "a")
    run_trials(Problem.read(wanted), study, 1, 0)
    usual = PolicySettings()
    (trial,) = study.get_trials()
    assert trial.params == {name: getattr(usual, name) for name in trial.params}


def test_a_study_of_something_else_is_refused(tmp_path: Path) -> None:
    storage = str(tmp_path / "s.journal")
    open_study(spec(tmp_path), storage, "a")
    with pytest.raises(ConfigError, match="another scenario, workload, policy, goal, queue"):
        open_study(spec(tmp_path, policy="paper"), storage, "a")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"goal": "rate", "scenario": {"objectives": {}}}, "without objectives on TTFT"),
        ({"goal": "cost"}, "needs prices"),
        ({"policy": "always_local"}, "no parameters to search"),
        ({"policy": "prices"}, "no policy 'prices'"),
        ({"train_share": 1.0}, "training share"),
        ({"scenario": {"objectives": {"ttft_p90_s": 5.0, "ttft_p99_s": 2.0}}}, "contradicts"),
        ({"scenario": {"workload": {"requests": 2}}}, "too small"),
    ],
)
def test_what_contradicts_itself_is_refused(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        Problem.read(spec(tmp_path, **changes))


def test_what_no_configuration_meets_is_infeasible_and_names_a_stage(tmp_path: Path) -> None:
    """Case 45: the split is left to the planner, which says so before any trial."""
    local = {"prefill": "paper-h20", "instances": 8}
    impossible = {"local": local, "objectives": {"ttft_p90_s": 0.2}}
    with pytest.raises(Infeasible) as caught:
        Problem.read(spec(tmp_path, goal="rate", scenario=impossible))
    assert caught.value.stage


def test_trials_that_never_hold_objectives_end_in_an_error(tmp_path: Path) -> None:
    wanted = spec(tmp_path, scenario={"objectives": {"ttft_p90_s": 0.2}})
    with pytest.raises(ConfigError, match="infeasible: none of 2 trials"):
        tune(wanted, str(tmp_path / "s.journal"), 2, 1)


def test_cost_counts_nodes_and_egress(tmp_path: Path) -> None:
    prices = {
        "local_instance_per_hour": 10.0, "remote_instance_per_hour": 20.0, "egress_per_gb": 0.1,
    }  # fmt: skip
    problem = Problem.read(spec(tmp_path, goal="cost", scenario={"prices": prices}))
    score = problem.score({"threshold_tokens": 20000}, "fcfs", problem.training)
    gb = score.summary.egress_gb / score.summary.requests
    assert score.value == pytest.approx(1e6 * (160 / 3600 / score.rate_per_s + 0.1 * gb))
    assert cost_per_million(problem.scenario, 1e9, score.summary) == pytest.approx(1e5 * gb, 1e-3)


def test_parts_run_at_any_rate(tmp_path: Path) -> None:
    problem = Problem.read(spec(tmp_path))
    fast: list[Request] = list(problem.testing.at(10.0))
    assert (len(fast) - 1) / fast[-1].arrival_s == pytest.approx(10.0)


def test_the_command_writes_a_policy_file_and_a_page_that_stand_alone(tmp_path: Path) -> None:
    scenario = scenario_file(tmp_path)
    policy, page = tmp_path / "policy.yaml", tmp_path / "report.html"
    arguments = [
        "tune", scenario, "--policy", "priced", "--goal", "ttft", "--trials", "2", "--jobs", "1",
        "--queue-order", "search", "--storage", str(tmp_path / "s.journal"),
        "--write", str(policy), "--report", str(page), "--json",
    ]  # fmt: skip
    done = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    assert data["trials"] == 2
    file = load_policy_file(policy)
    assert file.policy == "priced"
    assert file.made is not None
    assert file.made.tested == pytest.approx(data["tested"]["value"])
    assert (file.made.study, file.made.seed) == ("priced-ttft", 0)
    assert file.made.storage == str(tmp_path / "s.journal")
    again = [*shlex.split(file.made.command)[1:], "--storage", str(tmp_path / "2"), "--json"]
    assert json.loads(CliRunner().invoke(cli, again, catch_exceptions=False).stdout) == data
    assert file.queue is not None
    assert file.queue.name == data["queue_order"]
    assert make_policy(PolicySettings(file=policy)).name == "priced"
    html = page.read_text()
    assert html.count("<svg") == 11
    assert not any(word in html for word in ("<script", "<link", "src=", "@import"))
    assert "always_local" in html
    assert html.count("objective: 10 s") == html.count("objective: 20 s") == 1


def test_the_command_that_searches_so_again_has_every_choice(tmp_path: Path) -> None:
    chosen = StudySpec(
        "my site.yaml", "priced", "cost", None, True, True, Path("t.csv"), "azure", 0.25, 7
    )
    options = TuneOptions(chosen, "redis://:secret@host:6379/0", 40, 2, "mine")
    assert options.command == (
        "prfaas tune 'my site.yaml' --policy priced --goal cost --trace t.csv --trace-format azure "
        "--train-share 0.25 --queue-order search --shape --trials 40 --jobs 2 --study mine --seed 7"
    )
    tuned = tune(spec(tmp_path), str(tmp_path / "s.journal"), 1, 1)
    made = policy_file(tuned, options).made
    assert made is not None
    assert (made.study, made.storage) == ("mine", "redis://host:6379/0")


def test_simulate_takes_the_policy_file(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    text = "policy_version: 1\npolicy: priced\nparameters: {length_price_s: 1.0}\n"
    arguments = ["simulate", scenario_file(tmp_path), "--policy-file", str(policy), "--json"]
    for queue, said in (("", False), ("queue: {name: srpt}\n", True)):
        policy.write_text(text + queue)
        done = CliRunner().invoke(cli, arguments, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        assert [row["policy"] for row in json.loads(done.stdout)] == ["priced"]
        assert ("queue order srpt, as the policy file has it" in done.stderr) == said


PRICES = {
    "local_instance_per_hour": 10.0,
    "remote_instance_per_hour": 30.0,
    "egress_per_gb": 0.01,
}


def test_the_shape_of_a_site_is_searched_and_kept(tmp_path: Path) -> None:
    """One node of eight that prefills is far too few, so the study has to find more."""
    starved = {
        "local": {"prefill": "paper-h20", "instances": 8, "prefill_instances": 1},
        "workload": {"requests": 200, "arrivals": {"rate_per_s": 0.4}},
    }
    wanted = spec(tmp_path, policy="always_local", scenario=starved, tune_shape=True)
    tuned = tune(wanted, str(tmp_path / "s.journal"), 6, 1)
    assert tuned.shape.prefill_instances is not None
    assert tuned.shape.prefill_instances > 1
    assert tuned.shape.peer_instances in range(1, 5)
    assert tuned.parameters == {}
    assert tuned.tested.summary.ttft_mean_s < tuned.default_tested.summary.ttft_mean_s
    problem = Problem.read(wanted).shaped(tuned.shape)
    assert problem.scenario.local.prefill_instances == tuned.shape.prefill_instances
    again = problem.score(tuned.parameters, "fcfs", problem.testing)
    assert again.summary == tuned.tested.summary


@pytest.mark.parametrize(
    "scenario",
    [
        {"local": {"prefill": "paper-h20", "instances": 4, "colocated": True}, "peers": []},
        {"local": {"prefill": "paper-h20", "instances": 4, "colocated": True},
         "peers": [{"profile": "paper-h200", "instances": 1, "link": {"gbit_per_s": 1.0}}]},
    ],
)  # fmt: skip
def test_a_site_without_a_shape_to_search_says_so(tmp_path: Path, scenario: Any) -> None:
    with pytest.raises(ConfigError, match="nothing to search"):
        Problem.read(spec(tmp_path, scenario=scenario, tune_shape=True))


def test_a_front_has_a_higher_rate_only_at_a_higher_cost(tmp_path: Path) -> None:
    page = tmp_path / "front.html"
    changes = {"prices": PRICES, "workload": {"requests": 200, "arrivals": {"rate_per_s": 2.5}}}
    arguments = [
        "tune", scenario_file(tmp_path, **changes), "--policy", "length_threshold", "--goal",
        "pareto", "--shape", "--trials", "6", "--jobs", "1",
        "--storage", str(tmp_path / "s.journal"), "--report", str(page),
    ]  # fmt: skip
    done = CliRunner().invoke(cli, [*arguments, "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    assert data["trials"] == 6
    points = data["front"]
    assert points
    html = page.read_text()
    # Rate and cost, and both objectives
    assert html.count("<svg") == 3
    assert html.count("<tr>") == 1 + len(points)
    assert not any(word in html for word in ("<script", "<link", "src=", "@import"))
    assert all(
        one["rate_per_s"] < other["rate_per_s"] and one["cost"] < other["cost"]
        for one, other in pairwise(points)
    )
    assert all(1 <= point["shape"]["prefill_instances"] < 8 for point in points)
    assert any(point["tested"] for point in points)
    refused = CliRunner().invoke(cli, [*arguments, "--write", str(tmp_path / "policy.yaml")])
    assert "a Pareto front has several" in str(refused.exception)
    shown = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert len(shown.stdout.splitlines()) == 2 + len(points)
    refused = CliRunner().invoke(cli, [*arguments, "--write", str(tmp_path / "p.yaml")])
    assert isinstance(refused.exception, ConfigError)
    assert "several" in refused.exception.message
