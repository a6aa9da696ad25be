"""The warm-up measures what there is room and time for, and gives everything back."""

from __future__ import annotations

import pytest

from local_engine.kv.blocks import BlockManager
from local_engine.kv.events import CacheEventLog
from local_engine.kv.pool import KvPool
from local_engine.profile import MovingMean, PrefillFit
from local_engine.testing import CHAIN_LAYOUT, ChainRunner
from local_engine.warm_up import BUDGET_S, warm_up
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


def test_a_slow_machine_stops_early_with_what_it_has() -> None:
    fit, _, runner = measure(64, BUDGET_S)
    assert len(runner.chunks) < 4
    assert fit.curve.seconds(1) == pytest.approx(BUDGET_S, rel=0.01)
