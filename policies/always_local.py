"""Everything is prefilled at D: the baseline."""

from __future__ import annotations

from policies.candidates import uncached_tokens
from prfaas.settings import PolicySettings
from prfaas.snapshot import Decision, Outcome, Reason, RequestFacts, Snapshot, Target


class AlwaysLocal:
    """Never offloads. Stateless; nothing to close."""

    name = "always_local"

    def __init__(self, settings: PolicySettings) -> None:
        """No parameter of `settings` matters here."""

    def initial_state(self) -> None:
        return None

    def decide(self, request: RequestFacts, snapshot: Snapshot, state: None) -> Decision:
        return Decision(
            Target.LOCAL, Reason.FORCED_LOCAL, uncached_tokens=uncached_tokens(request, snapshot)
        )

    def observe(self, state: None, outcome: Outcome) -> None:
        return None
