"""Paged attention equals attention over the same KV in one piece."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from local_engine.kv.attention import PagedKv, Part, Workspace
from local_engine.kv.pool import KvPool
from local_engine.kv.table import BlockTable
from prfaas.layout import GroupKind, KvLayout, LayerGroup

KV_HEADS, GROUP, DIM = 2, 3, 8


def make_pool(dtype: str, block_tokens: int = 4, blocks: int = 256) -> KvPool:
    group = LayerGroup(GroupKind.FULL, (0, 1), KV_HEADS, DIM, dtype)
    return KvPool(KvLayout((group,)), blocks, block_tokens)


def table_with(pool: KvPool, tokens: int, first: int, *, scattered: bool = False) -> BlockTable:
    table = pool.new_table()
    count = -(-tokens // pool.block_tokens)
    table.extend([first + (2 * i if scattered else i) for i in range(count)])
    return table


def reference(q: Tensor, k: Tensor, v: Tensor, context: int) -> Tensor:
    """Attention of q [n, heads, dim] over k, v [context + n, kv_heads, dim], by the book."""
    k, v = k.repeat_interleave(GROUP, 1), v.repeat_interleave(GROUP, 1)
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double()) * DIM**-0.5
    mask = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool).tril(context)
    scores = scores.masked_fill(~mask, -torch.inf)
    return torch.einsum("hqk,khd->qhd", F.softmax(scores, -1), v.double()).float()


class Step:
    """One step over random KV: stores the context by hand, the rest through `PagedKv`."""

    def __init__(self, pool: KvPool, parts: list[Part], *, padded: bool, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.pool, self.parts = pool, parts
        rows = sum(part.q_len for part in parts)
        self.q = torch.randn(rows, KV_HEADS * GROUP, DIM)
        self.full = [torch.randn(2, part.total, KV_HEADS, DIM) for part in parts]
        own = [kv[:, part.ctx_len :] for kv, part in zip(self.full, parts, strict=True)]
        for kv, part in zip(self.full, parts, strict=True):
            pool.write(1, part.table, 0, part.ctx_len, kv)
        self.kv = PagedKv(pool, parts, Workspace(pool, torch.float32), padded=padded)
        self.kv.write(1, torch.cat([x[0] for x in own]), torch.cat([x[1] for x in own]))

    def check(self, atol: float = 2e-6) -> None:
        got = self.kv.attend(1, self.q)
        for kv, part in zip(self.full, self.parts, strict=True):
            rows = slice(part.q_start, part.q_start + part.q_len)
            k, v = kv.to(self.pool.dtype).float()
            want = reference(self.q[rows], k, v, part.ctx_len)
            torch.testing.assert_close(got[rows], want, atol=atol, rtol=0)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("context", [0, 1, 7, 8, 300])
@pytest.mark.parametrize("scattered", [False, True])
def test_a_prefill_chunk(padded: bool, dtype: str, context: int, scattered: bool) -> None:
    pool = make_pool(dtype)
    table = table_with(pool, context + 9, first=3, scattered=scattered)
    Step(pool, [Part(table, 0, 9, context)], padded=padded).check()


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("contexts", [(0,), (5,), (0, 40, 3, 7), (160, 1)])
def test_a_decode_batch(
    padded: bool, dtype: str, scattered: bool, contexts: tuple[int, ...]
) -> None:
    pool = make_pool(dtype)
    parts, first = [], 1
    for index, context in enumerate(contexts):
        table = table_with(pool, context + 1, first, scattered=scattered)
        parts.append(Part(table, index, 1, context))
        first = max(table.blocks) + 1
    Step(pool, parts, padded=padded).check()


@pytest.mark.parametrize("padded", [False, True])
def test_chunks_and_single_tokens_in_one_step(padded: bool) -> None:
    pool = make_pool("float32")
    parts = [
        Part(table_with(pool, 12, 0), 0, 5, 7),
        Part(table_with(pool, 4, 10), 5, 1, 3),
        Part(table_with(pool, 6, 20), 6, 6, 0),
    ]
    Step(pool, parts, padded=padded).check()


def test_padding_reads_nothing_of_other_sequences_even_when_it_is_not_a_number() -> None:
    pool = make_pool("float32")
    parts = [Part(table_with(pool, 30, 1), 0, 1, 29), Part(table_with(pool, 2, 20), 1, 1, 1)]
    step = Step(pool, parts, padded=True)
    pool.layers[1][:, :4] = torch.nan
    step.check()


def test_layers_do_not_disturb_each_other() -> None:
    pool = make_pool("bfloat16")
    part = Part(table_with(pool, 20, 2), 0, 4, 16)
    step = Step(pool, [part], padded=False)
    step.kv.write(0, torch.randn(4, KV_HEADS, DIM), torch.randn(4, KV_HEADS, DIM))
    step.kv.attend(0, step.q)
    step.check()
