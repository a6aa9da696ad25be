"""A decider in use today: long enough, or new enough in proportion, goes remote."""

from __future__ import annotations

from policies.candidates import MAX_PLAN, forbidden, not_worth, uncached_tokens, usable
from policies.estimate import queue_seconds
from prfaas.settings import PolicySettings
from prfaas.snapshot import Decision, Outcome, Reason, RequestFacts, Snapshot, Target


class UncachedRatio:
    """Stays local with at most `threshold_tokens` uncached tokens that are also less than
    `uncached_ratio` of the prompt; all else goes to the shortest queue. Stateless.

    By itself that would send short new prompts away, since all of them is uncached; they stay local
    by `min_uncached_tokens`, as for every policy.
    """

    name = "uncached_ratio"

    def __init__(self, settings: PolicySettings) -> None:
        self._threshold_tokens = settings.threshold_tokens
        self._ratio = settings.uncached_ratio
        self._min_uncached_tokens = settings.min_uncached_tokens

    def initial_state(self) -> None:
        return None

    def decide(self, request: RequestFacts, snapshot: Snapshot, state: None) -> Decision:
        uncached = uncached_tokens(request, snapshot)
        reason = forbidden(request, snapshot) or not_worth(
            request, snapshot, self._min_uncached_tokens
        )
        few = uncached <= self._threshold_tokens
        if reason is None and few and uncached < self._ratio * request.prompt_tokens:
            reason = Reason.BELOW_THRESHOLD
        if reason is not None:
            return Decision(Target.LOCAL, reason, uncached_tokens=uncached)
        remotes, reason = usable(request, snapshot)
        if not remotes:
            return Decision(Target.LOCAL, reason, uncached_tokens=uncached)
        remotes.sort(key=lambda remote: queue_seconds(remote.load, remote.curve))
        plan = tuple((r.peer, r.instance) for r in remotes[:MAX_PLAN])
        return Decision(Target.REMOTE, Reason.ABOVE_THRESHOLD, plan, uncached_tokens=uncached)

    def observe(self, state: None, outcome: Outcome) -> None:
        return None
