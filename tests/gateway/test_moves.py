"""A request moves only where it comes sooner, and by the same rules as in the simulator."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gateway.moves import (
    Ahead,
    Better,
    better_at_a_peer,
    better_at_d,
    idle_peers,
    is_idle,
    link_seconds,
)
from policies.priced import Priced
from prfaas.late_binding import FLOW_PRICE
from prfaas.settings import PolicySettings
from prfaas.snapshot import (
    Decision,
    EngineLoad,
    LinkClass,
    LinkState,
    LocalEngine,
    PrefillCurve,
    Reason,
    RemoteInstance,
    RequestFacts,
    Snapshot,
    Target,
)

CURVE = PrefillCurve(base_s=0.0, token_s=0.001, token_context_s=0.0, chunk_tokens=256)
FACTS = RequestFacts("r", prompt_tokens=1001)
LINK = LinkState(goodput_bytes_per_s=1e6, rtt_s=0.2)


def peer(instance: str = "0", name: str = "p", **fields: object) -> RemoteInstance:
    known = {
        "load": EngineLoad(),
        "curve": replace(CURVE, token_s=0.0005),
        "matched_tokens": 0,
        "link": LINK,
        "free_retention_bytes": 1 << 30,
        **fields,
    }
    return RemoteInstance(name, instance, LinkClass.WAN, **known)  # type: ignore[arg-type]


def snapshot(*remotes: RemoteInstance, **load: object) -> Snapshot:
    local = LocalEngine("d", EngineLoad(**load), CURVE, 0, 1 << 30)  # type: ignore[arg-type]
    return Snapshot(local, remotes or (peer(),), token_bytes=100, max_age_s=3.0)


def decide(facts: RequestFacts, seen: Snapshot) -> Decision:
    policy = Priced(PolicySettings(name="priced"))
    return policy.decide(facts, seen, policy.initial_state())


def at_a_peer(
    seen: Snapshot, ahead_tokens: int = 4000, flows: int = 0, taken: tuple[str, ...] = ()
) -> Better | None:
    ahead = Ahead(ahead_tokens, 1)
    return better_at_a_peer(FACTS, seen, ahead, decide, {"p": flows}, taken)


def test_what_is_ahead_of_it_decides_not_the_whole_queue() -> None:
    seen = snapshot(queue_tokens=50_000, waiting=12)
    better = at_a_peer(seen, ahead_tokens=4000)
    assert better is not None
    assert better.stay_s == pytest.approx(4.0 + 1.0 + 0.001)
    assert better.decision.target is Target.REMOTE
    assert better.decision.reason is Reason.REMOTE_FASTER
    assert better.decision.plan == (("p", "0"),)
    assert better.snapshot is seen
    ahead_of_less = at_a_peer(seen, ahead_tokens=400)
    assert ahead_of_less is not None
    assert better.gain_s - ahead_of_less.gain_s == pytest.approx(3.6)


def test_a_move_to_a_peer_has_to_pay_for_the_link() -> None:
    seen = snapshot(queue_tokens=9000, waiting=3)
    alone, shared = at_a_peer(seen), at_a_peer(seen, flows=2)
    assert alone is not None
    assert shared is not None
    own_s = link_seconds(FACTS, seen, seen.remotes[0])
    assert own_s == pytest.approx(0.1)
    assert shared.go_s - alone.go_s == pytest.approx(2 * FLOW_PRICE * own_s)


def test_of_two_idle_instances_the_faster_is_taken_and_a_promised_one_is_not() -> None:
    quick = replace(CURVE, token_s=0.0001)
    seen = snapshot(peer("slow"), peer("quick", curve=quick), queue_tokens=9000, waiting=3)
    better = at_a_peer(seen)
    assert better is not None
    assert better.decision.plan == (("p", "quick"),)
    other = at_a_peer(seen, taken=("p/quick",))
    assert other is not None
    assert other.decision.plan == (("p", "slow"),)
    assert at_a_peer(seen, taken=("p/quick", "p/slow")) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"load": EngineLoad(queue_tokens=1)},
        {"load": EngineLoad(sent_tokens=1)},
        {"load": EngineLoad(waiting=1)},
        {"load": EngineLoad(draining=True)},
        {"load": EngineLoad(age_s=4.0)},
        {"ready": False},
        {"link": replace(LINK, age_s=4.0)},
        {"link": LinkState()},
        {"free_retention_bytes": 10},
        {"link": replace(LINK, in_flight_bytes=50_000_000)},
    ],
)
def test_only_a_peer_that_stands_idle_and_can_take_it_takes_it(fields: dict[str, object]) -> None:
    """Busy, unknown, not ready, without room, or with a link over its budget."""
    assert at_a_peer(snapshot(peer(**fields), queue_tokens=9000, waiting=3)) is None


def test_what_must_not_leave_does_not() -> None:
    seen = snapshot(queue_tokens=9000, waiting=3)
    for facts in (
        replace(FACTS, features=frozenset({"echo"})),
        replace(FACTS, cache_known=False),
        replace(FACTS, short=True),
    ):
        assert better_at_a_peer(facts, seen, Ahead(4000, 1), decide, {}) is None


def home(seen: Snapshot, ahead: Ahead, flows: int = 0) -> Better | None:
    return better_at_d(FACTS, seen, seen.remotes[0], ahead, decide, flows)


def test_idle_d_takes_back_what_waits_at_a_peer() -> None:
    seen = snapshot(peer(load=EngineLoad(queue_tokens=9000, waiting=3)))
    better = home(seen, Ahead(8000, 2))
    assert better is not None
    assert better.decision.target is Target.LOCAL
    assert better.decision.plan == ()
    # Half a round trip, 8,000 tokens at 0.5 ms, its own 1,000, one decode step; KV flows behind.
    assert better.stay_s == pytest.approx(0.1 + 4.0 + 0.5 + 0.001)
    assert better.go_s == pytest.approx(0.1 + 1.0 + 0.001)


def test_a_link_that_drops_brings_home_what_waits_although_it_is_over_its_budget() -> None:
    slow = replace(LINK, goodput_bytes_per_s=1e4, in_flight_bytes=1_100_000)
    seen = snapshot(peer(link=slow, load=EngineLoad(queue_tokens=2000, waiting=2)))
    better = home(seen, Ahead(1000, 1))
    assert better is not None
    # 1 MB of others before its own 100 KB, at 10 KB/s.
    assert better.stay_s == pytest.approx(0.1 + 100 + 10 + 0.001)
    shared = home(seen, Ahead(1000, 1), flows=1)
    assert shared is not None
    assert shared.stay_s - better.stay_s == pytest.approx(FLOW_PRICE * 10)


@pytest.mark.parametrize(
    "fields",
    [
        {"link": LinkState()},
        {"link": replace(LINK, age_s=4.0)},
        {"load": EngineLoad(queue_tokens=9000, age_s=4.0)},
        {"curve": PrefillCurve(0.0, 0.0, 0.0, 256)},
    ],
)
def test_what_is_not_known_brings_nothing_home(fields: dict[str, object]) -> None:
    assert home(snapshot(peer(**fields)), Ahead(8000, 2)) is None


def test_idle_is_who_has_nothing_and_is_known_to() -> None:
    assert is_idle(EngineLoad(running=8, context_tokens=9000), 3.0)
    assert not is_idle(EngineLoad(age_s=3.1), 3.0)
    seen = snapshot(peer("a"), peer("b", load=EngineLoad(queue_tokens=5)), peer("c", ready=False))
    assert [remote.instance for remote in idle_peers(seen)] == ["a"]
