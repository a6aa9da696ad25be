"""The history is bounded, newest first, and holds enough to replay a decision."""

import asyncio

import msgspec
import pytest

from gateway.records import MAX_ITL_SAMPLES, RecordBook, RequestRecord, detail, summary
from policies.least_ttft import LeastTtft
from prfaas.errors import Cancelled, EngineUnavailable, PrfaasError
from prfaas.settings import PolicySettings
from prfaas.snapshot import Decision, RequestFacts, Snapshot, Target
from prfaas.testing.clock import ManualClock
from prfaas.testing.contracts import busy_snapshot, long_request


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def book(clock: ManualClock) -> RecordBook:
    return RecordBook(3, clock)


def test_the_oldest_are_forgotten(book: RecordBook) -> None:
    for i in range(5):
        book.open(f"r{i}", "chat", "t", f"k{i}")
    assert [record.request_id for record in book.latest(10)] == ["r4", "r3", "r2"]
    assert [record.request_id for record in book.latest(1)] == ["r4"]
    assert book.get("r0") is None
    assert len(book) == 3


def test_an_id_that_comes_again_is_the_newer_request(book: RecordBook) -> None:
    book.open("same", "chat", "t", "k1")
    book.open("other", "chat", "t", "k2")
    again = book.open("same", "chat", "t", "k3")
    assert book.get("same") is again
    assert [record.key for record in book.latest(10)] == ["k3", "k2"]


def test_times_of_a_stream(book: RecordBook, clock: ManualClock) -> None:
    record = book.open("r", "chat", "t", "k")
    assert (record.ttft_s, record.e2e_s) == (None, None)
    clock.advance(0.5)
    assert record.saw_events(1, clock.now()) is None
    clock.advance(0.1)
    assert record.saw_events(1, clock.now()) == pytest.approx(0.1)
    clock.advance(0.4)
    assert record.saw_events(2, clock.now()) == pytest.approx(0.2)
    record.ended_at = clock.now()
    assert record.ttft_s == pytest.approx(0.5)
    assert record.e2e_s == pytest.approx(1.0)
    assert record.events == 4
    assert record.itl_s == pytest.approx([0.1, 0.2, 0.2])


def test_samples_of_one_request_are_bounded(book: RecordBook) -> None:
    record = book.open("r", "chat", "t", "k")
    for i in range(MAX_ITL_SAMPLES + 100):
        assert record.saw_events(1, float(i)) == (1.0 if i else None)
    assert len(record.itl_s) == MAX_ITL_SAMPLES
    assert record.events == MAX_ITL_SAMPLES + 100


def test_the_target_is_where_it_was_really_sent(book: RecordBook) -> None:
    record = book.open("r", "chat", "t", "k")
    assert record.target is Target.LOCAL
    record.transfer_id = "k"
    assert record.target is Target.REMOTE


def test_an_error_gives_status_and_kind(book: RecordBook) -> None:
    record = book.open("r", "chat", "t", "k")
    record.fail(EngineUnavailable("x"))
    assert (record.status, record.error) == ("502", "engine_unavailable")


def test_whatever_ends_a_request_is_written_down(book: RecordBook) -> None:
    record = book.open("r", "chat", "t", "k")
    for error, status, kind in (
        (EngineUnavailable("x"), "502", "engine_unavailable"),
        (asyncio.CancelledError(), "499", "cancelled"),
        (ZeroDivisionError("secret"), "500", PrfaasError.kind),
    ):
        record.broke_off(error)
        assert (record.status, record.error) == (status, kind)


def test_a_logged_decision_can_be_replayed(book: RecordBook) -> None:
    policy = LeastTtft(PolicySettings())
    record = book.open("r", "chat", "t", "k")
    record.facts, record.snapshot = long_request(), busy_snapshot()
    record.policy, record.policy_state = policy.name, policy.initial_state()
    record.decision = policy.decide(record.facts, record.snapshot, policy.initial_state())

    line = msgspec.json.decode(msgspec.json.encode(summary(record)))
    facts = msgspec.convert(line["facts"], RequestFacts)
    snapshot = msgspec.convert(line["snapshot"], Snapshot)
    state = msgspec.convert(line["policy_state"], type(policy.initial_state()))
    again = policy.decide(facts, snapshot, state)
    assert again == msgspec.convert(line["decision"], Decision) == record.decision


def test_the_detail_adds_samples_to_the_summary(book: RecordBook) -> None:
    record: RequestRecord = book.open("r", "chat", "t", "k")
    record.saw_events(1, 1.0)
    record.saw_events(1, 1.5)
    assert msgspec.to_builtins(detail(record)) == {
        **msgspec.to_builtins(summary(record)),
        "itl_s": [0.5],
        "stages_s": {},
    }


def test_a_client_may_leave_once_it_has_all_of_its_stream(book: RecordBook) -> None:
    record = book.open("a", "chat", "trace", "key")
    record.completed()
    record.fail(Cancelled("the client went away"))
    assert (record.status, record.error) == ("200", "")
    record.fail(EngineUnavailable("broke"))
    assert (record.status, record.error) == ("502", "engine_unavailable")
