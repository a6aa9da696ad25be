"""vLLM's KV events become our hashes by their tokens; what cannot be named is left out."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from prfaas.errors import ProtocolError
from prfaas.hashing import BlockHash, block_chain
from remote_prefill.vllm_events import VllmIndex, decode_batch

BLOCK = 32
TOKENS = [index * 7 % 500 for index in range(400)]


def stored(
    hashes: list[Any], tokens: list[int], parent: Any = None, size: int = BLOCK, **fields: Any
) -> dict[str, Any]:
    """As vLLM 0.32 writes it."""
    keys = fields.pop("extra_keys", [None] * len(hashes))
    return {
        "type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent,
        "token_ids": tokens, "block_size": size, "lora_id": None, "medium": "GPU",
        "lora_name": None, "extra_keys": keys, "group_idx": 0, **fields,
    }  # fmt: skip


def removed(*hashes: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU", **fields}


def apply(index: VllmIndex, *events: Any) -> Any:
    return index.apply(decode_batch(msgspec.msgpack.encode([0.5, list(events), 0])))


def names(index: VllmIndex) -> set[BlockHash]:
    return set(index.names())


def test_blocks_get_the_names_that_the_gateway_computes() -> None:
    index = VllmIndex(BLOCK)
    change = apply(index, stored([1, 2], TOKENS[:64]))
    assert list(change.stored) == block_chain(TOKENS[:64], BLOCK)
    change = apply(index, stored([3], TOKENS[64:96], parent=2))
    assert list(change.stored) == block_chain(TOKENS[:96], BLOCK)[2:]
    assert names(index) == set(block_chain(TOKENS[:96], BLOCK))


def test_hashes_may_be_numbers_or_bytes() -> None:
    for first, second in ((b"\x01" * 32, b"\x02" * 32), (2**63 + 5, -7), ("a", "b")):
        index = VllmIndex(BLOCK)
        apply(index, stored([first], TOKENS[:32]), stored([second], TOKENS[32:64], parent=first))
        assert names(index) == set(block_chain(TOKENS[:64], BLOCK))


def test_events_of_earlier_versions_are_arrays() -> None:
    event = ["BlockStored", [1, 2], None, TOKENS[:64], BLOCK, None, "GPU", None, [None, None]]
    index = VllmIndex(BLOCK)
    assert len(apply(index, event).stored) == 2
    assert len(apply(index, ["BlockRemoved", [2], "GPU"]).removed) == 1
    assert apply(index, ["AllBlocksCleared"]).cleared
    assert names(index) == set()
    batch = msgspec.msgpack.encode({"ts": 1.0, "events": [stored([1], TOKENS[:32])]})
    assert len(index.apply(decode_batch(batch)).stored) == 1


def test_a_salt_is_part_of_the_name_and_an_untold_one_has_none() -> None:
    index = VllmIndex(BLOCK)
    apply(index, stored([1, 2], TOKENS[:64], extra_keys=[["tenant-a"], None]))
    assert names(index) == set(block_chain(TOKENS[:64], BLOCK, "tenant-a"))
    # A version that does not tell: it might be anybody's.
    index = VllmIndex(BLOCK)
    assert not apply(index, stored([1], TOKENS[:32], extra_keys=None))
    assert index.unnamed_blocks == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"lora_name": "adapter", "extra_keys": [["adapter"]]},
        {"lora_id": 4},
        {"extra_keys": [[["image", 3]]]},
        {"extra_keys": [["salt", "digest of embeddings"]]},
        {"parent": 99},
    ],
)
def test_adapters_images_and_unknown_parents_are_left_out_with_their_children(
    fields: dict[str, Any],
) -> None:
    index = VllmIndex(BLOCK)
    assert not apply(index, stored([1], TOKENS[:32], **fields))
    assert not apply(index, stored([2], TOKENS[32:64], parent=1))
    assert (names(index), index.unnamed_blocks) == (set(), 2)


@pytest.mark.parametrize("fields", [{"medium": "CPU"}, {"medium": "STORAGE"}, {"group_idx": 1}])
def test_offloaded_tiers_and_other_groups_do_not_count(fields: dict[str, Any]) -> None:
    index = VllmIndex(BLOCK)
    assert not apply(index, stored([1], TOKENS[:32], **fields))
    apply(index, stored([1], TOKENS[:32]))
    assert not apply(index, removed(1, **fields))
    assert len(names(index)) == 1


def test_within_a_batch_the_last_change_counts() -> None:
    index = VllmIndex(BLOCK)
    change = apply(index, stored([1, 2], TOKENS[:64]), removed(2))
    chain = block_chain(TOKENS[:64], BLOCK)
    assert (list(change.stored), list(change.removed)) == ([chain[0]], [chain[1]])
    change = apply(index, {"type": "AllBlocksCleared"}, stored([5], TOKENS[:32]))
    assert (change.cleared, list(change.stored)) == (True, [chain[0]])


def test_stored_again_is_no_news_and_removed_once_is_gone() -> None:
    index = VllmIndex(BLOCK)
    apply(index, stored([1], TOKENS[:32]))
    assert not apply(index, stored([1], TOKENS[:32]))
    assert len(apply(index, removed(1, 77)).removed) == 1
    assert not apply(index, removed(1))


@pytest.mark.parametrize("engine_block", [8, 16, 24, 32, 64, 96])
def test_other_block_sizes_are_translated_by_tokens(engine_block: int) -> None:
    index = VllmIndex(BLOCK)
    count = 384 // engine_block
    for at in range(count):
        piece = TOKENS[at * engine_block : (at + 1) * engine_block]
        apply(index, stored([at], piece, parent=at - 1 if at else None, size=engine_block))
    chain = block_chain(TOKENS[:384], BLOCK)
    assert names(index) == set(chain)
    apply(index, removed(count - 1))
    whole = (384 - engine_block) // BLOCK
    assert names(index) == set(chain[:whole])


def test_random_histories_agree_with_a_model() -> None:
    """Whatever is stored and removed, the index has exactly the blocks that are there."""
    rng = random.Random(5)
    prompts = [TOKENS[: 32 * rng.randint(1, 8)] for _ in range(4)]
    prompts += [[rng.randrange(500) for _ in range(32 * 4)] for _ in range(3)]
    index = VllmIndex(BLOCK)
    cached: dict[str, BlockHash] = {}
    for _ in range(300):
        prompt = rng.choice(prompts)
        chain = block_chain(prompt, BLOCK)
        at = rng.randrange(len(chain))
        name = chain[at].hex()
        if rng.random() < 0.5:
            parent = chain[at - 1].hex() if at else None
            if parent is None or parent in cached:
                tokens = prompt[at * 32 : at * 32 + 32]
                apply(index, stored([name], tokens, parent=parent))
                cached[name] = chain[at]
        else:
            apply(index, removed(name))
            cached.pop(name, None)
        assert names(index) == set(cached.values())


@pytest.mark.parametrize(
    "payload",
    [
        b"\xc1",
        msgspec.msgpack.encode(5),
        msgspec.msgpack.encode([1.0]),
        msgspec.msgpack.encode([1.0, [7]]),
        msgspec.msgpack.encode([1.0, [{"no": "type"}]]),
        msgspec.msgpack.encode([1.0, [stored([1], TOKENS[:31])]]),
        msgspec.msgpack.encode([1.0, [stored([1], ["x"] * 32)]]),
        msgspec.msgpack.encode([1.0, [stored([[1]], TOKENS[:32])]]),
        msgspec.msgpack.encode([1.0, [stored([1], TOKENS[:32], parent=[2])]]),
        msgspec.msgpack.encode([1.0, [stored([1], TOKENS[:32], size=0)]]),
        msgspec.msgpack.encode([1.0, [removed([1])]]),
        msgspec.msgpack.encode([1.0, [{"type": "BlockRemoved"}]]),
    ],
)
def test_rubbish_is_refused(payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        VllmIndex(BLOCK).apply(decode_batch(payload))


def test_unknown_events_are_skipped() -> None:
    assert not apply(VllmIndex(BLOCK), {"type": "SomethingNew", "x": 1}, ["Other", 2])
