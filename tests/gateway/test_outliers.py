"""An engine is out for a while where it is much worse than the others, and only then."""

import pytest

from gateway.outliers import GOOD_FOR_S, REST_FIRST_S, REST_MOST_S, SAMPLES, Outliers
from prfaas.testing.clock import ManualClock


class Fleet:
    """Engines with a pace and a share of failures each; `run` lets all of them answer."""

    def __init__(self, size: int) -> None:
        self.clock = ManualClock()
        self.heard: list[tuple[str, float]] = []
        self.outliers = Outliers(self.clock, lambda name, until: self.heard.append((name, until)))
        self.names = [f"d-{at}" for at in range(size)]
        self.gap_s = dict.fromkeys(self.names, 0.02)
        self.fails_each = dict.fromkeys(self.names, 0)
        """One answer of so many; 0: none."""

    @property
    def out(self) -> list[str]:
        return [name for name in self.names if self.outliers.out(name)]

    def run(self, answers: int = 30) -> list[str]:
        for number in range(1, answers + 1):
            for name in self.names:
                if self.outliers.out(name):
                    continue
                each = self.fails_each[name]
                self.outliers.answered(name, bool(each) and number % each == 0)
                self.outliers.paced(name, self.gap_s[name])
        return self.out


def test_engines_that_are_alike_stay_in() -> None:
    fleet = Fleet(4)
    fleet.gap_s["d-0"] = 0.04  # a longer batch
    fleet.fails_each["d-1"] = 10
    assert fleet.run(200) == []


def test_a_slow_engine_is_out_and_comes_back() -> None:
    fleet = Fleet(4)
    fleet.gap_s["d-2"] = 0.1
    assert fleet.run() == ["d-2"]
    assert fleet.heard == [("d-2", pytest.approx(fleet.clock.now() + REST_FIRST_S))]
    assert list(fleet.outliers.ejections()) == [("d-2", "slow", 1)]
    fleet.clock.advance(REST_FIRST_S + 0.1)
    assert fleet.out == []
    fleet.gap_s["d-2"] = 0.02
    assert fleet.run(100) == []


def test_one_that_fails_now_and_then_is_out() -> None:
    """Never several times in a row, which is what breakers look for."""
    fleet = Fleet(2)
    fleet.fails_each["d-0"] = 2
    assert fleet.run() == ["d-0"]
    assert list(fleet.outliers.ejections()) == [("d-0", "failing", 1)]


def test_few_answers_prove_nothing() -> None:
    fleet = Fleet(3)
    fleet.gap_s["d-0"], fleet.fails_each["d-1"] = 9.0, 1
    assert fleet.run(SAMPLES - 1) == []


@pytest.mark.parametrize("size", [1, 2])
def test_nobody_is_slow_beside_fewer_than_two_others(size: int) -> None:
    fleet = Fleet(size)
    fleet.gap_s["d-0"] = 5.0
    assert fleet.run(100) == []


def test_what_is_wrong_with_all_is_held_against_none() -> None:
    fleet = Fleet(4)
    fleet.gap_s = dict.fromkeys(fleet.names, 3.0)
    fleet.fails_each = dict.fromkeys(fleet.names, 2)
    assert fleet.run(100) == []


def test_most_engines_stay_in_whatever_they_do() -> None:
    fleet = Fleet(6)
    for name, gap_s in (("d-0", 1.0), ("d-1", 1.0), ("d-2", 0.1)):
        fleet.gap_s[name] = gap_s
    fleet.gap_s |= {"d-3": 0.01, "d-4": 0.01, "d-5": 0.01}
    fleet.run(200)
    assert 1 <= len(fleet.out) <= 2


def test_rests_grow_while_it_does_not_get_better_and_are_short_again_later() -> None:
    fleet = Fleet(4)
    fleet.gap_s["d-0"] = 1.0
    rests = []
    for _ in range(5):
        assert fleet.run() == ["d-0"]
        rests.append(fleet.heard[-1][1] - fleet.clock.now())
        fleet.clock.advance(rests[-1] + 0.1)
    assert rests == pytest.approx([10.0, 20.0, 40.0, REST_MOST_S, REST_MOST_S])
    fleet.gap_s["d-0"] = 0.02
    fleet.run()
    fleet.clock.advance(GOOD_FOR_S + 1)
    fleet.gap_s["d-0"] = 1.0
    assert fleet.run() == ["d-0"]
    assert fleet.heard[-1][1] - fleet.clock.now() == pytest.approx(REST_FIRST_S)


def test_an_engine_that_has_left_is_not_compared_with() -> None:
    fleet = Fleet(3)
    fleet.run()
    fleet.outliers.left("d-2")
    fleet.names.remove("d-2")
    fleet.gap_s["d-0"] = 1.0
    assert fleet.run(100) == []
