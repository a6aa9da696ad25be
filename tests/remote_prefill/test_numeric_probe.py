"""The probe finds other weights and names the worst layer; rounding of a dtype passes."""

from __future__ import annotations

import numpy as np
import pytest

from prfaas.errors import IncompatibleLayout
from prfaas.layout import GroupKind, KvLayout, LayerGroup
from prfaas.placement import StagingMap
from remote_prefill.numeric_probe import (
    compare,
    normalised_error,
    probe_map,
    probe_tokens,
    to_float32,
)

LAYOUT = KvLayout(
    (
        LayerGroup(GroupKind.FULL, (0, 2), 2, 4, "bfloat16"),
        LayerGroup(GroupKind.FULL, (1,), 3, 2, "float32"),
    )
)


def pack(values: np.ndarray, dtype: str) -> np.ndarray:
    single = np.ascontiguousarray(values, dtype=np.float32)
    if dtype == "float16":
        return single.astype("<f2").view(np.uint8)
    if dtype == "bfloat16":
        return (single.view("<u4") >> 16).astype("<u2").view(np.uint8)
    return single.view(np.uint8)


def filled(noise: dict[tuple[int, int], float] | None = None) -> StagingMap:
    """Random KV, with noise of a deviation for some (layer, 0: K or 1: V)."""
    made = probe_map(LAYOUT, 64)
    rng = np.random.default_rng(0)
    other = np.random.default_rng(1)
    for extent in LAYOUT.extents(0, 64, 64):
        tensor = made.tensor(extent)
        group = LAYOUT.groups[extent.group]
        values = rng.standard_normal((2, 64, group.kv_heads, group.head_dim))
        for kv in (0, 1):
            deviation = (noise or {}).get((extent.layer, kv), 0.0)
            values[kv] += deviation * other.standard_normal(values[kv].shape)
        tensor[:] = pack(values, group.dtype).reshape(tensor.shape)
    return made


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_items_come_out_as_they_went_in(dtype: str) -> None:
    values = np.array([0.0, -1.5, 3.25, 0.0078125], dtype=np.float32)
    assert (to_float32(pack(values, dtype), dtype) == values).all()


def test_tokens_are_fixed_spread_and_in_the_vocabulary() -> None:
    assert (probe_tokens(49152, 8192) == probe_tokens(49152, 8192)).all()
    tokens = probe_tokens(49152, 8192)
    assert len(tokens) == len(set(tokens.tolist())) == 64
    assert 0 <= tokens.min() < 5000
    assert 44000 < tokens.max() < 49152
    assert probe_tokens(3, 8192).max() < 3
    assert len(probe_tokens(100, 10)) == 10


def test_equal_kv_has_no_error() -> None:
    assert compare(filled(), filled(), 1e-12) == 0.0


def test_the_worst_tensor_is_named_and_the_rest_may_be_noisy() -> None:
    noise = {(0, 0): 1e-3, (1, 1): 0.1, (2, 0): 0.03}
    with pytest.raises(IncompatibleLayout, match=r"layers\[1\]\.v differs by 0\.0") as caught:
        compare(filled(), filled(noise), 1e-3)
    assert caught.value.field == "layers[1].v"
    assert 5e-3 < compare(filled(), filled(noise), 0.02) < 0.02


def test_one_lost_layer_is_found() -> None:
    theirs = filled()
    extent = next(e for e in LAYOUT.extents(0, 64, 64) if e.layer == 2)
    theirs.tensor(extent)[1] = 0
    with pytest.raises(IncompatibleLayout) as caught:
        compare(filled(), theirs, 0.5)
    assert caught.value.field == "layers[2].v"


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_kv_that_is_no_number_fails(wrong: float) -> None:
    theirs = filled()
    extent = next(e for e in LAYOUT.extents(0, 64, 64) if e.layer == 1)
    theirs.tensor(extent)[0, 5, 0, :4] = pack(np.array([wrong]), "float32")
    with pytest.raises(IncompatibleLayout) as caught:
        compare(filled(), theirs, 1e9)
    assert caught.value.field == "layers[1].k"


def test_zero_against_something_is_infinitely_wrong() -> None:
    zero, one = np.zeros(4, dtype=np.float32), np.ones(4, dtype=np.float32)
    assert normalised_error(zero, zero) == 0.0
    assert normalised_error(zero, one) == float("inf")
    assert normalised_error(one, zero) == 1.0
