"""The commands that plan and simulate, and that measure what they need: loaded when run."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from prfaas.cli_group import CommandGroup
from prfaas.errors import ConfigError

if TYPE_CHECKING:
    from prfaas.settings import PolicySettings

_FILE = click.Path(dir_okay=False, path_type=Path)


class _Finite(click.FloatRange):
    """A range takes `inf` and `nan`, with which nothing can be planned."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


_POSITIVE = _Finite(0, min_open=True)


@click.command()
@click.argument("scenario", default="paper")
@click.option("--trace", type=_FILE, help="Workload from a trace; default: the scenario's own.")
@click.option("--trace-format", help="mooncake, azure or request-log; default: seen in the file.")
@click.option("--gbit-per-s", type=_POSITIVE, help="Rate of the link to the peer.")
@click.option("--ttft-p90", type=_POSITIVE, help="Objective in seconds.")
@click.option("--ttft-p99", type=_POSITIVE, help="Objective in seconds.")
@click.option("--itl", type=_POSITIVE, help="Objective in seconds.")
@click.option(
    "--at-rate", type=_POSITIVE, help="Requests a second: say how many instances the peer needs."
)
@click.option("--json", "as_json", is_flag=True, help="JSON instead of text.")
def plan(
    scenario: str,
    trace: Path | None,
    trace_format: str | None,
    gbit_per_s: float | None,
    ttft_p90: float | None,
    ttft_p99: float | None,
    itl: float | None,
    at_rate: float | None,
    as_json: bool,
) -> None:
    """Find the threshold and split of nodes that serve SCENARIO best.

    SCENARIO is a YAML file or a shipped one (paper, homogeneous). Status 1 if it is infeasible.
    """
    from policies.plan_command import run_plan

    objectives = {"ttft_p90_s": ttft_p90, "ttft_p99_s": ttft_p99, "itl_s": itl}
    given = {name: value for name, value in objectives.items() if value is not None}
    text, feasible = run_plan(scenario, trace, trace_format, gbit_per_s, given, as_json, at_rate)
    click.echo(text, nl=False)
    if not feasible:
        raise SystemExit(1)


@click.command()
@click.argument("source", required=False, type=_FILE)
@click.option("--trace-format", help="mooncake, azure or request-log; default: seen in the file.")
@click.option("--scenario", default="paper", show_default=True, help="Whose generator to describe.")
@click.option(
    "--cache-tokens", type=click.IntRange(0), help="Size of the cache; default: no bound."
)
@click.option("--state-tokens", type=click.IntRange(0), default=0, help="Of a recurrent state.")
@click.option("--write", type=_FILE, help="Write the requests there as a Mooncake trace.")
@click.option("--plots", type=_FILE, help="Write plots there, as PNG or SVG.")
@click.option("--json", "as_json", is_flag=True, help="JSON instead of text.")
def workload(
    source: Path | None,
    trace_format: str | None,
    scenario: str,
    cache_tokens: int | None,
    state_tokens: int,
    write: Path | None,
    plots: Path | None,
    as_json: bool,
) -> None:
    """Describe the trace SOURCE, or what a scenario generates: lengths, reuse, burstiness."""
    from policies.workload.command import run_workload

    if source is not None and write is not None:
        raise ConfigError("--write is for generated workloads: the trace is a file already")
    text, notes = run_workload(
        source, trace_format, scenario, cache_tokens, state_tokens, write, plots, as_json
    )
    click.echo(text, nl=False)
    for note in notes:
        click.echo(note, err=True)


