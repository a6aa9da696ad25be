"""Which requests a page is told of, and when again."""

from __future__ import annotations

from gateway.dashboard.latest import AT_FIRST, MAX_TOLD, Latest
from gateway.live_policy import Shadow
from gateway.records import RecordBook, RequestRecord
from prfaas.snapshot import Decision, Estimate, Outcome, Reason, RequestFacts, Target
from prfaas.testing.clock import ManualClock

LOCAL = Estimate("local", 2.0, queue_s=1.0, prefill_s=1.0)
NEAR, FAR = Estimate("p/p-0", 0.5), Estimate("q/q-0", 0.9)
REMOTE = Decision(
    Target.REMOTE, Reason.REMOTE_FASTER, (("q", "q-0"),), (LOCAL, NEAR, FAR), uncached_tokens=90
)
STAYS = Decision(Target.LOCAL, Reason.LOCAL_FASTER, (), (LOCAL, FAR, NEAR))


def book() -> RecordBook:
    return RecordBook(5000, ManualClock())


def decided(records: RecordBook, name: str, decision: Decision = REMOTE) -> RequestRecord:
    record = records.open(name, "completions", "trace", f"key-{name}")
    record.engine = "d-0"
    record.decision, record.facts = decision, RequestFacts(name, 100)
    return record


def ids(latest: Latest) -> list[str]:
    return [each.id for each in latest.changed().requests]


def test_a_request_is_told_when_it_is_decided_and_whenever_it_goes_on() -> None:
    records = book()
    latest = Latest(records)
    records.open("undecided", "completions", "trace", "key")
    assert ids(latest) == []
    record = decided(records, "a")
    assert ids(latest) == ["a"]
    assert ids(latest) == []
    record.saw_events(1, record.started_at + 0.25)
    assert ids(latest) == ["a"]
    record.status = "200"
    assert ids(latest) == ["a"]
    record.outcome = Outcome("t", "staged", wire_bytes=7)
    (told,) = latest.changed().requests
    assert (told.status, told.outcome, told.wire_bytes, told.ttft_s) == ("200", "staged", 7, 0.25)
    assert ids(latest) == []


def test_both_estimates_are_told_whichever_way_it_went() -> None:
    records = book()
    decided(records, "leaves")
    decided(records, "stays", STAYS)
    leaves, stays = Latest(records).changed().requests
    assert (leaves.target, leaves.places, leaves.local, leaves.remote) == (
        "remote",
        ["q/q-0"],
        LOCAL,
        FAR,  # where it goes
    )
    assert (stays.target, stays.local, stays.remote) == ("local", LOCAL, NEAR)  # the best there was


def test_a_remote_decision_that_could_not_be_sent_ends_as_local() -> None:
    records = book()
    record = decided(records, "a")
    record.status = "200"
    assert Latest(records).changed().requests[0].target == "local"


def test_what_the_shadow_says_is_told() -> None:
    records = book()
    decided(records, "a").shadow = Shadow("paper", Target.LOCAL, (), False, -0.5)
    shadow = Latest(records).changed().requests[0].shadow
    assert shadow is not None
    assert (shadow.policy, shadow.agrees, shadow.target, shadow.saved_s) == (
        "paper",
        False,
        "local",
        -0.5,
    )


def test_a_message_holds_only_so_many_and_says_how_many_it_left_out() -> None:
    records = book()
    latest = Latest(records)
    for at in range(MAX_TOLD + 5):
        decided(records, str(at))
    message = latest.changed()
    assert [each.id for each in message.requests] == [str(at) for at in range(5, MAX_TOLD + 5)]
    assert message.left_out == 5
    assert ids(latest) == []


def test_a_new_page_begins_with_the_latest_and_old_ones_are_not_told_again() -> None:
    records = book()
    latest = Latest(records)
    for at in range(AT_FIRST + 5):
        decided(records, str(at))
    begun = latest.begin()
    assert [each.id for each in begun.requests] == [str(at) for at in range(5, AT_FIRST + 5)]
    latest.skip()
    assert ids(latest) == []
