"""Plans are signed under the agent's key, and nothing stays on the books."""

from dataclasses import replace

import msgspec
import pytest

from gateway.admission import FallbackBudget
from gateway.cluster_view import ClusterView
from gateway.dispatch import Dispatcher
from gateway.ids import Ids
from gateway.records import RequestRecord
from prfaas.errors import PrefillUnavailable, Unauthorized
from prfaas.snapshot import Decision, Reason, Target
from prfaas.telemetry import WatchUpdate
from prfaas.testing.clock import ManualClock
from prfaas.testing.gateway_setup import (
    ENGINE,
    INSTANCE,
    KEY,
    PEER,
    PLACE,
    d_engine,
    gateway_settings,
    link,
    p_engine,
)
from prfaas.transfer import PlanStep, TransferParams, parse, sign, verify

REMOTE = Decision(
    Target.REMOTE, Reason.REMOTE_FASTER, plan=((PEER, INSTANCE),), uncached_tokens=1000
)
LOCAL = Decision(Target.LOCAL, Reason.LOCAL_FASTER, uncached_tokens=1000)


class Desk:
    """A dispatcher with its books."""

    def __init__(self, budget: int = 1500, **settings: object) -> None:
        chosen = gateway_settings(**settings)
        self.clock = ManualClock()
        self.view = ClusterView(chosen.gateway, chosen.limits, self.clock)
        self.view.update(ENGINE, WatchUpdate(0, True, engines=(d_engine(),), links=(link(),)))
        self.view.update(PLACE, WatchUpdate(0, True, engines=(p_engine(),)))
        self.budget = FallbackBudget(budget)
        self.dispatcher = Dispatcher(
            chosen.gateway, chosen.limits, self.view, self.budget, self.clock
        )

    def dispatch(self, record: RequestRecord, salt: str = "") -> TransferParams:
        """What the agent makes of what is sent."""
        raw = self.dispatcher.dispatch(record, salt)
        assert raw is not None
        return parse(msgspec.json.decode(raw))

    def record(self, decision: Decision) -> RequestRecord:
        record = RequestRecord("r", "chat", "", Ids().hex(16), 0.0, 0.0)
        record.decision, record.snapshot = decision, self.view.snapshot(ENGINE, {})
        return record


def test_the_plan_goes_out_in_order_signed_and_short_lived() -> None:
    desk = Desk()
    second = replace(REMOTE, plan=((PEER, INSTANCE), ("q", "q-1")))
    record = desk.record(second)
    params = desk.dispatch(record, "the salt")
    verify(params, [KEY.encode()], desk.clock.wall())
    assert params.plan == (PlanStep(PEER, INSTANCE), PlanStep("q", "q-1"))
    assert params.salt == "the salt"
    assert params.transfer_id == record.transfer_id == record.key
    assert params.expires == desk.clock.wall() + 30
    with pytest.raises(Unauthorized):
        verify(replace_plan(params), [KEY.encode()], desk.clock.wall())


def replace_plan(params: TransferParams) -> TransferParams:
    return parse({**params.to_dict(), "plan": [{"peer": "evil", "instance": "x"}]})


def test_local_is_granted_only_while_the_budget_lasts() -> None:
    """Case 18."""
    desk = Desk(budget=1500)
    records = [desk.record(REMOTE) for _ in range(3)]
    granted = [desk.dispatch(record).on_failure for record in records]
    assert granted == ["local", "reject", "reject"]
    desk.dispatcher.prefill_over(records[0])
    assert desk.dispatch(desk.record(REMOTE)).on_failure == "local"


def test_reject_is_never_turned_into_local() -> None:
    desk = Desk(on_failure="reject")
    assert desk.dispatch(desk.record(REMOTE)).on_failure == "reject"
    assert desk.budget.granted_tokens == 0


def test_what_was_sent_is_counted_until_it_is_over() -> None:
    desk = Desk()
    remote, local = desk.record(REMOTE), desk.record(LOCAL)
    desk.dispatcher.dispatch(remote, "")
    assert desk.dispatcher.dispatch(local, "") is None
    at_p = desk.view.sent.unshown(PLACE)
    assert (at_p.tokens, at_p.raw_bytes, at_p.wire_bytes) == (1000, 1_000_000, 800_000)
    assert desk.view.sent.unshown(ENGINE).tokens == 1000
    for _ in range(2):
        desk.dispatcher.prefill_over(remote)
        desk.dispatcher.prefill_over(local)
    assert len(desk.view.sent) == 0
    assert desk.budget.granted_tokens == 0


def test_nowhere_to_go_is_refused_or_served_locally_as_configured() -> None:
    """Case 2."""
    nowhere = Decision(Target.REMOTE, Reason.NO_PEER, uncached_tokens=1000)
    desk = Desk(on_failure="reject")
    record = desk.record(nowhere)
    with pytest.raises(PrefillUnavailable, match=r"no prefill instance .*\(no_peer\)") as caught:
        desk.dispatcher.dispatch(record, "")
    assert caught.value.retry_after_s
    desk = Desk(on_failure="local")
    record = desk.record(nowhere)
    assert desk.dispatcher.dispatch(record, "") is None
    assert record.target is Target.LOCAL
    assert desk.view.sent.unshown(ENGINE).tokens == 1000


def test_a_trusted_clients_plan_is_counted_under_its_own_id() -> None:
    desk = Desk()
    theirs = sign(
        TransferParams(
            version=1, transfer_id="theirs", plan=(PlanStep(PEER, INSTANCE),), on_failure="local",
            quality="exact", deadline_s=1.0, salt="", expires=1e12,
        ),
        b"another key",
    )  # fmt: skip
    record = desk.record(REMOTE)
    desk.dispatcher.relayed(record, theirs)
    assert (record.transfer_id, record.target) == ("theirs", Target.REMOTE)
    assert desk.view.sent.unshown(PLACE).tokens == 1000
    desk.dispatcher.prefill_over(record)
    assert len(desk.view.sent) == 0
