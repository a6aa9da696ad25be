"""What other gateways say, as decisions see it."""

from __future__ import annotations

import pytest

from gateway.neighbours import Neighbours
from gateway.sent import Unshown
from prfaas.cluster_state import LinkSample, Load, Member, Sent
from prfaas.snapshot import LinkState

UNMEASURED = LinkState(age_s=5.0)


def sample(age_s: float = 0.2, **fields: float) -> LinkSample:
    known = {"goodput_bytes_per_s": 1e6, "rtt_s": 0.02, "wire_ratio": 1.5, "age_s": age_s}
    return LinkSample("d-0", "p", "p-0", **{**known, **fields})


def test_alone_nothing_is_added() -> None:
    own = Unshown(1, 1, 1, 1)
    assert Neighbours().unshown("d-0", own) is own
    assert Neighbours().measured("p", "p-0", UNMEASURED, 0.0) is UNMEASURED


def test_what_all_others_sent_is_added_and_ones_own_is_not() -> None:
    neighbours = Neighbours()
    members = [
        Member("me", sent={"d-0": Load(1000, 10, 0, 0)}),
        Member("a", sent={"d-0": Load(5, 1, 2, 3)}),
        Member("b", sent={"d-0": Load(7, 2, 0, 0), "p/p-0": Load(1, 1, 0, 0)}),
    ]
    neighbours.take(members, "me", 0.0)
    assert neighbours.unshown("d-0", Unshown(1, 1, 1, 1)) == Unshown(13, 4, 3, 4)
    assert neighbours.unshown("p/p-0", Unshown()) == Unshown(1, 1, 0, 0)
    assert [member.id for member in neighbours.members] == ["a", "b"]
    neighbours.take(members[:1], "me", 1.0)
    assert neighbours.unshown("d-0", Unshown()) == Unshown()


def test_what_one_tells_meanwhile_takes_the_place_of_what_it_said() -> None:
    neighbours = Neighbours()
    a = Member("a", sent={"d-0": Load(5, 1), "p/p-0": Load(9, 1)}, sent_seq=4)
    b = Member("b", sent={"d-0": Load(7, 1)}, sent_seq=90)
    neighbours.take([a, b], "me", 0.0)
    assert neighbours.take_sent(Sent("a", 6, {"d-0": Load(50, 2, transfers=3, staged_bytes=40)}))
    assert neighbours.unshown("d-0", Unshown(tokens=1)) == Unshown(58, 3, 0, 0, 3, 40)
    assert neighbours.unshown("p/p-0", Unshown()) == Unshown()
    assert not neighbours.take_sent(Sent("a", 5, {"d-0": Load(1000)})), "older than what is known"
    assert not neighbours.take_sent(Sent("stranger", 1, {"d-0": Load(1000)}))
    neighbours.take([a, b], "me", 0.1)
    assert neighbours.unshown("d-0", Unshown()).tokens == 57, "the store had it from before"
    neighbours.take([Member("a", sent={}, sent_seq=7), b], "me", 0.2)
    assert neighbours.unshown("d-0", Unshown()) == Unshown(7, 1)
    neighbours.take([b], "me", 0.3)
    assert not neighbours.take_sent(Sent("a", 8, {"d-0": Load(1000)})), "it has left"


def test_a_link_without_a_measurement_gets_the_youngest_of_the_others() -> None:
    neighbours = Neighbours()
    old, young = sample(3.0, goodput_bytes_per_s=5e6), sample(0.5, wire_ratio=0.0)
    neighbours.take([Member("a", links=(old,)), Member("b", links=(young,))], "me", 10.0)
    found = neighbours.measured("p", "p-0", UNMEASURED, 11.0)
    assert (found.goodput_bytes_per_s, found.rtt_s, found.wire_ratio) == (1e6, 0.02, 1.0)
    assert found.age_s == pytest.approx(1.5)
    own = LinkState(goodput_bytes_per_s=2e6, age_s=9.0)
    assert neighbours.measured("p", "p-0", own, 11.0) is own
    assert neighbours.measured("p", "other", UNMEASURED, 11.0) is UNMEASURED
    neighbours.forget()
    assert neighbours.measured("p", "p-0", UNMEASURED, 11.0) is UNMEASURED
