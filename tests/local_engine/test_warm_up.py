"""The warm-up measures what there is room and time for, and gives everything back."""

from __future__ import annotations

import pytest

import local_engine.warm_up as warm_up_module
from local_engine.kv.blocks import BlockManager
from local_engine.kv.events import CacheEventLog
from local_engine.kv.pool import KvPool
from local_engine.profile import MovingMean, PrefillFit
from local_engine.testing import CHAIN_LAYOUT, ChainRunner
from local_engine.warm_up import BUDGET_S, MEASURE_S, warm_up
from prfaas.testing.clock import ManualClock


def measure(
    blocks: int, token_s: float, chunk_tokens: int = 8
) -> tuple[PrefillFit, MovingMean, ChainRunner]:
    clock = ManualClock()
    pool = KvPool(CHAIN_LAYOUT, blocks, 4)
    manager = BlockManager(blocks, 4, CacheEventLog("e"))
    runner = ChainRunner(pool, clock)
    runner.strict = False
    runner.token_s, runner.step_s = token_s, 0.5
    fit, step = PrefillFit(chunk_tokens), MovingMean()
    warm_up(runner, pool, manager, fit, step, chunk_tokens, clock)
    manager.check({})
    assert manager.available == blocks
    assert manager.names() == []
    return fit, step, runner


def test_sizes_and_contexts_vary_so_that_the_curve_has_a_shape() -> None:
    fit, step, runner = measure(64, 0.001)
    assert runner.chunks == [(32, 33), (0, 1), (0, 8), (32, 33), (32, 40)]
    assert fit.curve.seconds(8) == pytest.approx(0.008, rel=0.01)
    assert step.mean_s == 0.5
    fit.observe(8, 0, 100.0)
    assert fit.curve.seconds(8) < 0.016, "what comes later only corrects it"


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_a_tiny_pool_is_no_obstacle(blocks: int) -> None:
    fit, _, runner = measure(blocks, 0.001)
    assert max(end for _, end in runner.chunks) < 4 * blocks
    assert fit.curve.known


@pytest.mark.parametrize(("token_s", "chunk"), [(0.001, 64), (0.02, 8), (1.0, 1)])
def test_an_idle_engine_is_busy_with_itself_for_a_moment_at_most(
    token_s: float, chunk: int
) -> None:
    clock = ManualClock()
    pool = KvPool(CHAIN_LAYOUT, 64, 4)
    manager = BlockManager(64, 4, CacheEventLog("e"))
    runner = ChainRunner(pool, clock)
    runner.strict = False
    runner.token_s, runner.step_s = token_s, 0.05
    fit, step = PrefillFit(64), MovingMean()
    for tokens in (8, 64):
        fit.observe(tokens, 0, tokens * token_s)
    fit.finish_warm_up()
    warm_up_module.measure(runner, pool, manager, fit, step, 64, clock)
    assert runner.chunks == [(0, chunk)]
    assert chunk * token_s <= MEASURE_S or chunk == 1
    assert fit.curve.seconds(64) == pytest.approx(64 * token_s, rel=0.1)
    assert manager.available == 64


def test_a_slow_machine_stops_early_with_what_it_has() -> None:
    fit, _, runner = measure(64, BUDGET_S)
    assert len(runner.chunks) < 4
    assert fit.curve.seconds(1) == pytest.approx(BUDGET_S, rel=0.01)
