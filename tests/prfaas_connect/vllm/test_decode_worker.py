"""Decode side in a vLLM worker: which bytes reach which blocks, how many in a step, and when."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt
import pytest
import torch

from prfaas_connect.port.layout import GroupKind, KvLayout, LayerGroup
from prfaas_connect.port.messages import PortError
from prfaas_connect.vllm.decode_worker import JOIN_TIMEOUT_S, DecodeWorker
from prfaas_connect.vllm.layouts import LAYOUTS, HeadRange, PagedKv
from prfaas_connect.vllm.plan import DecodePlan, Load

BLOCK, HEADS, DIM, LAYERS, CHUNK = 4, 2, 8, 3, 8
LAYOUT = KvLayout((LayerGroup(GroupKind.FULL, tuple(range(LAYERS)), HEADS, DIM, "float32"),))
Bytes = npt.NDArray[np.uint8]


class Agent:
    """Staging memory of one connection, which may be out of reach."""

    def __init__(self, nbytes: int = 1 << 16) -> None:
        self.memory = np.zeros(nbytes, dtype=np.uint8)
        self.connection = "c"
        self.reachable = True

    def use(self, connection: str) -> None:
        pass

    def staging(self, connection: str, offset: int, nbytes: int) -> Bytes | None:
        if not self.reachable or connection != self.connection:
            return None
        if offset + nbytes > len(self.memory):
            raise PortError("outside")
        return self.memory[offset : offset + nbytes]

    def stage(self, kv: npt.NDArray[np.float32], have: int, end: int, offset: int) -> None:
        """Put tokens [have, end) of kv [layer, k|v, token, head, dim] where the agent would."""
        for extent in LAYOUT.extents(have, end, CHUNK):
            rows = kv[extent.layer, :, extent.span.start : extent.span.end]
            at = offset + extent.offset
            self.memory[at : at + extent.nbytes] = np.ascontiguousarray(rows).view(np.uint8).ravel()


class Bench:
    def __init__(self, bytes_per_step: int = 1 << 30, rank: int = 0, ranks: int = 1) -> None:
        self.agent = Agent()
        self.heads = HeadRange.of_rank(rank, ranks, HEADS)
        shape = (12, self.heads.count, BLOCK, 2 * DIM)
        self.caches = [torch.zeros(shape) for _ in range(LAYERS)]
        layout = LAYOUTS["cpu"]
        self.layers = {
            i: PagedKv(cache, layout, self.heads, DIM) for i, cache in enumerate(self.caches)
        }
        self.now = 0.0
        self.worker = DecodeWorker(
            LAYOUT,
            self.layers,
            self.agent,
            bytes_per_step=bytes_per_step,
            whole=ranks == 1,
            clock=lambda: self.now,
        )

    def read(self, table: list[int], start: int, end: int) -> npt.NDArray[np.float32]:
        """What lies in the blocks, [layer, k|v, token, head, dim]."""
        out = torch.empty((LAYERS, 2, end - start, self.heads.count, DIM))
        for index, layer in self.layers.items():
            layer.read(table, start, end, out[index])
        return out.numpy()


def numbers(tokens: int, seed: int = 0) -> npt.NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((LAYERS, 2, tokens, HEADS, DIM)).astype(np.float32)


def load_of(
    table: list[int],
    have: int,
    staged_end: int,
    start: int,
    end: int,
    *,
    name: str = "r",
    connection: str = "c",
) -> Load:
    first = start // BLOCK
    return Load(
        name, f"s-{name}", connection, table, first, have, staged_end, start, end, 64, CHUNK
    )


@pytest.mark.parametrize(
    ("have", "staged_end", "start", "end"),
    [(0, 21, 0, 21), (4, 21, 4, 21), (0, 21, 8, 21), (0, 15, 0, 12), (4, 19, 12, 16)],
)
def test_staged_tokens_land_in_their_blocks_and_nothing_else_changes(
    have: int, staged_end: int, start: int, end: int
) -> None:
    bench, kv, table = Bench(), numbers(24), [7, 2, 9, 4, 1, 11]
    bench.agent.stage(kv, have, staged_end, 64)
    bench.worker.follow(DecodePlan("c", loads=[load_of(table, have, staged_end, start, end)]))
    bench.worker.step()
    assert bench.worker.report().done == {"r"}
    found = bench.read(table, 0, 24)
    np.testing.assert_array_equal(found[:, :, start:end], kv[:, :, start:end])
    found[:, :, start:end] = 0
    assert not found.any()


def test_a_rank_takes_its_heads_only() -> None:
    bench, kv, table = Bench(rank=1, ranks=2), numbers(9), [3, 5, 6]
    bench.agent.stage(kv, 0, 9, 64)
    bench.worker.follow(DecodePlan("c", verify=True, loads=[load_of(table, 0, 9, 0, 9)]))
    bench.worker.step()
    np.testing.assert_array_equal(bench.read(table, 0, 9), kv[:, :, :, 1:])
    assert bench.worker.report().digests == {}


def test_the_digest_is_of_what_lies_in_the_blocks_in_the_order_of_staging() -> None:
    bench, kv, table = Bench(), numbers(21), [7, 2, 9, 4, 1, 11]
    bench.agent.stage(kv, 0, 21, 64)
    bench.worker.follow(DecodePlan("c", verify=True, loads=[load_of(table, 0, 21, 0, 21)]))
    bench.worker.step()
    staged = bench.agent.memory[64 : 64 + LAYOUT.session_bytes(0, 21)]
    expected = hashlib.blake2b(staged.data, digest_size=16).hexdigest()
    assert bench.worker.report().digests == {"s-r": expected}


def test_a_step_copies_a_bounded_part() -> None:
    tensor = LAYOUT.groups[0].token_bytes * CHUNK
    bench, kv, table = Bench(bytes_per_step=2 * tensor), numbers(16), [7, 2, 9, 4]
    bench.agent.stage(kv, 0, 16, 64)
    bench.worker.follow(DecodePlan("c", loads=[load_of(table, 0, 16, 0, 16)]))
    steps = 0
    while len(bench.worker):
        before = np.count_nonzero(bench.read(table, 0, 16))
        bench.worker.step()
        steps += 1
        written = 4 * (np.count_nonzero(bench.read(table, 0, 16)) - before)
        assert written <= 2 * tensor
        bench.worker.follow(DecodePlan("c"))
    assert steps == 4  # 6 tensors by two, and one to see the end
    np.testing.assert_array_equal(bench.read(table, 0, 16), kv)


def test_after_a_cancel_not_one_byte_more_is_written() -> None:
    bench, kv, table = Bench(bytes_per_step=1), numbers(16), [7, 2, 9, 4]
    bench.agent.stage(kv, 0, 16, 64)
    bench.worker.follow(DecodePlan("c", loads=[load_of(table, 0, 16, 0, 16)]))
    bench.worker.step()
    assert bench.worker.report().done == set()
    assert bench.read(table, 0, 16).any()
    bench.worker.follow(DecodePlan("c", cancels=["r"]))
    for cache in bench.caches:
        cache.zero_()  # the blocks are another request's now
    bench.worker.step()
    assert not bench.read(table, 0, 16).any()
    report = bench.worker.report()
    assert (report.done, report.bad_blocks) == ({"r"}, set())


def test_a_load_that_is_cancelled_in_the_plan_that_brings_it_is_reported() -> None:
    bench, table = Bench(), [1, 2]
    bench.worker.follow(DecodePlan("c", loads=[load_of(table, 0, 8, 0, 8)], cancels=["r"]))
    bench.worker.step()
    assert bench.worker.report().done == {"r"}
    assert not len(bench.worker)


def test_a_cancel_of_a_load_that_has_ended_is_nothing() -> None:
    bench = Bench()
    bench.worker.follow(DecodePlan("c", cancels=["gone"]))
    assert bench.worker.report().done == set()


def test_what_was_refused_fails_on_its_blocks() -> None:
    bench = Bench()
    bench.worker.follow(DecodePlan("c", failures={"r": [5]}))
    report = bench.worker.report()
    assert (report.done, report.bad_blocks) == ({"r"}, {5})
    assert bench.worker.report().done == set()


def test_memory_that_stays_out_of_reach_fails_the_load_without_writing() -> None:
    bench, table = Bench(), [3, 4, 5]
    bench.agent.reachable = False
    bench.worker.follow(DecodePlan("c", loads=[load_of(table, 0, 9, 4, 9)]))
    bench.worker.step()
    assert bench.worker.report().done == set()
    bench.now = JOIN_TIMEOUT_S + 1
    bench.worker.step()
    report = bench.worker.report()
    # Not the first: that one came from the prefix cache, others may use it.
    assert (report.done, report.bad_blocks) == ({"r"}, {4, 5})
    assert not len(bench.worker)


def test_memory_of_a_connection_that_is_over_fails_the_load_at_once() -> None:
    bench, table = Bench(), [3, 4, 5]
    bench.worker.follow(DecodePlan("c", loads=[load_of(table, 0, 9, 0, 9, connection="b")]))
    bench.worker.step()
    report = bench.worker.report()
    assert (report.done, report.bad_blocks) == ({"r"}, {3, 4, 5})


def test_memory_that_comes_into_reach_in_time_is_used() -> None:
    bench, kv, table = Bench(), numbers(9), [3, 4, 5]
    bench.agent.stage(kv, 0, 9, 64)
    bench.agent.reachable = False
    bench.worker.follow(DecodePlan("c", loads=[load_of(table, 0, 9, 0, 9)]))
    bench.worker.step()
    bench.agent.reachable = True
    bench.worker.step()
    assert bench.worker.report().done == {"r"}
    np.testing.assert_array_equal(bench.read(table, 0, 9), kv)


def test_a_load_that_has_begun_goes_on_when_the_agent_is_gone() -> None:
    bench, kv, table = Bench(bytes_per_step=1), numbers(9), [3, 4, 5]
    bench.agent.stage(kv, 0, 9, 64)
    bench.worker.follow(DecodePlan("c", loads=[load_of(table, 0, 9, 0, 9)]))
    bench.worker.step()
    bench.agent.reachable = False
    while len(bench.worker):
        bench.worker.step()
    report = bench.worker.report()
    assert (report.done, report.bad_blocks) == ({"r"}, set())
    np.testing.assert_array_equal(bench.read(table, 0, 9), kv)


def test_a_load_outside_staging_fails_and_the_next_is_done() -> None:
    bench, kv = Bench(), numbers(9)
    bench.agent.stage(kv, 0, 9, 64)
    bad = Load("bad", "s", "c", [1], 0, 0, 9, 0, 4, 1 << 16, CHUNK)
    bench.worker.follow(DecodePlan("c", loads=[bad, load_of([3, 4, 5], 0, 9, 0, 9)]))
    bench.worker.step()
    report = bench.worker.report()
    assert (report.done, report.bad_blocks) == ({"bad", "r"}, {1})
    np.testing.assert_array_equal(bench.read([3, 4, 5], 0, 9), kv)
