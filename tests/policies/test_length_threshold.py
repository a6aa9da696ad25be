"""`length_threshold` looks at uncached tokens and nothing else."""

from dataclasses import replace
from typing import Any

import pytest

from policies.length_threshold import LengthThreshold
from prfaas.interfaces import RoutingPolicy
from prfaas.settings import PolicySettings
from prfaas.snapshot import EngineLoad, Reason, Target
from prfaas.testing.contracts import PolicyContract, busy_snapshot, long_request, with_local


class TestLengthThreshold(PolicyContract):
    def make(self, settings: PolicySettings) -> RoutingPolicy[Any]:
        return LengthThreshold(settings)

    @pytest.mark.parametrize(
        ("prompt_tokens", "matched", "target", "reason"),
        [
            (2049, 0, Target.LOCAL, Reason.BELOW_THRESHOLD),
            (2050, 0, Target.REMOTE, Reason.ABOVE_THRESHOLD),
            (4001, 1952, Target.LOCAL, Reason.BELOW_THRESHOLD),
            (4001, 1951, Target.REMOTE, Reason.ABOVE_THRESHOLD),
            (4001, 3990, Target.LOCAL, Reason.MOSTLY_CACHED),
            (30, 0, Target.LOCAL, Reason.TOO_SHORT),
        ],
    )
    def test_the_threshold_is_on_uncached_tokens(
        self,
        policy: RoutingPolicy[Any],
        prompt_tokens: int,
        matched: int,
        target: Target,
        reason: Reason,
    ) -> None:
        request = replace(long_request(), prompt_tokens=prompt_tokens)
        snapshot = with_local(busy_snapshot(), matched_tokens=matched)
        decision = policy.decide(request, snapshot, None)
        assert (decision.target, decision.reason) == (target, reason)

    def test_it_offloads_even_where_local_would_be_faster(self, policy: RoutingPolicy[Any]) -> None:
        snapshot = with_local(busy_snapshot(), load=EngineLoad())
        decision = policy.decide(long_request(), snapshot, None)
        assert decision.reason is Reason.ABOVE_THRESHOLD

    def test_the_shortest_queue_comes_first(self, policy: RoutingPolicy[Any]) -> None:
        idle = busy_snapshot().remotes[0]
        busy = replace(idle, instance="busy", load=EngineLoad(queue_tokens=500, waiting=1))
        decision = policy.decide(
            long_request(), replace(busy_snapshot(), remotes=(busy, idle)), None
        )
        assert decision.plan == (("peer", "prefill-0"), ("peer", "busy"))
