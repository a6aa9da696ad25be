"""vLLM's KV cache events, translated to the hashes of our prefix index.

vLLM names blocks by hashes of its own, of any kind and of its own block size. The events carry the
tokens, so each block gets our name from its parent's and its tokens; whatever cannot be named (an
unknown parent, an adapter, an image, a salt that the event does not tell) is left out: the index
may miss a hit and never claims one that is not there.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from prfaas.errors import ProtocolError
from prfaas.hashing import BlockHash, block_hash, root_hash

log = logging.getLogger(__name__)

MAX_BLOCKS = 1 << 20
"""Blocks remembered; more are not indexed."""
_STORED = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
           "lora_name", "extra_keys", "group_idx")  # fmt: skip
_REMOVED = ("block_hashes", "medium", "group_idx")
EngineHash = int | bytes | str


@dataclass(frozen=True, slots=True)
class Batch:
    """Events of one message, as maps with `type`."""

    events: tuple[Mapping[str, Any], ...]


def decode_batch(payload: bytes) -> Batch:
    """From msgpack; versions write batches and events as maps or as arrays.

    Raises ProtocolError.
    """
    try:
        raw = msgspec.msgpack.decode(payload)
    except msgspec.DecodeError as exc:
        raise ProtocolError(f"KV events are not msgpack: {exc}") from exc
    if isinstance(raw, dict):
        events = raw.get("events")
    else:
        events = raw[1] if isinstance(raw, list) and len(raw) > 1 else None
    if not isinstance(events, list):
        raise ProtocolError("KV events are not a batch of vLLM's")
    return Batch(tuple(map(_event, events)))


def _event(raw: Any) -> Mapping[str, Any]:
    if isinstance(raw, dict) and isinstance(raw.get("type"), str):
        return raw
    if isinstance(raw, list) and raw and isinstance(raw[0], str):
        names = {"BlockStored": _STORED, "BlockRemoved": _REMOVED}.get(raw[0], ())
        return {"type": raw[0], **dict(zip(names, raw[1:], strict=False))}
    raise ProtocolError("a KV event of vLLM is neither a map nor an array with its type")


@dataclass(frozen=True, slots=True)
class Change:
    """What a batch changed in our index; `cleared` comes first."""

    stored: tuple[BlockHash, ...] = ()
    removed: tuple[BlockHash, ...] = ()
    cleared: bool = False

    def __bool__(self) -> bool:
        return bool(self.stored or self.removed or self.cleared)


@dataclass(frozen=True, slots=True)
class _Block:
    """One of the engine's blocks: our hash up to its end, as far as it is whole, and the rest."""

    parent: BlockHash
    rest: tuple[int, ...]
    names: tuple[BlockHash, ...]
    """Blocks of ours that it completes."""


class VllmIndex:
    """Our names for what one vLLM has cached, at `block_tokens` of ours; not thread-safe."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._blocks: dict[EngineHash, _Block] = {}
        self._held: dict[BlockHash, int] = {}
        """How many of the engine's blocks complete each of ours."""
        self.unnamed_blocks = 0
        """Stored blocks that could not be named."""

    def __len__(self) -> int:
        return len(self._held)

    def clear(self) -> None:
        """Nothing is known any more."""
        self._blocks.clear()
        self._held.clear()

    def names(self) -> Iterable[BlockHash]:
        """All of our blocks that are cached."""
        return self._held.keys()

    def apply(self, batch: Batch) -> Change:
        """The net change. Raises ProtocolError where an event is malformed."""
        changes: dict[BlockHash, bool] = {}
        cleared = False
        for event in batch.events:
            kind = event["type"]
            if kind == "BlockStored" and _on_device(event):
                self._store(event, changes)
            elif kind == "BlockRemoved" and _on_device(event):
                self._remove(event, changes)
            elif kind == "AllBlocksCleared":
                self.clear()
                changes.clear()
                cleared = True
        return Change(
            tuple(name for name, there in changes.items() if there),
            tuple(name for name, there in changes.items() if not there),
            cleared,
        )

    def _store(self, event: Mapping[str, Any], changes: dict[BlockHash, bool]) -> None:
        hashes, tokens = _hashes(event), _list(event, "token_ids")
        size, parent_hash = event.get("block_size"), event.get("parent_block_hash")
        if parent_hash is not None and not isinstance(parent_hash, EngineHash):
            raise ProtocolError("BlockStored: parent_block_hash is not a hash")
        if not isinstance(size, int) or size < 1 or len(tokens) != size * len(hashes):
            raise ProtocolError(
                f"BlockStored has {len(hashes)} blocks of {size} and {len(tokens)} tokens"
            )
        if parent_hash is None:
            salt = _salt(event)
            at = None if salt is None else _Block(root_hash(salt), (), ())
        else:
            at = self._blocks.get(parent_hash)
            if not _plain(event):
                at = None
        for index, name in enumerate(hashes):
            if at is None or len(self._blocks) >= MAX_BLOCKS:
                self.unnamed_blocks += len(hashes) - index
                return
            known = self._blocks.get(name)
            at = known or self._name(at, tokens[index * size : (index + 1) * size])
            if known is None:
                self._blocks[name] = at
                for ours in at.names:
                    self._held[ours] = self._held.get(ours, 0) + 1
                    changes[ours] = True

    def _name(self, at: _Block, tokens: Sequence[int]) -> _Block:
        pending = [*at.rest, *tokens]
        parent, names, size = at.parent, [], self._block_tokens
        whole = len(pending) // size * size
        try:
            for start in range(0, whole, size):
                parent = block_hash(parent, pending[start : start + size])
                names.append(parent)
        except (TypeError, ValueError, OverflowError) as exc:
            raise ProtocolError(f"BlockStored: token_ids are not token ids: {exc}") from exc
        return _Block(parent, tuple(pending[whole:]), tuple(names))

    def _remove(self, event: Mapping[str, Any], changes: dict[BlockHash, bool]) -> None:
        for name in _hashes(event):
            block = self._blocks.pop(name, None)
            for ours in block.names if block is not None else ():
                self._held[ours] -= 1
                if not self._held[ours]:
                    del self._held[ours]
                    changes[ours] = False


def _on_device(event: Mapping[str, Any]) -> bool:
    """Whether it is about the cache that prompts match; not an offloading tier or another group."""
    return event.get("medium") in (None, "GPU") and event.get("group_idx") in (None, 0)


def _plain(event: Mapping[str, Any]) -> bool:
    """Whether nothing but tokens and salt is in its blocks' hashes."""
    if event.get("lora_name") is not None or event.get("lora_id") is not None:
        return False
    keys = event.get("extra_keys") or ()
    return all(not entry or all(isinstance(key, str) for key in entry) for entry in keys)


def _salt(event: Mapping[str, Any]) -> str | None:
    """The salt of a first block; None where the event does not tell, or there is more than that."""
    keys = event.get("extra_keys")
    if not keys or not _plain(event):
        return None
    first = keys[0]
    if not first:
        return ""
    return first[0] if len(first) == 1 and isinstance(first[0], str) else None


def _list(event: Mapping[str, Any], name: str) -> list[Any]:
    value = event.get(name)
    if not isinstance(value, list):
        raise ProtocolError(f"{event['type']}: {name} is not a list")
    return value


def _hashes(event: Mapping[str, Any]) -> list[EngineHash]:
    hashes = _list(event, "block_hashes")
    if not all(isinstance(name, EngineHash) for name in hashes):
        raise ProtocolError(f"{event['type']}: block_hashes are not hashes")
    return hashes
