"""Canonical layout and fingerprint: both sides agree on places, and differences have names."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import IncompatibleLayout
from prfaas.layout import Fingerprint, GroupKind, KvLayout, LayerGroup, LayoutError, chunk_spans

GROUP = LayerGroup(GroupKind.FULL, (0, 1, 2), kv_heads=2, head_dim=4, dtype="bfloat16")
LAYOUT = KvLayout((GROUP,))
PRINT = Fingerprint(1, "model", "config", "tokenizer", (), LAYOUT)


@given(st.integers(0, 200), st.integers(0, 200), st.integers(1, 64))
def test_spans_tile_the_range_on_the_absolute_grid(start: int, length: int, chunk: int) -> None:
    spans = chunk_spans(start, start + length, chunk)
    assert sum(s.tokens for s in spans) == length
    at = start
    for span in spans:
        assert span.start == at
        assert span.start // chunk == span.index == (span.end - 1) // chunk
        assert span.end % chunk == 0 or span.end == start + length
        at = span.end


@given(st.integers(0, 50), st.integers(1, 100), st.integers(1, 32))
def test_extents_are_contiguous_and_fill_the_session(start: int, length: int, chunk: int) -> None:
    at = 0
    for extent in LAYOUT.extents(start, start + length, chunk):
        assert extent.offset == at
        at += extent.nbytes
    assert at == LAYOUT.session_bytes(start, start + length)


def test_token_bytes_count_k_and_v_of_all_layers() -> None:
    assert LAYOUT.token_bytes == 3 * 2 * 2 * 4 * 2


def test_layout_crosses_json() -> None:
    assert KvLayout.from_dict(LAYOUT.to_dict()) == LAYOUT


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"dtype": "int3"}, "int3"),
        ({"layers": []}, "layers"),
        ({"layers": [1, 1]}, "layers"),
        ({"kv_heads": 0}, "kv_heads"),
        ({"kind": "window"}, "window"),
        ({"kind": "mystery"}, "mystery"),
        ({"head_dim": None}, "malformed"),
    ],
)
def test_bad_layouts_say_what_is_wrong(change: dict[str, object], names: str) -> None:
    data = LAYOUT.to_dict()
    data["groups"][0] |= change
    with pytest.raises(LayoutError, match=names):
        KvLayout.from_dict(data)


@pytest.mark.parametrize(
    ("other", "field"),
    [
        (replace(PRINT, wire_major=2), "wire_major"),
        (replace(PRINT, config_digest="rope"), "config_digest"),
        (replace(PRINT, tokenizer_digest="x"), "tokenizer_digest"),
        (replace(PRINT, adapters=("lora",)), "adapters"),
        (replace(PRINT, model_identity="other"), "model_identity"),
        (replace(PRINT, layout=KvLayout((GROUP, GROUP))), "groups"),
        (replace(PRINT, layout=KvLayout((replace(GROUP, kv_heads=3),))), "groups[0].kv_heads"),
        (replace(PRINT, layout=KvLayout((replace(GROUP, layers=(0, 1)),))), "groups[0].layers"),
        (replace(PRINT, layout=KvLayout((replace(GROUP, dtype="float32"),))), "groups[0].dtype"),
    ],
)
def test_a_difference_is_refused_by_name(other: Fingerprint, field: str) -> None:
    with pytest.raises(IncompatibleLayout) as caught:
        PRINT.require_compatible(other)
    assert caught.value.field == field
    assert field in caught.value.message


def test_equal_fingerprints_are_compatible() -> None:
    PRINT.require_compatible(replace(PRINT))
