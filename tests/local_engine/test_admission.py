"""Who may come in, and how many may wait."""

from __future__ import annotations

import pytest

from local_engine.admission import Admission
from prfaas.errors import EngineUnavailable, InvalidRequest, Overloaded


def enter(admission: Admission, name: str) -> bool:
    posted = []
    admission.enter(name, 3.0, lambda: posted.append(name))
    return posted == [name]


def test_waiting_is_bounded_and_starting_makes_room() -> None:
    admission = Admission(2)
    assert enter(admission, "a")
    assert enter(admission, "b")
    with pytest.raises(Overloaded, match="2 requests wait") as caught:
        enter(admission, "c")
    assert caught.value.retry_after_s == 3.0
    admission.started("a")
    assert enter(admission, "c")


def test_a_paused_request_waits_again_and_leaving_frees_its_place() -> None:
    admission = Admission(1)
    enter(admission, "a")
    admission.started("a")
    admission.paused("a")
    with pytest.raises(Overloaded):
        enter(admission, "b")
    admission.leave("a")
    assert enter(admission, "b")


def test_an_id_is_free_again_once_its_request_has_left() -> None:
    admission = Admission(5)
    enter(admission, "a")
    with pytest.raises(InvalidRequest) as caught:
        enter(admission, "a")
    assert caught.value.param == "request_id"
    admission.leave("a")
    assert enter(admission, "a")


def test_nothing_is_posted_for_a_request_that_is_refused() -> None:
    admission = Admission(1)
    admission.refuse("closing down")
    posted = []
    with pytest.raises(EngineUnavailable, match="closing down"):
        admission.enter("a", 1.0, lambda: posted.append("a"))
    assert posted == []
