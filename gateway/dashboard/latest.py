"""The latest requests for the dashboard, read from the records without a hook in their way."""

from __future__ import annotations

from itertools import islice

from gateway.dashboard.messages import Request, Requests, Shadowed
from gateway.records import RecordBook, RequestRecord
from prfaas.snapshot import Decision, Estimate, Target

LOOK_BACK = 1000
"""Records that are looked at; a request that goes on after so many others is not told again."""
MAX_TOLD = 60
"""Requests of one message."""
AT_FIRST = 200
"""Requests that a page begins with."""

Version = tuple[int, bool, str, bool]


class Latest:
    """Says what is new since it was last asked; nothing to close."""

    def __init__(self, records: RecordBook) -> None:
        self._records = records
        self._told: dict[str, Version] = {}

    def begin(self) -> Requests:
        """For a page that was just opened."""
        decided = (r for r in self._records.latest(LOOK_BACK) if r.decision is not None)
        found = [entry(record) for record in islice(decided, AT_FIRST)]
        return Requests(found[::-1])

    def changed(self) -> Requests:
        """What is new or went on."""
        told: dict[str, Version] = {}
        found: list[Request] = []
        left_out = 0
        for record in self._records.latest(LOOK_BACK):
            if record.decision is None:
                continue
            version = _version(record)
            told[record.request_id] = version
            if self._told.get(record.request_id) == version:
                continue
            if len(found) < MAX_TOLD:
                found.append(entry(record))
            else:
                left_out += 1
        self._told = told
        return Requests(found[::-1], left_out)

    def skip(self) -> None:
        """What there is now is known."""
        self._told = {
            record.request_id: _version(record)
            for record in self._records.latest(LOOK_BACK)
            if record.decision is not None
        }


def _version(record: RequestRecord) -> Version:
    """Differs when there is something new to tell."""
    return (
        len(record.tried),
        record.first_event_at is None,
        record.status,
        record.outcome is None,
    )


def entry(record: RequestRecord) -> Request:
    """A record whose decision is made."""
    decision, facts = record.decision, record.facts
    assert decision is not None
    shadow, outcome = record.shadow, record.outcome
    return Request(
        id=record.request_id,
        at=record.started_wall,
        engine=record.engine,
        target=record.target_name if record.transfer_id or record.status else decision.target.value,
        reason=decision.reason.value,
        places=["/".join(step) for step in decision.plan],
        prompt_tokens=facts.prompt_tokens if facts is not None else 0,
        uncached_tokens=decision.uncached_tokens,
        local=decision.estimate("local"),
        remote=_remote_estimate(decision),
        policy=record.policy,
        policy_role=record.policy_role,
        tried=list(record.tried),
        shadow=None
        if shadow is None
        else Shadowed(shadow.policy, shadow.agrees, shadow.target.value, shadow.saved_s),
        status=record.status,
        error=record.error,
        ttft_s=record.ttft_s,
        e2e_s=record.e2e_s,
        outcome=outcome.status if outcome is not None else "",
        outcome_reason=outcome.reason if outcome is not None else "",
        wire_bytes=outcome.wire_bytes if outcome is not None else 0,
        quality=outcome.quality if outcome is not None else "",
    )


def _remote_estimate(decision: Decision) -> Estimate | None:
    """Of the instance it is sent to, or of the one that would have been best."""
    if decision.target is Target.REMOTE and decision.plan:
        return decision.estimate("/".join(decision.plan[0]))
    remotes = [each for each in decision.estimates if each.where != "local"]
    return min(remotes, key=lambda each: each.ttft_s, default=None)
