"""Policies change while a gateway runs: good files take over, bad ones do not, failures go back."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gateway.live_policy import ACTIVE, CANARY, LivePolicy
from policies.effective import effective
from policies.registry import make_policy
from prfaas.errors import ConfigError
from prfaas.queue_settings import QueueSettings
from prfaas.settings import GatewaySettings, PolicySettings
from prfaas.snapshot import Decision, Outcome, Reason, Target
from prfaas.testing.contracts import busy_snapshot, long_request
from prfaas.testing.gateway_setup import completion, until


class Events:
    """Keeps what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []

    def policy_changed(self, role: str, result: str) -> None:
        self.told.append((role, result))


class Broken:
    """A policy with a bug."""

    name = "broken"

    def initial_state(self) -> None:
        return None

    def decide(self, request: object, snapshot: object, state: None) -> Decision:
        raise ZeroDivisionError

    def observe(self, state: None, outcome: Outcome) -> None:
        raise ZeroDivisionError


def write(file: Path, text: str) -> None:
    """As an editor does it: another file takes the name."""
    other = file.with_suffix(".new")
    other.write_text(text)
    os.replace(other, file)


def policy_file(name: str, **parameters: float) -> str:
    lines = "".join(f"\n  {key}: {value}" for key, value in parameters.items())
    return f"policy_version: 1\npolicy: {name}\nparameters:{lines or ' {}'}\n"


def live_of(events: Events, make: Any = make_policy, **gateway: Any) -> LivePolicy:
    settings = GatewaySettings(**gateway)
    return LivePolicy(settings, make(settings.policy), make, events)


def decide(live: LivePolicy, key: str = "k") -> Any:
    return live.decide(long_request(), busy_snapshot(), key)


async def test_decisions_tell_the_parameters_that_are_not_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    write(file, policy_file("least_ttft", remote_margin=0.2))
    settings = GatewaySettings(policy=PolicySettings(file=file))
    live = LivePolicy(settings, make_policy(settings.policy), make_policy, Events(), effective)
    assert decide(live).parameters == {"remote_margin": 0.2}
    write(file, policy_file("priced", link_weight=0.5))
    await live.look()
    assert decide(live).parameters == {"link_weight": 0.5}
    await live.adopt(policy_file("least_ttft"))
    assert decide(live).parameters == {}
    assert decide(live_of(Events(), policy={"file": file})).parameters is None


async def test_a_changed_file_takes_over_between_two_decisions(tmp_path: Path) -> None:
    file, events = tmp_path / "policy.yaml", Events()
    write(file, policy_file("always_local"))
    live = live_of(events, policy={"file": file})
    assert decide(live).decision.target is Target.LOCAL
    await live.look()
    assert events.told == [], "nothing has changed"
    write(file, policy_file("always_remote"))
    assert decide(live).decision.target is Target.LOCAL
    await live.look()
    chosen = decide(live)
    assert (chosen.decision.target, chosen.policy, chosen.version) == (
        Target.REMOTE, "always_remote", 2,
    )  # fmt: skip
    assert events.told == [(ACTIVE, "loaded")]


