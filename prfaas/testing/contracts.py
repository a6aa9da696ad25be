"""Contract suites: an implementation's test is a subclass with a factory."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import replace
from typing import Any

import pytest

from prfaas.interfaces import RoutingPolicy
from prfaas.settings import PolicySettings
from prfaas.snapshot import (
    UNKNOWN_CURVE,
    EngineLoad,
    LinkClass,
    LinkState,
    LocalEngine,
    Outcome,
    PrefillCurve,
    Reason,
    RemoteInstance,
    RequestFacts,
    Snapshot,
    Target,
)

CURVE = PrefillCurve(base_s=0.01, token_s=0.002, token_context_s=1e-7, chunk_tokens=256)
"""About 500 tokens a second, as measured on two CPU cores."""


def busy_snapshot() -> Snapshot:
    """D has a long queue, the peer is idle behind a good link: any policy may offload."""
    return Snapshot(
        local=LocalEngine(
            name="d0",
            load=EngineLoad(queue_tokens=4000, waiting=2, running=4, decode_step_s=0.05, age_s=0.1),
            curve=CURVE,
            matched_tokens=0,
            free_staging_bytes=1 << 30,
        ),
        remotes=(
            RemoteInstance(
                peer="peer",
                instance="prefill-0",
                link_class=LinkClass.WAN,
                load=EngineLoad(age_s=0.1),
                curve=CURVE,
                matched_tokens=0,
                link=LinkState(goodput_bytes_per_s=50e6, rtt_s=0.04, wire_ratio=1.45, age_s=0.1),
                free_retention_bytes=1 << 30,
            ),
        ),
        token_bytes=23040,
        max_age_s=2.0,
        fallback_free_tokens=16384,
    )


def long_request() -> RequestFacts:
    """Long enough for any policy to consider offloading it."""
    return RequestFacts(request_id="r1", prompt_tokens=4001)


def with_remote(snapshot: Snapshot, **changes: Any) -> Snapshot:
    """The snapshot with fields of its only remote instance changed."""
    return replace(snapshot, remotes=(replace(snapshot.remotes[0], **changes),))


def with_local(snapshot: Snapshot, **changes: Any) -> Snapshot:
    """The snapshot with fields of D changed."""
    return replace(snapshot, local=replace(snapshot.local, **changes))


def _unknown_inputs() -> dict[str, Snapshot]:
    good = busy_snapshot()
    remote, local = good.remotes[0], good.local
    old = good.max_age_s + 0.1
    return {
        "no remote": replace(good, remotes=()),
        "not ready": with_remote(good, ready=False),
        "draining": with_remote(good, load=replace(remote.load, draining=True)),
        "old load at P": with_remote(good, load=replace(remote.load, age_s=old)),
        "old link": with_remote(good, link=replace(remote.link, age_s=old)),
        "old load at D": with_local(good, load=replace(local.load, age_s=old)),
        "no connector": with_local(good, offload_ready=False),
    }


def _unmeasured_inputs() -> dict[str, Snapshot]:
    good = busy_snapshot()
    remote = good.remotes[0]
    return {
        "goodput": with_remote(good, link=replace(remote.link, goodput_bytes_per_s=0.0)),
        "curve of P": with_remote(good, curve=UNKNOWN_CURVE),
        "staging full": with_local(good, free_staging_bytes=1000),
        "retention full": with_remote(good, free_retention_bytes=1000),
    }


UNKNOWN_INPUTS = _unknown_inputs()
UNMEASURED_INPUTS = _unmeasured_inputs()


class PolicyContract:
    """What holds for every routing policy. Subclass it and override `make`."""

    weighs_estimates = True
    """False for a policy that offloads without looking at measurements."""

    def make(self, settings: PolicySettings) -> RoutingPolicy[Any]:
        raise NotImplementedError

    @pytest.fixture
    def policy(self) -> RoutingPolicy[Any]:
        return self.make(PolicySettings())

    def test_same_inputs_give_the_same_decision(self, policy: RoutingPolicy[Any]) -> None:
        state = policy.initial_state()
        first = policy.decide(long_request(), busy_snapshot(), state)
        again = self.make(PolicySettings()).decide(long_request(), busy_snapshot(), state)
        assert first == again

    def test_inputs_are_not_changed(self, policy: RoutingPolicy[Any]) -> None:
        request, snapshot, state = long_request(), busy_snapshot(), policy.initial_state()
        before = copy.deepcopy((request, snapshot, state))
        policy.decide(request, snapshot, state)
        policy.observe(state, Outcome("t1", "staged", raw_bytes=10, phases={"import": 1.0}))
        assert (request, snapshot, state) == before

    def test_state_is_frozen(self, policy: RoutingPolicy[Any]) -> None:
        state = policy.initial_state()
        if state is not None:
            assert dataclasses.is_dataclass(state)
            hash(state)
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(state, dataclasses.fields(state)[0].name, 1)

    def test_a_plan_names_instances_of_the_snapshot_and_only_for_remote(
        self, policy: RoutingPolicy[Any]
    ) -> None:
        second = replace(busy_snapshot().remotes[0], instance="prefill-1")
        snapshot = replace(busy_snapshot(), remotes=(*busy_snapshot().remotes, second))
        decision = policy.decide(long_request(), snapshot, policy.initial_state())
        known = {(r.peer, r.instance) for r in snapshot.remotes}
        assert set(decision.plan) <= known
        assert len(set(decision.plan)) == len(decision.plan)
        assert bool(decision.plan) == (decision.target is Target.REMOTE)

    def test_a_reason_is_given_and_uncached_tokens_are_counted(
        self, policy: RoutingPolicy[Any]
    ) -> None:
        snapshot = with_local(busy_snapshot(), matched_tokens=1000)
        decision = policy.decide(long_request(), snapshot, policy.initial_state())
        assert isinstance(decision.reason, Reason)
        assert decision.uncached_tokens == 3000

    @pytest.mark.parametrize("what", sorted(UNKNOWN_INPUTS))
    def test_nothing_is_sent_where_unknown(self, policy: RoutingPolicy[Any], what: str) -> None:
        decision = policy.decide(long_request(), UNKNOWN_INPUTS[what], policy.initial_state())
        assert decision.plan == ()
        assert decision.reason not in (Reason.REMOTE_FASTER, Reason.ABOVE_THRESHOLD)

    @pytest.mark.parametrize("what", sorted(UNMEASURED_INPUTS))
    def test_nothing_is_sent_where_unmeasured(self, policy: RoutingPolicy[Any], what: str) -> None:
        decision = policy.decide(long_request(), UNMEASURED_INPUTS[what], policy.initial_state())
        if self.weighs_estimates:
            assert decision.target is Target.LOCAL
            assert decision.plan == ()

    def test_features_and_one_token_prompts_stay_local(self, policy: RoutingPolicy[Any]) -> None:
        state = policy.initial_state()
        for request in (
            replace(long_request(), features=frozenset({"echo"})),
            replace(long_request(), prompt_tokens=1),
        ):
            decision = policy.decide(request, busy_snapshot(), state)
            assert decision.target is Target.LOCAL
            assert decision.reason in (Reason.FEATURE, Reason.FORCED_LOCAL)

    def test_a_fully_cached_prompt_stays_local(self, policy: RoutingPolicy[Any]) -> None:
        snapshot = with_local(busy_snapshot(), matched_tokens=4000)
        decision = policy.decide(long_request(), snapshot, policy.initial_state())
        assert decision.target is Target.LOCAL
        assert decision.uncached_tokens == 0