@click.command()
@click.argument("scenario", default="paper")
@click.option("--policy", "policies", multiple=True, help="Policy by name; repeatable.")
@click.option(
    "--policy-file",
    type=_FILE,
    help="Parameters: a policy file, or a configuration file's gateway.policy.",
)
@click.option("--trace", type=_FILE, help="Workload from a trace; default: the scenario's own.")
@click.option("--trace-format", help="mooncake, azure or request-log; default: seen in the file.")
@click.option("--rate", type=_POSITIVE, help="Requests a second: generated so, or a trace sped up.")
@click.option("--start", type=_Finite(0), default=0, help="Leave out what comes before.")
@click.option("--prefill-nodes", type=click.IntRange(1), help="Of D's nodes, where they are split.")
@click.option("--threshold", type=click.IntRange(0), help="Threshold in uncached tokens.")
@click.option("--seed", type=click.IntRange(0), help="Of the generated workload.")
@click.option("--json", "as_json", is_flag=True, help="JSON instead of a table.")
def simulate(
    scenario: str,
    policies: tuple[str, ...],
    policy_file: Path | None,
    trace: Path | None,
    trace_format: str | None,
    rate: float | None,
    start: float,
    prefill_nodes: int | None,
    threshold: int | None,
    seed: int | None,
    as_json: bool,
) -> None:
    """Compare routing policies on one workload in virtual time.

    SCENARIO is a YAML file or a shipped one (paper, homogeneous).
    """
    from policies.policy_file import is_policy_file
    from policies.simulator.command import SimulateOptions, run_simulate

    settings = _policy_settings(policy_file)
    if policy_file is not None and is_policy_file(policy_file):
        policies = policies or (settings.name,)
    if threshold is not None:
        settings = settings.model_copy(update={"threshold_tokens": threshold})
    names = policies or ("always_local", "length_threshold", "paper", "least_ttft")
    options = SimulateOptions(
        scenario, names, settings, trace, trace_format, rate, start, prefill_nodes, seed
    )
    text, notes = run_simulate(options, as_json)
    click.echo(text, nl=False)
    for note in notes:
        click.echo(note, err=True)


@click.command()
@click.argument("scenario", default="paper")
@click.option("--policy", default="priced", show_default=True, help="Policy to tune.")
@click.option(
    "--goal",
    type=click.Choice(["rate", "ttft", "cost", "pareto"]),
    default="rate",
    show_default=True,
    help="Most requests a second within the scenario's objectives, least mean TTFT within them at "
    "the workload's rate, least cost of a million requests, or the best of rate and cost.",
)
@click.option("--trace", type=_FILE, help="Workload from a trace; default: the scenario's own.")
@click.option("--trace-format", help="mooncake, azure or request-log; default: seen in the file.")
@click.option(
    "--train-share",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=0.5,
    show_default=True,
    help="Of the workload, from its start; the rest tests.",
)
@click.option(
    "--queue-order",
    type=click.Choice(["fcfs", "srpt", "slack", "search"]),
    help="Of all prefill queues; search: find the best; default: the scenario's.",
)
@click.option(
    "--shape", is_flag=True, help="Search the split of D's nodes and the peer's instances too."
)
@click.option("--trials", type=click.IntRange(1), default=50, show_default=True, help="In all.")
@click.option("--jobs", type=click.IntRange(1), help="Processes; default: one for each core.")
@click.option(
    "--storage",
    default="study.journal",
    show_default=True,
    help="File, or a URL of Redis or a database (as SQLAlchemy has them) where several machines "
    "join.",
)
@click.option("--study", help="Name within the storage; default: from policy and goal.")
@click.option("--seed", type=click.IntRange(0), default=0, help="Of the search.")
@click.option("--write", type=_FILE, help="Write the policy file there.")
@click.option("--report", type=_FILE, help="Write a page with plots there.")
@click.option("--json", "as_json", is_flag=True, help="JSON instead of text.")
def tune(
    scenario: str,
    policy: str,
    goal: Literal["rate", "ttft", "cost", "pareto"],
    trace: Path | None,
    trace_format: str | None,
    train_share: float,
    queue_order: str | None,
    shape: bool,
    trials: int,
    jobs: int | None,
    storage: str,
    study: str | None,
    seed: int,
    write: Path | None,
    report: Path | None,
    as_json: bool,
) -> None:
    """Search policy parameters for SCENARIO in the simulator; write a policy file.

    A study that was stopped goes on where it was. Needs prfaas[tune].
    """
    from policies.study import StudySpec
    from policies.tune_command import TuneOptions, run_tune

    search = queue_order == "search"
    spec = StudySpec(
        scenario,
        policy,
        goal,
        None if search else queue_order,
        search,
        shape,
        trace,
        trace_format,
        train_share,
        seed,
    )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    options = TuneOptions(spec, storage, trials, jobs or cores or 1, study, write, report)
    found = run_tune(options, as_json, lambda line: click.echo(line, err=True))
    click.echo(found, nl=False)


