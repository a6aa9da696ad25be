"""A tape gives every prompt its own KV, survives the disk, and compresses as KV does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from prfaas.codecs import PlanesZstdCodec
from prfaas.errors import ConfigError
from prfaas.layout import GroupKind, KvLayout, LayerGroup
from prfaas.testing.kv_tape import SMOLLM2_LAYOUT, KvTape, seeded_tape

LAYOUT = KvLayout(
    (
        LayerGroup(GroupKind.FULL, (0, 2), 2, 4, "bfloat16"),
        LayerGroup(GroupKind.FULL, (1,), 1, 8, "float32"),
    )
)
PROMPT = np.arange(100, dtype=np.int32)


@pytest.fixture
def tape() -> KvTape:
    return seeded_tape(10, LAYOUT, seed=3)


def read(tape: KvTape, start: int, group: int, layer: int, begin: int, end: int) -> bytes:
    out = np.empty(tape.layout.groups[group].token_bytes * (end - begin), dtype=np.uint8)
    tape.copy(out, start, group, layer, begin, end)
    return out.tobytes()


def test_a_long_read_goes_round_the_tape_in_canonical_layout(tape: KvTape) -> None:
    row = LAYOUT.groups[0].token_bytes // 2
    once = np.frombuffer(read(tape, 0, 0, 2, 0, 10), dtype=np.uint8).reshape(2, 10, row)
    long = np.frombuffer(read(tape, 7, 0, 2, 1, 26), dtype=np.uint8).reshape(2, 25, row)
    for token in range(25):
        assert np.array_equal(long[:, token], once[:, (7 + 1 + token) % 10])


def test_layers_and_groups_have_their_own_values(tape: KvTape) -> None:
    assert read(tape, 0, 0, 0, 0, 10) != read(tape, 0, 0, 2, 0, 10)
    assert len(read(tape, 0, 1, 1, 0, 10)) == LAYOUT.groups[1].token_bytes * 10


def test_equals_sees_one_changed_bit_on_both_sides_of_the_seam(tape: KvTape) -> None:
    for at in (0, 20, -1):
        raw = np.frombuffer(read(tape, 8, 0, 0, 0, 6), dtype=np.uint8).copy()
        assert tape.equals(raw, 8, 0, 0, 0, 6)
        raw[at] ^= 1
        assert not tape.equals(raw, 8, 0, 0, 0, 6)
    assert not tape.equals(raw[:-4], 8, 0, 0, 0, 6)


def test_prompts_start_at_places_of_their_own_that_a_longer_prompt_keeps() -> None:
    tape = seeded_tape(1000, LAYOUT)
    starts = {tape.start_of(PROMPT + shift) for shift in range(20)}
    assert len(starts) > 10
    assert tape.start_of(PROMPT) == tape.start_of(np.append(PROMPT, np.int32(5)))


def test_a_saved_tape_is_the_same_tape(tape: KvTape, tmp_path: Path) -> None:
    path = tmp_path / "tape.npz"
    tape.save(path)
    found = KvTape.load(path)
    assert (found.layout, found.source, found.digest) == (LAYOUT, tape.source, tape.digest)
    assert list(tmp_path.iterdir()) == [path]
    assert seeded_tape(10, LAYOUT, seed=4).digest != tape.digest


@pytest.mark.parametrize("content", [b"", b"rubbish", b"PK\x03\x04 cut short"])
def test_what_is_no_tape_is_a_config_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tape.npz"
    with pytest.raises(ConfigError, match=r"tape\.npz"):
        KvTape.load(path)
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"tape\.npz"):
        KvTape.load(path)


def test_an_array_of_another_shape_is_refused(tape: KvTape) -> None:
    group = SMOLLM2_LAYOUT.groups[0]
    with pytest.raises(ValueError, match="shape"):
        KvTape(SMOLLM2_LAYOUT, [np.zeros((30, 2, 5, group.token_bytes), np.uint8)], "x")
    with pytest.raises(ValueError, match="at least one"):
        KvTape(SMOLLM2_LAYOUT, [np.zeros((30, 2, 0, group.token_bytes // 2), np.uint8)], "x")


def test_seeded_kv_compresses_about_as_real_kv() -> None:
    tape = seeded_tape(256)
    raw = np.frombuffer(read(tape, 0, 0, 0, 0, 256), dtype=np.uint8)
    packed = PlanesZstdCodec().encode(raw, 2)
    assert packed is not None
    assert 1.2 < raw.nbytes / len(packed) < 1.6
