"""The tuner: Optuna over the simulator, resumable, on all cores; trains on one part of a workload
and reports the other."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Self

from policies.parameters import SPANS
from policies.registry import make_policy
from policies.scenario import Profiles, QueueOrder, Scenario, load_scenario
from policies.simulator.capacity import capacity
from policies.simulator.objectives import failing
from policies.simulator.result import Summary
from policies.simulator.run import simulate
from policies.site_shape import AS_IT_IS, PEER, PREFILL, Shape, spans, usual
from policies.study_storage import open_storage, shown, storage_errors
from policies.workload.request import Request, scaled
from prfaas.errors import ConfigError
from prfaas.settings import PolicySettings

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import FrozenTrial, Trial

Goal = Literal["rate", "ttft", "cost", "pareto"]
LOST = 1e9
"""Value of a trial that does not hold the objectives, before how far off it is."""

NEAR = 1.25
"""First step from the workload's own rate in search of the highest."""


@dataclass(frozen=True, slots=True)
class StudySpec:
    """What is sought; everything that makes two studies the same."""

    scenario: str
    policy: str
    goal: Goal
    """`rate`: most requests a second within the objectives; `ttft`: least mean TTFT within them, at
    the workload's own rate; `cost`: least of nodes and egress for a million requests, at `rate`;
    `pareto`: both `rate` and `cost`, of which there are several best."""
    queue_order: str | None = None
    """Of all prefill queues; None: the scenario's."""
    tune_order: bool = False
    """Search the queue order too."""
    tune_shape: bool = False
    """Search the split of D's nodes and the number of the peer's instances too."""
    trace: Path | None = None
    trace_format: str | None = None
    train_share: float = 0.5
    """Of the workload's requests, from the start: they train, the rest tests."""
    seed: int = 0

    @property
    def study(self) -> str:
        """Name of its study, where nobody gives one."""
        return f"{self.policy}-{self.goal}"

    def digest(self) -> str:
        """Changes with anything that makes values incomparable: what the files hold, and not where
        they are, which differs where several machines work on one study."""
        files = {"scenario": _content(Path(self.scenario)), "trace": _content(self.trace)}
        text = json.dumps({**asdict(self), **files}, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class Part:
    """Requests of one part of the workload, at times from zero, and their own rate."""

    requests: tuple[Request, ...]

    @property
    def rate_per_s(self) -> float:
        span = self.requests[-1].arrival_s - self.requests[0].arrival_s
        return (len(self.requests) - 1) / span

    def at(self, rate_per_s: float) -> Sequence[Request]:
        return list(scaled(self.requests, rate_per_s / self.rate_per_s))


@dataclass(frozen=True, slots=True)
class Score:
    """What one set of parameters is worth on one part of the workload."""

    value: float
    """Lower is better, whatever the goal; of `pareto`, that of the rate."""
    rate_per_s: float
    summary: Summary
    cost: float | None = None
    """For a million requests, where the scenario has prices and the rate was sought."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a study is."""

    finished: int
    trials: int
    best: float | None
    """Lower is better, whatever the goal; None: no trial has held the objectives."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """The best of a study, on both parts, beside the policy's defaults."""

    spec: StudySpec
    parameters: Mapping[str, float]
    queue_order: QueueOrder
    trials: int
    trained: Score
    tested: Score
    default_tested: Score
    history: Sequence[float]
    """Best value after each finished trial."""
    shape: Shape = AS_IT_IS
    """Of the site, where it was searched. `default_tested` has the scenario's own."""


class Problem:
    """A spec with what it names; owns nothing, nothing to close."""

    def __init__(
        self, spec: StudySpec, scenario: Scenario, profiles: Profiles, training: Part, testing: Part
    ) -> None:
        """Raises ConfigError where the spec contradicts itself or the scenario."""
        if spec.policy not in SPANS:
            raise ConfigError(f"no policy {spec.policy!r}; there are {', '.join(SPANS)}")
        if spec.queue_order is not None:
            order = scenario.queue_order.model_validate({"name": spec.queue_order})
            scenario = scenario.model_copy(update={"queue_order": order})
        self.spec, self.scenario, self.profiles = spec, scenario, profiles
        self.training, self.testing = training, testing
        self._require_sense()
        if not scenario.local.colocated and scenario.local.prefill_instances is None:
            self.scenario = planned(scenario, profiles, training.requests)

    @classmethod
    def read(cls, spec: StudySpec) -> Self:
        """Read the files that the spec names. Raises ConfigError for what is not there."""
        if not 0 < spec.train_share < 1:
            raise ConfigError(
                f"the training share must lie between 0 and 1, not {spec.train_share}"
            )
        scenario, profiles = load_scenario(spec.scenario)
        return cls(spec, scenario, profiles, *_parts(spec, scenario))

    def _require_sense(self) -> None:
        goal, objectives = self.spec.goal, self.scenario.objectives
        if goal in ("rate", "pareto") and not objectives.bound_rates:
            raise ConfigError(
                f"goal `{goal}` contradicts a scenario without objectives on TTFT or slowdown: any "
                "rate holds; set objectives.ttft_p90_s, ttft_p99_s, slowdown_p90 or slowdown_p99"
            )
        if goal in ("cost", "pareto") and self.scenario.prices is None:
            raise ConfigError(
                f"goal `{goal}` needs prices in the scenario: without, all costs nothing"
            )
        if self.spec.tune_shape:
            spans(self.scenario)
        elif not SPANS[self.spec.policy] and not self.spec.tune_order:
            raise ConfigError(f"policy {self.spec.policy} has no parameters to search")

    def shaped(self, shape: Shape) -> Problem:
        """The same on a site of that shape."""
        changed = copy(self)
        changed.scenario = shape.applied(self.scenario)
        return changed

    def first(self) -> Mapping[str, float]:
        """What a study tries before it searches: the policy's defaults on the scenario's site."""
        return {
            **_defaults(self.spec.policy),
            **(usual(self.scenario) if self.spec.tune_shape else {}),
        }

    def score(
        self, parameters: Mapping[str, float], order: str, part: Part, shape: Shape = AS_IT_IS
    ) -> Score:
        """Run the simulator on a part. Raises ConfigError where objectives hold at no rate."""
        scenario = shape.applied(self.scenario)
        if order != scenario.queue_order.name:
            queue_order = scenario.queue_order.model_copy(update={"name": order})
            scenario = scenario.model_copy(update={"queue_order": queue_order})
        settings = PolicySettings.model_validate({"name": self.spec.policy, **parameters})
        if self.spec.goal == "ttft":
            requests = part.requests
            summary = simulate(scenario, self.profiles, requests, make_policy(settings)).summary()
            return Score(summary.ttft_mean_s + _excess(scenario, summary), part.rate_per_s, summary)
        found = capacity(
            scenario,
            self.profiles,
            part.at,
            lambda: make_policy(settings),
            scenario.objectives,
            start_rate_per_s=part.rate_per_s,
            growth=NEAR,
        )
        value = -found.rate_per_s
        cost = None
        if scenario.prices is not None:
            cost = cost_per_million(scenario, found.rate_per_s, found.summary)
        if self.spec.goal == "cost":
            assert cost is not None
            value = cost
        return Score(value, found.rate_per_s, found.summary, cost)


def cost_per_million(scenario: Scenario, rate_per_s: float, summary: Summary) -> float:
    """Nodes of both sites and egress, for a million requests at this rate."""
    prices = scenario.prices
    assert prices is not None
    remote = sum(peer.instances for peer in scenario.peers)
    hourly = scenario.local.instances * prices.local_instance_per_hour
    hourly += remote * prices.remote_instance_per_hour
    egress = summary.egress_gb / summary.requests * prices.egress_per_gb
    return (hourly / 3600 / rate_per_s + egress) * 1e6


def tune(
    spec: StudySpec,
    storage: str,
    trials: int,
    jobs: int,
    *,
    name: str | None = None,
    told: Callable[[Progress], None] | None = None,
) -> Tuned:
    """Bring the study at `storage` to `trials` finished trials, in `jobs` processes.

    `storage`: a file (Optuna's journal), or a URL of Redis or a database: several machines may work
    on one study. A study that was stopped goes on where it was; finished trials are not run again.
    `told` is called as trials end in this process, with those of all.
    Raises ConfigError where the study there is of something else, or no trial holds objectives.
    """
    return best_of(*search(spec, storage, trials, jobs, name=name, told=told))


def search(
    spec: StudySpec,
    storage: str,
    trials: int,
    jobs: int,
    *,
    name: str | None = None,
    told: Callable[[Progress], None] | None = None,
) -> tuple[Problem, Study]:
    """As `tune`, without judging what was found."""
    problem = Problem.read(spec)
    with storage_errors(storage):
        return problem, _searched(problem, storage, trials, jobs, name or spec.study, told)


def _searched(
    problem: Problem,
    storage: str,
    trials: int,
    jobs: int,
    name: str,
    told: Callable[[Progress], None] | None,
) -> Study:
    spec = problem.spec
    study = open_study(spec, storage, name, problem.first())
    left = trials - finished(study)
    if left > 0 and jobs > 1:
        context = multiprocessing.get_context("spawn")
        workers = [
            context.Process(target=_work, args=(spec, storage, name, trials, number))
            for number in range(1, jobs)
        ]
        for worker in workers:
            worker.start()
        try:
            run_trials(problem, study, trials, 0, told)
        except BaseException:  # Ctrl-C is for all of them
            for worker in workers:
                worker.terminate()
            raise
        finally:
            for worker in workers:
                worker.join()
        failed = [worker.exitcode for worker in workers if worker.exitcode]
        if failed:
            raise ConfigError(f"{len(failed)} of {jobs} workers of the study ended with an error")
    elif left > 0:
        run_trials(problem, study, trials, 0, told)
    return study


def open_study(
    spec: StudySpec, storage: str, name: str, first: Mapping[str, float] = MappingProxyType({})
) -> Study:
    """The study of that name, made where it is not there. Raises ConfigError.

    `first`: parameters of its first trial, where they are not the defaults.
    """
    optuna = _optuna()
    study = optuna.create_study(
        study_name=name,
        storage=open_storage(storage),
        directions=["minimize"] * (2 if spec.goal == "pareto" else 1),
        load_if_exists=True,
    )
    known = study.user_attrs.get("spec")
    if known is None:
        study.set_user_attr("spec", spec.digest())
        if SPANS[spec.policy] or first:
            study.enqueue_trial({**_defaults(spec.policy), **first}, skip_if_exists=True)
    elif known != spec.digest():
        raise ConfigError(
            f"study {name!r} in {shown(storage)} is of another scenario, workload, policy, goal, "
            "queue order, training share or seed; give another file or another name"
        )
    return study  # type: ignore[no-any-return]


def finished(study: Study) -> int:
    """Trials that have a value; what a kill left half done does not count."""
    return sum(trial.state.name == "COMPLETE" for trial in study.get_trials(deepcopy=False))


def run_trials(
    problem: Problem,
    study: Study,
    trials: int,
    worker: int,
    told: Callable[[Progress], None] | None = None,
) -> None:
    """Run trials in this process until the study, whoever works on it, has as many."""
    optuna = _optuna()
    seed = problem.spec.seed * 1000 + worker + finished(study)
    study.sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True)

    def stop(study: Study, trial: FrozenTrial) -> None:
        parent = multiprocessing.parent_process()
        orphaned = parent is not None and not parent.is_alive()
        done = finished(study)
        if told is not None:
            told(Progress(done, trials, _best(study)))
        if done >= trials or orphaned:
            study.stop()

    if finished(study) < trials:
        study.optimize(lambda trial: _try(problem, trial), callbacks=[stop])


