"""`always_remote` offloads whatever can leave D, and says so where nothing can take it."""

from dataclasses import replace
from typing import Any

from policies.always_remote import AlwaysRemote
from prfaas.interfaces import RoutingPolicy
from prfaas.settings import PolicySettings
from prfaas.snapshot import EngineLoad, Reason, Target
from prfaas.testing.contracts import PolicyContract, busy_snapshot, long_request, with_remote


class TestAlwaysRemote(PolicyContract):
    weighs_estimates = False

    def make(self, settings: PolicySettings) -> RoutingPolicy[Any]:
        return AlwaysRemote(settings)

    def test_offloads_even_a_short_prompt(self, policy: RoutingPolicy[Any]) -> None:
        request = replace(long_request(), prompt_tokens=2, cache_known=False)
        decision = policy.decide(request, busy_snapshot(), None)
        assert (decision.target, decision.reason) == (Target.REMOTE, Reason.FORCED_REMOTE)
        assert decision.plan == (("peer", "prefill-0"),)

    def test_without_a_ready_instance_the_target_stays_remote(
        self, policy: RoutingPolicy[Any]
    ) -> None:
        decision = policy.decide(long_request(), with_remote(busy_snapshot(), ready=False), None)
        assert (decision.target, decision.reason) == (Target.REMOTE, Reason.NO_PEER)
        assert decision.plan == ()

    def test_the_idle_instance_comes_before_one_with_83_waiting(
        self, policy: RoutingPolicy[Any]
    ) -> None:
        """Case 6, whatever is cached where."""
        idle = busy_snapshot().remotes[0]
        busy = replace(
            idle,
            instance="busy",
            matched_tokens=3900,
            load=EngineLoad(queue_tokens=83_000, waiting=83),
        )
        snapshot = replace(busy_snapshot(), remotes=(busy, idle))
        decision = policy.decide(long_request(), snapshot, None)
        assert decision.plan == (("peer", "prefill-0"), ("peer", "busy"))

    def test_what_this_gateway_just_sent_counts_as_queue(self, policy: RoutingPolicy[Any]) -> None:
        idle = busy_snapshot().remotes[0]
        just_used = replace(
            idle, instance="just-used", load=EngineLoad(sent_tokens=4000, sent_requests=1)
        )
        snapshot = replace(busy_snapshot(), remotes=(just_used, idle))
        decision = policy.decide(long_request(), snapshot, None)
        assert decision.plan[0] == ("peer", "prefill-0")
