"""A set of numbers kept as ranges is the set it stands for."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import ProtocolError
from prfaas.sequences import MAX_RANGES, SequenceSet, checked_ranges

NUMBERS = st.lists(st.integers(0, 30))


@given(added=NUMBERS, dropped=NUMBERS, low=st.integers(0, 32), high=st.integers(0, 32))
def test_it_behaves_as_a_set(added: list[int], dropped: list[int], low: int, high: int) -> None:
    numbers, model = SequenceSet(), set[int]()
    for number in added:
        assert numbers.add(number) is (number not in model)
        model.add(number)
    for number in dropped:
        numbers.discard(number)
        model.discard(number)
    ranges = list(numbers.ranges())
    assert {n for start, end in ranges for n in range(start, end)} == model
    assert all(start < end for start, end in ranges)
    assert all(left[1] < right[0] for left, right in pairwise(ranges))
    assert len(numbers) == len(model)
    assert all((n in numbers) is (n in model) for n in range(32))
    assert numbers.next == next(n for n in range(40) if n not in model)
    absent = numbers.absent(low, high)
    assert [n for start, end in absent for n in range(start, end)] == [
        n for n in range(low, high) if n not in model
    ]
    assert all(left[1] < right[0] for left, right in pairwise(absent))


@pytest.mark.parametrize("flat", [[1], [2, 2], [3, 1], [0, 2, 2, 4], [0, 2, 1, 4]])
def test_ranges_that_are_none_are_refused(flat: list[int]) -> None:
    with pytest.raises(ProtocolError):
        checked_ranges(flat)


def test_too_many_ranges_are_refused() -> None:
    assert len(checked_ranges(range(2 * MAX_RANGES))) == MAX_RANGES
    with pytest.raises(ProtocolError):
        checked_ranges(range(2 * MAX_RANGES + 2))
