"""The default policy: prefill where the first token is estimated to come first."""

from __future__ import annotations

from dataclasses import dataclass

from policies.candidates import MAX_PLAN, forbidden, not_worth, uncached_tokens, usable
from policies.estimate import arrival_seconds, as_estimate, local_estimate, remote_parts
from prfaas.settings import PolicySettings
from prfaas.snapshot import (
    Decision,
    Estimate,
    Outcome,
    Reason,
    RequestFacts,
    Snapshot,
    Target,
)

IMPORT_DECAY = 0.8
"""Weight of what was learnt before an import: about the last five count."""

FREE_IMPORT_BYTES = 16 << 20
"""Bytes taken to cost nothing beside those seen. A few kilobytes measure the latency of a step and
not the rate of copying; without this one short prompt could make long ones look hopeless, which
then would never be sent and never correct it."""


@dataclass(frozen=True, slots=True)
class ImportCost:
    """What D took to import KV lately: decaying sums over outcomes."""

    seconds: float = 0.0
    raw_bytes: float = 0.0

    @property
    def s_per_byte(self) -> float:
        return self.seconds / (self.raw_bytes + FREE_IMPORT_BYTES)


class LeastTtft:
    """Remote where the best instance beats D by `remote_margin`, local otherwise.

    The margin keeps a request at home when the two are about equal, since a transfer can fail and
    a local prefill cannot.
    """

    name = "least_ttft"

    def __init__(self, settings: PolicySettings) -> None:
        self._min_uncached_tokens = settings.min_uncached_tokens
        self._remote_share = 1.0 - min(settings.remote_margin, 1.0)

    def initial_state(self) -> ImportCost:
        return ImportCost()

    def decide(self, request: RequestFacts, snapshot: Snapshot, state: ImportCost) -> Decision:
        uncached = uncached_tokens(request, snapshot)
        reason = forbidden(request, snapshot) or not_worth(
            request, snapshot, self._min_uncached_tokens
        )
        local = local_estimate(request, snapshot)
        remotes, unusable = usable(request, snapshot)
        ranked: list[tuple[float, tuple[str, str]]] = []
        estimates: list[Estimate] = [] if local is None else [local]
        if local is not None and remotes:
            decode_s, import_s = arrival_seconds(request, snapshot), state.s_per_byte
            for remote in remotes:
                parts = remote_parts(request, snapshot, remote, decode_s, import_s)
                estimates.append(as_estimate(remote, parts))
                ranked.append((parts[0], (remote.peer, remote.instance)))
        plan: tuple[tuple[str, str], ...] = ()
        if reason is None:
            if not remotes:
                reason = unusable
            elif local is None or not ranked:
                reason = Reason.UNMEASURED
            else:
                plan = self._faster(local.ttft_s, ranked)
                reason = Reason.REMOTE_FASTER if plan else Reason.LOCAL_FASTER
        return Decision(
            Target.REMOTE if plan else Target.LOCAL, reason, plan, tuple(estimates), uncached
        )

    def _faster(
        self, local_s: float, ranked: list[tuple[float, tuple[str, str]]]
    ) -> tuple[tuple[str, str], ...]:
        """Instances that beat D, best first; none unless the best one does by the margin."""
        ranked.sort()
        if ranked[0][0] >= local_s * self._remote_share:
            return ()
        return tuple([place for ttft_s, place in ranked if ttft_s < local_s][:MAX_PLAN])

    def observe(self, state: ImportCost, outcome: Outcome) -> ImportCost:
        """Learn what an import costs."""
        return learn_import(state, outcome)


def learn_import(state: ImportCost, outcome: Outcome) -> ImportCost:
    """`state` with one more import, or itself where the outcome tells of none."""
    import_s = outcome.phases.get("import", 0.0)
    if outcome.status != "staged" or outcome.raw_bytes <= 0 or import_s <= 0:
        return state
    return ImportCost(
        IMPORT_DECAY * state.seconds + import_s,
        IMPORT_DECAY * state.raw_bytes + outcome.raw_bytes,
    )
