"""Measured chunks and decode steps that serve nobody: before the first request, and when idle."""

from __future__ import annotations

from local_engine.kv.blocks import BlockManager
from local_engine.kv.pool import KvPool
from local_engine.profile import MovingMean, PrefillFit
from local_engine.requests import SamplingParams
from local_engine.runner import DecodeRow, ModelRunner, PrefillChunk
from local_engine.sampler import TokenDraw
from prfaas.clock import Clock

# Stop measuring after so long: a slow machine has shown enough by then.
BUDGET_S = 4.0
_DECODE_STEPS = 3
# A request that comes to an idle engine may have to wait for its measurement: for so long at most.
MEASURE_S = 0.25


def warm_up(
    runner: ModelRunner,
    pool: KvPool,
    blocks: BlockManager,
    fit: PrefillFit,
    decode_step: MovingMean,
    chunk_tokens: int,
    clock: Clock,
) -> None:
    """Run chunks of several sizes and contexts into blocks that are free again afterwards.

    The KV is that of token 0 and whatever the pool holds; only the time matters. The first chunk
    of each kind pays for page faults and lazy initialisation and is not counted.
    """
    room = blocks.available * pool.block_tokens
    chunk = min(chunk_tokens, room - 1)
    if chunk < 1:
        return
    context = max(0, min(4 * chunk_tokens, room - chunk - 1))
    small = max(1, chunk // 8)
    taken = blocks.allocate(blocks.available)
    assert taken is not None
    try:
        table = pool.new_table()
        table.extend(taken)
        end = clock.now() + BUDGET_S
        runner.prefill_chunk(PrefillChunk([0] * small, context, table))
        for tokens, start in ((small, 0), (chunk, 0), (small, context), (chunk, context)):
            if clock.now() > end:
                break
            began = clock.now()
            runner.prefill_chunk(PrefillChunk([0] * tokens, start, table))
            fit.observe(tokens, start, clock.now() - began)
        draw = TokenDraw(SamplingParams(max_tokens=1, temperature=0.0), seed=0, index=0)
        row = DecodeRow(0, chunk, table, draw)
        runner.decode([row])
        for _ in range(_DECODE_STEPS):
            began = clock.now()
            runner.decode([row])
            decode_step.observe(clock.now() - began)
    finally:
        blocks.release(taken)
    fit.finish_warm_up()


def measure(
    runner: ModelRunner,
    pool: KvPool,
    blocks: BlockManager,
    fit: PrefillFit,
    decode_step: MovingMean,
    chunk_tokens: int,
    clock: Clock,
) -> None:
    """Time one chunk and one decode step of an idle engine; costs the oldest cached blocks at most.
    The chunk is a part of one where a whole one would take long.

    An engine that nobody chooses would otherwise keep the curve of a bad moment, and so never be
    chosen.
    """
    room = blocks.available * pool.block_tokens
    chunk = min(chunk_tokens, room - 1)
    if chunk < 1:
        return
    while chunk > 1 and fit.curve.seconds(chunk) > MEASURE_S:
        chunk //= 2
    taken = blocks.allocate(-(-(chunk + 1) // pool.block_tokens))
    if taken is None:
        return
    try:
        table = pool.new_table()
        table.extend(taken)
        began = clock.now()
        runner.prefill_chunk(PrefillChunk([0] * chunk, 0, table))
        fit.observe(chunk, 0, clock.now() - began)
        draw = TokenDraw(SamplingParams(max_tokens=1, temperature=0.0), seed=0, index=0)
        began = clock.now()
        runner.decode([DecodeRow(0, chunk, table, draw)])
        decode_step.observe(clock.now() - began)
    finally:
        blocks.release(taken)
