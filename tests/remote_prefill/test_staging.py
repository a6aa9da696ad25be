"""Staging extents never overlap, are served in order, and stay taken while somebody writes."""

from __future__ import annotations

import asyncio
import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.errors import InvalidRequest, Overloaded
from remote_prefill.staging import StagingExtent, StagingPool


def pool(capacity: int = 1024, max_waiting: int = 8) -> StagingPool:
    return StagingPool(memoryview(bytearray(capacity)), max_waiting)


async def take(where: StagingPool, nbytes: int) -> StagingExtent:
    return await where.reserve(nbytes, 1.0)


@settings(max_examples=50)
@given(st.integers(0, 10_000))
def test_extents_never_overlap_and_everything_comes_back(seed: int) -> None:
    rng = random.Random(seed)
    where = pool(4096)
    held: list[StagingExtent] = []
    for _ in range(60):
        if held and rng.random() < 0.45:
            held.pop(rng.randrange(len(held))).release()
        else:
            extent = where._take(rng.randint(1, 900))
            if extent is not None:
                held.append(extent)
        spans = sorted((e.offset, e.offset + e.nbytes) for e in held)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
        assert all(offset % 64 == 0 and end <= 4096 for offset, end in spans)
        assert where.extents == len(held)
        assert where.used_bytes == sum(-(-e.nbytes // 64) * 64 for e in held)
    for extent in held:
        extent.release()
    assert (where.free_bytes, where.used_bytes) == (4096, 0)


async def test_an_extent_is_its_part_of_the_memory() -> None:
    memory = bytearray(256)
    where = StagingPool(memoryview(memory), 1)
    await take(where, 64)
    second = await take(where, 10)
    second.buffer[:] = 7
    assert memory[64:74] == b"\7" * 10
    assert sum(memory) == 70


async def test_a_pinned_extent_is_not_given_to_the_next_owner() -> None:
    where = pool(128)
    extent = await take(where, 128)
    assert extent.pin()
    assert extent.pin()
    extent.release()
    extent.release()
    assert not extent.pin()
    waiting = asyncio.ensure_future(take(where, 128))
    await asyncio.sleep(0)
    extent.unpin()
    assert where.free_bytes == 0
    extent.unpin()
    assert (await waiting).offset == 0


async def test_who_waits_is_served_in_order_even_where_a_later_one_would_fit() -> None:
    where = pool(256)
    first = await take(where, 192)
    large = asyncio.ensure_future(take(where, 192))
    await asyncio.sleep(0)
    small = asyncio.ensure_future(take(where, 64))
    await asyncio.sleep(0)
    assert (where.waiting, small.done()) == (2, False)
    assert where.free_bytes == 0
    first.release()
    assert (await large).nbytes == 192
    assert (await small).nbytes == 64


async def test_a_wait_that_ends_lets_the_next_one_in() -> None:
    where = pool(256)
    held = await take(where, 192)
    with pytest.raises(Overloaded, match=r"no staging of 192 bytes in 0\.0 s"):
        await where.reserve(192, 0.01)
    large = asyncio.ensure_future(take(where, 192))
    await asyncio.sleep(0)
    small = asyncio.ensure_future(take(where, 64))
    await asyncio.sleep(0)
    large.cancel()
    assert (await small).nbytes == 64
    held.release()
    assert where.waiting == 0


async def test_what_is_granted_in_the_moment_of_a_cancel_comes_back() -> None:
    where = pool(128)
    held = await take(where, 128)
    waiting = asyncio.ensure_future(take(where, 128))
    await asyncio.sleep(0)
    held.release()  # grants, and the waiter has not run yet
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert where.free_bytes == 128


async def test_what_never_fits_and_a_full_queue_are_refused_at_once() -> None:
    where = pool(130, max_waiting=1)
    assert where.capacity == 128
    with pytest.raises(InvalidRequest, match="can never fit"):
        await take(where, 129)
    held = await take(where, 128)
    waiting = asyncio.ensure_future(take(where, 1))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="1 sessions wait"):
        await take(where, 1)
    held.release()
    assert (await waiting).nbytes == 1