def best_of(problem: Problem, study: Study) -> Tuned:
    """The best trial on both parts. Raises ConfigError where none holds the objectives."""
    done = [t for t in study.get_trials(deepcopy=False) if t.state.name == "COMPLETE"]
    best = min(done, key=lambda trial: (trial.value, trial.number))
    if best.value is None or best.value >= LOST:
        raise ConfigError(
            f"infeasible: none of {len(done)} trials holds the objectives; "
            "`prfaas plan` names the stage that binds"
        )
    parameters, order, shape = parts_of(problem, best.params)
    history: list[float] = []
    for trial in done:
        assert trial.value is not None
        history.append(min([*history[-1:], trial.value]))
    return Tuned(
        problem.spec,
        parameters,
        problem.scenario.queue_order.model_copy(update={"name": order}),
        len(done),
        problem.score(parameters, order, problem.training, shape),
        problem.score(parameters, order, problem.testing, shape),
        problem.score({}, problem.scenario.queue_order.name, problem.testing),
        history,
        shape,
    )


def parts_of(problem: Problem, params: Mapping[str, Any]) -> tuple[Mapping[str, float], str, Shape]:
    """Of a trial's parameters: the policy's, the queue order, and the site's shape."""
    rest = dict(params)
    order = str(rest.pop("queue_order", problem.scenario.queue_order.name))
    shape = Shape(rest.pop(PREFILL, None), rest.pop(PEER, None))
    return rest, order, shape


