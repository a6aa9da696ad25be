"""`always_local` never offloads."""

from typing import Any

from policies.always_local import AlwaysLocal
from prfaas.interfaces import RoutingPolicy
from prfaas.settings import PolicySettings
from prfaas.snapshot import Reason, Target
from prfaas.testing.contracts import PolicyContract, busy_snapshot, long_request


class TestAlwaysLocal(PolicyContract):
    def make(self, settings: PolicySettings) -> RoutingPolicy[Any]:
        return AlwaysLocal(settings)

    def test_stays_local_however_busy_d_is(self, policy: RoutingPolicy[Any]) -> None:
        decision = policy.decide(long_request(), busy_snapshot(), None)
        assert (decision.target, decision.reason) == (Target.LOCAL, Reason.FORCED_LOCAL)
