"""A table turns positions into slots, and into runs of slots."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from local_engine.kv.table import BlockTable


@given(
    size=st.integers(1, 5),
    parts=st.lists(st.lists(st.integers(0, 30), max_size=5), max_size=4),
    data=st.data(),
)
def test_slots_and_runs_are_those_of_the_blocks(
    size: int, parts: list[list[int]], data: st.DataObject
) -> None:
    table = BlockTable(size)
    for part in parts:
        table.extend(part)
    blocks = [block for part in parts for block in part]
    assert table.blocks == blocks
    assert table.capacity == size * len(blocks)
    slots = [block * size + offset for block in blocks for offset in range(size)]
    start = data.draw(st.integers(0, len(slots)))
    end = data.draw(st.integers(start, len(slots)))
    assert table.slots(start, end).tolist() == slots[start:end]
    runs = table.runs(start, end)
    assert [slot for low, high in runs for slot in range(low, high)] == slots[start:end]
    assert all(a[1] != b[0] for a, b in itertools.pairwise(runs)), "not maximal"


def test_slots_handed_out_stay_valid_when_the_table_grows() -> None:
    table = BlockTable(2)
    table.extend([3])
    before = table.slots(0, 2)
    table.extend([9])
    assert torch.equal(before, torch.tensor([6, 7]))