async def test_the_queue_order_comes_and_goes_with_the_active_policys_file(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    write(file, policy_file("always_local") + "queue: {name: srpt, ageing: 0.5}\n")
    settings = GatewaySettings(policy=PolicySettings(file=file))
    live = LivePolicy(settings, make_policy(settings.policy), make_policy, Events(), effective)
    assert live.queue == QueueSettings(name="srpt", ageing=0.5)
    assert decide(live).parameters == {}, "it is none of the policy's"
    write(file, policy_file("always_local") + "queue: {name: last}\n")
    await live.look()
    assert live.queue is not None, "what is bad changes nothing"
    write(file, policy_file("always_local"))
    await live.look()
    assert live.queue is None
    await live.adopt(policy_file("always_local") + "queue: {name: slack}\n")
    assert live.queue == QueueSettings(name="slack")


@pytest.mark.parametrize(
    "text", ["policy: [", policy_file("nonsense"), policy_file("always_remote", nonsense=1), ""]
)
async def test_a_bad_file_is_told_once_and_changes_nothing(tmp_path: Path, text: str) -> None:
    file, events = tmp_path / "policy.yaml", Events()
    write(file, policy_file("always_local"))
    live = live_of(events, policy={"file": file})
    write(file, text)
    await live.look()
    await live.look()
    assert events.told == [(ACTIVE, "refused")]
    assert (decide(live).policy, decide(live).version) == ("always_local", 1)
    file.unlink()
    await live.look()
    assert decide(live).policy == "always_local"
    write(file, policy_file("always_remote"))
    await live.look()
    assert decide(live).policy == "always_remote"


async def test_what_was_taken_over_is_published_once(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    write(file, policy_file("always_local"))
    live = live_of(Events(), policy={"file": file})
    assert live.published() is None, "what it began with is nobody else's business"
    write(file, policy_file("always_remote"))
    await live.look()
    assert live.published() == policy_file("always_remote")
    assert live.published() is None
    write(file, "policy: [")
    await live.look()
    assert live.published() is None


async def test_the_policy_of_another_gateway_is_taken_over_where_it_is_good(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "policy.yaml"
    write(file, policy_file("always_local"))
    live = live_of(events := Events(), policy={"file": file})
    await live.adopt(policy_file("always_remote"))
    assert decide(live).policy == "always_remote"
    assert live.published() is None, "it came from there"
    await live.adopt("policy: [")
    assert decide(live).policy == "always_remote"
    assert events.told == [("active", "loaded"), ("active", "refused")]
    assert "is not taken over" in caplog.text
    write(file, policy_file("length_threshold"))
    await live.look()
    assert decide(live).policy == "length_threshold", "its own file counts when it changes"


async def test_a_policy_that_fails_is_taken_back_and_nobody_notices(tmp_path: Path) -> None:
    file, events = tmp_path / "policy.yaml", Events()
    write(file, policy_file("always_local"))
    made = iter([make_policy(PolicySettings(name="always_local")), Broken()])
    live = live_of(events, lambda _: next(made), policy={"file": file})
    write(file, policy_file("always_remote"))
    await live.look()
    chosen = decide(live)
    assert (chosen.policy, chosen.version, chosen.decision.target) == (
        "always_local", 1, Target.LOCAL,
    )  # fmt: skip
    assert events.told == [(ACTIVE, "loaded"), (ACTIVE, "rolled_back")]


def test_one_that_always_failed_has_nothing_to_go_back_to() -> None:
    live = live_of(Events(), lambda _: Broken())
    with pytest.raises(ZeroDivisionError):
        decide(live)


def test_a_canary_decides_for_its_share_and_always_for_the_same_requests() -> None:
    live = live_of(
        Events(),
        policy={"name": "always_local"},
        canary={"name": "always_remote"},
        canary_share=0.2,
    )
    roles = [decide(live, f"k{at}").role for at in range(2000)]
    assert Counter(roles)[CANARY] == pytest.approx(400, abs=60)
    assert roles == [decide(live, f"k{at}").role for at in range(2000)]
    assert decide(live, f"k{roles.index(CANARY)}").decision.target is Target.REMOTE


def test_a_canary_that_fails_leaves_everything_to_the_active_one() -> None:
    events = Events()
    made = iter([make_policy(PolicySettings(name="always_local")), Broken()])
    live = live_of(events, lambda _: next(made), canary={"name": "always_remote"}, canary_share=1)
    assert decide(live).policy == "always_local"
    assert live.running(CANARY) is None
    assert events.told == [(CANARY, "rolled_back")]
    assert decide(live).role == ACTIVE


def test_a_shadow_says_what_it_would_have_saved_and_decides_nothing() -> None:
    live = live_of(Events(), policy={"name": "always_local"}, shadow={"name": "least_ttft"})
    chosen = decide(live)
    assert chosen.decision.target is Target.LOCAL
    assert chosen.shadow.policy == "least_ttft"
    assert (chosen.shadow.target, chosen.shadow.agrees) == (Target.REMOTE, False)
    assert chosen.shadow.saved_s > 0
    same = live_of(Events(), policy={"name": "least_ttft"}, shadow={"name": "least_ttft"})
    assert (decide(same).shadow.agrees, decide(same).shadow.saved_s) == (True, 0.0)
    blind = live_of(Events(), policy={"name": "always_local"}, shadow={"name": "always_local"})
    assert decide(blind).shadow.saved_s is None or decide(blind).shadow.saved_s == 0.0


def test_a_shadow_that_fails_is_left_out() -> None:
    events = Events()
    made = iter([make_policy(PolicySettings(name="always_local")), Broken()])
    live = live_of(events, lambda _: next(made), shadow={"name": "always_remote"})
    assert decide(live).shadow is None
    assert events.told == [("shadow", "rolled_back")]


def test_outcomes_teach_who_decided_and_the_shadow() -> None:
    class Counting(Broken):
        name = "counting"

        def initial_state(self) -> Any:
            return 0

        def decide(self, request: object, snapshot: object, state: Any) -> Decision:
            return Decision(Target.LOCAL, Reason.FORCED_LOCAL)

        def observe(self, state: Any, outcome: Outcome) -> Any:
            return state + 1

    live = live_of(
        Events(), lambda _: Counting(), canary={"name": "x"}, shadow={"name": "y"}, canary_share=0.5
    )
    for role in (ACTIVE, ACTIVE, CANARY):
        live.observe(role, Outcome("t", "staged"))
    states = {role: live.running(role).state for role in (ACTIVE, CANARY, "shadow")}  # type: ignore[union-attr]
    assert states == {ACTIVE: 2, CANARY: 1, "shadow": 3}


def test_who_fails_to_learn_is_taken_back_where_there_is_something_to_go_back_to(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The outcome came in a stream of telemetry, which must not break for it."""
    events = Events()
    roles = {"canary": {"name": "always_remote"}, "shadow": {"name": "always_remote"}}
    live = live_of(events, lambda _: Broken(), canary_share=1, **roles)
    live.observe(CANARY, Outcome("t1", "staged"))
    assert live.running(CANARY) is None
    assert live.running("shadow") is None
    assert sorted(events.told) == [(CANARY, "rolled_back"), ("shadow", "rolled_back")]
    live.observe(ACTIVE, Outcome("t2", "staged"))
    assert live.running(ACTIVE) is not None
    assert "cannot learn" in caplog.text


def test_a_canary_that_cannot_be_made_is_named_at_start() -> None:
    with pytest.raises(ConfigError, match="nonsense"):
        live_of(Events(), canary={"name": "nonsense"})


async def test_a_gateway_takes_over_a_changed_file(make_cluster: Any, tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    write(file, policy_file("always_local"))
    async with make_cluster(policy={"file": file}, shadow={"name": "always_remote"}) as cluster:
        _, _, response = await cluster.post(completion())
        record = await cluster.record(response.headers["x-request-id"])
        assert (record["policy"], record["policy_role"], record["target"]) == (
            "always_local", "active", "local",
        )  # fmt: skip
        assert (record["shadow"]["target"], record["shadow"]["agrees"]) == ("remote", False)
        write(file, policy_file("always_remote"))
        changes = cluster.gateway.policy
        await until(lambda: changes.running(ACTIVE).version == 2, "the file to be seen")
        _, _, response = await cluster.post(completion())
        record = await cluster.record(response.headers["x-request-id"])
        assert (record["policy"], record["policy_version"]) == ("always_remote", 2)
        labels = {"role": "active", "result": "loaded"}
        assert await cluster.metric("prfaas_gateway_policy_changes_total", **labels) == 1
        assert await cluster.metric("prfaas_gateway_shadow_decisions_total", agrees="no") == 1
