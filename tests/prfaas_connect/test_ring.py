"""Ring allocator: regions never overlap and space comes back in order."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas_connect.port.ring import RingAllocator


@given(st.lists(st.one_of(st.integers(1, 40), st.just(0)), max_size=200))
def test_live_regions_never_overlap_and_stay_inside(steps: list[int]) -> None:
    ring = RingAllocator(100)
    live: deque[tuple[int, int]] = deque()
    for step in steps:
        if step == 0:
            if live:
                ring.free(1)
                live.popleft()
            continue
        offset = ring.reserve(step)
        if offset is None:
            assert live, "an empty ring always has room"
            continue
        assert offset >= 0
        assert offset + step <= 100
        for other, size in live:
            assert offset + step <= other or other + size <= offset
        live.append((offset, step))
    assert ring.used_bytes == sum(size for _, size in live)


def test_impossible_sizes_and_frees_are_errors() -> None:
    ring = RingAllocator(10)
    for bad in (0, -1, 11):
        with pytest.raises(ValueError):
            ring.reserve(bad)
    with pytest.raises(ValueError):
        ring.free(1)


def test_whole_ring_can_be_used_again_after_freeing() -> None:
    ring = RingAllocator(10)
    assert ring.reserve(10) == 0
    assert ring.reserve(1) is None
    ring.free(1)
    assert ring.reserve(6) == 0
    assert ring.reserve(4) == 6
    ring.free(1)
    assert ring.reserve(6) == 0
    assert ring.reserve(1) is None