def planned(scenario: Scenario, profiles: Profiles, requests: Sequence[Request]) -> Scenario:
    """The scenario with the split of D's nodes that the planner finds best for these requests.

    Raises Infeasible, which names the stage that binds.
    """
    from policies.mix import mix_of_requests
    from policies.planner import best_plan
    from policies.prefix_cache import CacheSpec
    from policies.throughput import Fleet

    cache = CacheSpec.of(profiles.prefill.model, scenario.local.cache_tokens)
    plan = best_plan(
        Fleet.of(scenario, profiles), mix_of_requests(requests, cache), scenario.objectives
    )
    count = plan.load.split.prefill_instances
    local = scenario.local.model_copy(update={"prefill_instances": count})
    return scenario.model_copy(update={"local": local})


def _best(study: Study) -> float | None:
    values = [t.values[0] for t in study.get_trials(deepcopy=False) if t.values is not None]
    return min((value for value in values if value < LOST), default=None)


def _content(path: Path | None) -> str:
    """A file's digest; of what is no file, its name (shipped scenarios have one)."""
    if path is None or not path.is_file():
        return str(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def _parts(spec: StudySpec, scenario: Scenario) -> tuple[Part, Part]:
    from dataclasses import replace

    from policies.workload.source import open_source

    rows = list(open_source(spec.trace, spec.trace_format, scenario.workload))
    cut = int(len(rows) * spec.train_share)
    parts = []
    for part in (rows[:cut], rows[cut:]):
        if len(part) < 2 or part[-1].arrival_s <= part[0].arrival_s:
            raise ConfigError("the workload is too small to train on one part and test the other")
        start = part[0].arrival_s
        parts.append(Part(tuple(replace(r, arrival_s=r.arrival_s - start) for r in part)))
    return parts[0], parts[1]


def _try(problem: Problem, trial: Trial) -> float | tuple[float, float]:
    parameters: dict[str, float] = {}
    for name, span in SPANS[problem.spec.policy].items():
        if span.whole:
            parameters[name] = trial.suggest_int(name, int(span.low), int(span.high), log=span.log)
        else:
            parameters[name] = trial.suggest_float(name, span.low, span.high, log=span.log)
    order: str = problem.scenario.queue_order.name
    if problem.spec.tune_order:
        order = str(trial.suggest_categorical("queue_order", ["fcfs", "srpt", "slack"]))
    if problem.spec.tune_shape:
        for name, (low, high) in spans(problem.scenario).items():
            trial.suggest_int(name, low, high)
    shape = Shape(trial.params.get(PREFILL), trial.params.get(PEER))
    both = problem.spec.goal == "pareto"
    try:
        score = problem.score(parameters, order, problem.training, shape)
    except ConfigError as error:
        if not error.message.startswith("infeasible"):
            raise
        return (LOST, LOST) if both else LOST
    if not both:
        return score.value
    assert score.cost is not None
    return score.value, score.cost


def _excess(scenario: Scenario, summary: Summary) -> float:
    """Added to a mean that is bought by breaking objectives."""
    over = sum(missed.excess for missed in failing(summary, scenario.objectives))
    return LOST * (1 + over) if over else 0.0


def _defaults(policy: str) -> dict[str, float]:
    settings = PolicySettings()
    return {
        name: min(max(getattr(settings, name), span.low), span.high)
        for name, span in SPANS[policy].items()
    }


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise ConfigError("tuning needs Optuna: pip install 'prfaas[tune]'") from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # what fails is raised
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    return optuna


def _work(spec: StudySpec, storage: str, name: str, trials: int, worker: int) -> None:
    try:
        with storage_errors(storage):
            run_trials(Problem.read(spec), open_study(spec, storage, name), trials, worker)
    except ConfigError as error:
        print(f"worker {worker}: {error.message}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:  # the first process says so
        sys.exit(130)