@click.command()
@click.argument("log", type=_FILE)
@click.option(
    "--request-id",
    "--request",
    "request_id",
    help="Id of the request; default: the last one decided.",
)
@click.option("--policy", help="Ask this policy instead; it starts with its initial state.")
@click.option(
    "--policy-file",
    type=_FILE,
    help="Parameters: a policy file, or a configuration file's gateway.policy; default: as logged.",
)
@click.option("--json", "as_json", is_flag=True, help="JSON instead of text.")
def explain(
    log: Path, request_id: str | None, policy: str | None, policy_file: Path | None, as_json: bool
) -> None:
    """Replay a decision of a gateway's request LOG, and show what would have changed it."""
    from policies.explain_command import run_explain

    settings = None
    if policy_file is not None or policy is not None:
        settings = _policy_settings(policy_file)
        if policy is not None:
            settings = settings.model_copy(update={"name": policy, "file": None})
    click.echo(run_explain(log, request_id, settings, as_json), nl=False)


@click.command()
@click.option("--gateway", required=True, help="URL of a gateway of the fleet.")
@click.option("--engine", required=True, help="URL of a decode engine, past the gateway.")
@click.option("--model", required=True, help="Model name that both serve.")
@click.option(
    "--out",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory for scenario.yaml and the profiles it names.",
)
@click.option(
    "--length",
    "lengths",
    multiple=True,
    type=click.IntRange(2),
    help="Characters of a prompt; repeatable; default: 200, 1000, 3700, 16000.",
)
@click.option("--rounds", type=click.IntRange(2), default=3, show_default=True, help="Of each.")
@click.option(
    "--max-batch",
    type=click.IntRange(1),
    default=16,
    show_default=True,
    help="Sequences in a decode step at most: noted, not measured.",
)
@click.option("--timeout", type=_POSITIVE, default=300, show_default=True, help="Of one answer, s.")
def calibrate(
    gateway: str,
    engine: str,
    model: str,
    out: Path,
    lengths: tuple[int, ...],
    rounds: int,
    max_batch: int,
    timeout: float,
) -> None:
    """Measure a live fleet's engines and link, and write them as a scenario for plan and simulate.

    The fleet must have nothing else to do, and a policy that sends long prompts to the peers.
    """
    from prfaas.up.calibrate_command import run_calibrate
    from prfaas.up.calibration import LENGTHS, Plan

    plan = Plan(model, tuple(sorted(set(lengths))) or LENGTHS, rounds)
    run_calibrate(gateway, engine, plan, out, max_batch, timeout, click.echo)


def _policy_settings(path: Path | None) -> PolicySettings:
    """Of a policy file, or of a configuration file whose `gateway.policy` may name one."""
    from policies.policy_file import is_policy_file, load_policy_file
    from prfaas.settings import PolicySettings, load_settings

    if path is None:
        return PolicySettings()
    if is_policy_file(path):
        return load_policy_file(path).settings()
    gateway = load_settings(path).gateway
    if "policy" not in gateway.model_fields_set:
        raise ConfigError(
            f"{path}: neither a policy file (it has no policy_version) nor a configuration file "
            "with gateway.policy"
        )
    policy = gateway.policy
    return policy if policy.file is None else load_policy_file(policy.file).settings()


@click.group(cls=CommandGroup)
def profile() -> None:
    """Look at engine profiles."""


@profile.command("list")
def profile_list() -> None:
    """List the shipped profiles, and what rooflines know."""
    from policies.profiles import find_profile, shipped_names
    from policies.roofline import shipped_chips, shipped_models

    for name in shipped_names():
        click.echo(f"{name:<24}{find_profile(name).label}")
    click.echo(f"NxCHIP:MODEL            data_sheet; chips: {', '.join(shipped_chips())};")
    click.echo(f"                        models: {', '.join(shipped_models())}")


@profile.command("show")
@click.argument("name")
@click.option("--tokenizer", help="Add this tokenizer, which paced engines need.")
def profile_show(name: str, tokenizer: str | None) -> None:
    """Print the profile NAME (shipped, a file, or NxCHIP:MODEL) as a file of its own."""
    from policies.profiles import find_profile, to_yaml

    found = find_profile(name)
    if tokenizer is not None:
        found = found.model_copy(update={"tokenizer": Path(tokenizer)})
    click.echo(to_yaml(found), nl=False)


COMMANDS: tuple[click.Command, ...] = (
    plan, workload, simulate, tune, explain, calibrate, profile,
)  # fmt: skip
