"""Block hashes: stable across processes, dependent on everything before, separated by salt."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from prfaas.hashing import block_chain, block_hash, cache_salt, ids_as_bytes, root_hash

TOKENS = list(range(40))


def test_hashes_do_not_depend_on_pythonhashseed() -> None:
    code = "from prfaas.hashing import block_chain; print(block_chain(range(40), 16, 's')[1].hex())"
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1")
    }
    assert seen == {block_chain(TOKENS, 16, "s")[1].hex() + "\n"}


def test_only_whole_blocks_are_named_and_each_covers_its_past() -> None:
    chain = block_chain(TOKENS, 16)
    assert len(chain) == 2
    assert chain[0] == block_hash(root_hash(""), TOKENS[:16])
    changed = [99, *TOKENS[1:]]
    assert not set(block_chain(changed, 16)) & set(chain)
    assert block_chain(TOKENS[:15], 16) == []


def test_salts_share_no_block() -> None:
    assert not set(block_chain(TOKENS, 16, "a")) & set(block_chain(TOKENS, 16, "b"))


def test_a_client_cannot_name_another_tenants_salt() -> None:
    assert cache_salt(b"k", "t1", "") != cache_salt(b"k", "t2", "")
    assert cache_salt(b"k", "t1", "x") != cache_salt(b"k", "t1", "")
    assert cache_salt(b"k", "", cache_salt(b"k", "t1", "")) != cache_salt(b"k", "t1", "")
    assert cache_salt(b"k", "", "") == ""


@pytest.mark.parametrize("kind", [list, tuple, np.array, lambda ids: np.array(ids, np.int64)])
def test_ids_are_hashed_alike_however_they_come(kind: Any) -> None:
    ids = [0, 1, 255, 256, 70_000, (1 << 32) - 1]
    assert ids_as_bytes(kind(ids)) == b"".join(each.to_bytes(4, "little") for each in ids)


@pytest.mark.parametrize("wrong", [-1, 1 << 32])
def test_what_is_no_id_has_no_hash(wrong: int) -> None:
    with pytest.raises(OverflowError):
        block_chain([wrong] * 16, 16)
