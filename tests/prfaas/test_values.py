"""Values are structs that everybody may take for frozen dataclasses."""

import dataclasses
import pickle

import msgspec
import pytest

from prfaas.snapshot import EngineLoad, Estimate, LinkState, RequestFacts, Snapshot
from prfaas.values import Value


class Point(Value, frozen=True):
    x: int
    y: int = 2
    names: frozenset[str] = frozenset()


def test_they_are_made_shown_and_compared_as_dataclasses_are() -> None:
    assert repr(Point(1)) == "Point(x=1, y=2, names=frozenset())"
    assert Point(1) == Point(x=1, y=2)
    assert Point(1) != Point(2)
    assert {Point(1): "a"}[Point(1)] == "a"
    assert pickle.loads(pickle.dumps(Point(3))) == Point(3)
    with pytest.raises(TypeError):
        Point()


def test_nothing_changes_one() -> None:
    with pytest.raises(AttributeError):
        Point(1).x = 2  # type: ignore[misc]


def test_dataclasses_takes_them_as_its_own() -> None:
    assert dataclasses.replace(Point(1), y=5) == Point(1, 5)
    assert [field.name for field in dataclasses.fields(Point)] == ["x", "y", "names"]
    assert dataclasses.asdict(Point(1)) == {"x": 1, "y": 2, "names": frozenset()}
    assert dataclasses.is_dataclass(Point)
    with pytest.raises(TypeError):
        dataclasses.replace(Point(1), z=1)


def test_the_types_of_a_decision_are_values_and_go_through_json() -> None:
    for value in (EngineLoad(waiting=3), LinkState(rtt_s=0.5), Estimate("local", 1.0)):
        kind = type(value)
        assert issubclass(kind, Value)
        assert msgspec.json.decode(msgspec.json.encode(value), type=kind) == value
    facts = RequestFacts("r", 10, features=frozenset({"echo"}))
    assert msgspec.json.decode(msgspec.json.encode(facts), type=RequestFacts) == facts
    assert [field.name for field in dataclasses.fields(Snapshot)][:2] == ["local", "remotes"]
