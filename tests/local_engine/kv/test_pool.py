"""Bytes that go into the pool come out of it, in canonical layout, whatever the blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from local_engine.kv.pool import KvPool, pool_blocks, torch_dtype
from prfaas.errors import ConfigError
from prfaas.layout import ITEM_BYTES, GroupKind, KvLayout, LayerGroup

HEADS, DIM = 3, 4


def layout(dtype: str = "bfloat16", layers: tuple[int, ...] = (0, 1)) -> KvLayout:
    return KvLayout((LayerGroup(GroupKind.FULL, layers, HEADS, DIM, dtype),))


def random_bytes(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


@pytest.mark.parametrize("dtype", sorted(ITEM_BYTES))
@pytest.mark.parametrize(("start", "end"), [(0, 12), (0, 1), (3, 4), (2, 11), (4, 8)])
def test_export_returns_the_very_bytes_that_were_loaded(dtype: str, start: int, end: int) -> None:
    pool = KvPool(layout(dtype), blocks=8, block_tokens=4)
    table = pool.new_table()
    table.extend([5, 2, 3])
    nbytes = 2 * (end - start) * HEADS * DIM * ITEM_BYTES[dtype]
    data = random_bytes(nbytes)
    pool.load(1, table, start, end, data)
    out = np.zeros(nbytes, dtype=np.uint8)
    pool.export(1, table, start, end, out)
    assert out.tobytes() == data.tobytes()
    assert not pool.layers[0].any()


def test_the_same_tokens_export_alike_from_pools_with_other_blocks() -> None:
    data = random_bytes(2 * 12 * HEADS * DIM * 2)
    exports = []
    for size, blocks in ((4, [5, 0, 3]), (1, list(range(20, 8, -1))), (12, [1])):
        pool = KvPool(layout(), blocks=24 // min(size, 2), block_tokens=size)
        table = pool.new_table()
        table.extend(blocks)
        pool.load(0, table, 0, 12, data)
        out = np.zeros(2 * 5 * HEADS * DIM * 2, dtype=np.uint8)
        pool.export(0, table, 4, 9, out)
        exports.append(out.tobytes())
    assert exports[0] == exports[1] == exports[2]


def test_canonical_layout_is_keys_then_values_token_by_token_head_by_head() -> None:
    pool = KvPool(layout("float32"), blocks=2, block_tokens=2)
    table = pool.new_table()
    table.extend([1, 0])
    kv = torch.arange(2 * 3 * HEADS * DIM, dtype=torch.float32).view(2, 3, HEADS, DIM)
    pool.write(0, table, 0, 3, kv)
    out = np.zeros(kv.numel() * 4, dtype=np.uint8)
    pool.export(0, table, 0, 3, out)
    assert np.array_equal(out.view("<f4"), np.arange(kv.numel(), dtype="<f4"))


def test_values_are_rounded_to_kv_dtype_once() -> None:
    pool = KvPool(layout("bfloat16"), blocks=1, block_tokens=4)
    table = pool.new_table()
    table.extend([0])
    kv = torch.randn(2, 4, HEADS, DIM)
    pool.write(0, table, 0, 4, kv)
    back = torch.empty_like(kv)
    pool.read(0, table, 0, 4, back)
    assert torch.equal(back, kv.bfloat16().float())


def test_read_only_memory_can_be_loaded() -> None:
    pool = KvPool(layout("float32"), blocks=1, block_tokens=1)
    table = pool.new_table()
    table.extend([0])
    data = random_bytes(2 * HEADS * DIM * 4)
    data.flags.writeable = False
    pool.load(0, table, 0, 1, data)
    out = np.zeros_like(data)
    pool.export(0, table, 0, 1, out)
    assert out.tobytes() == data.tobytes()


def test_layouts_the_pool_cannot_hold_are_refused() -> None:
    group = layout().groups[0]
    with pytest.raises(ConfigError, match="one layer group"):
        KvPool(KvLayout((group, group)), 1, 1)
    with pytest.raises(ConfigError, match="0, 1, 2"):
        KvPool(layout(layers=(0, 2)), 1, 1)
    with pytest.raises(ConfigError, match="no room"):
        KvPool(layout(), 0, 16)


def test_the_number_of_blocks_follows_from_memory() -> None:
    token = 2 * 2 * HEADS * DIM * 2
    assert layout().token_bytes == token
    assert pool_blocks(layout(), 16, 10 * 16 * token) == 10
    assert pool_blocks(layout(), 16, 10 * 16 * token - 1) == 9


def test_every_kv_dtype_of_the_layout_has_a_torch_dtype() -> None:
    for name, nbytes in ITEM_BYTES.items():
        assert torch_dtype(name).itemsize == nbytes
