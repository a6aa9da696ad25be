"""Which KV blocks are free, owned or cached: reference counts, prefix cache, LRU eviction.

Every block is in exactly one of three states:

| state  | references | named by a hash | may be evicted |
|--------|------------|-----------------|----------------|
| free   | 0          | no              | -              |
| owned  | 1 or more  | once it is full | no             |
| cached | 0          | yes             | yes, oldest first |

Only named blocks are ever shared; a sequence writes only to blocks that it alone owns and that
have no name yet.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from prfaas.hashing import BlockHash

_FREE, _TAKEN = 1, 0


class CacheListener(Protocol):
    """Told of every change of the prefix cache, in order."""

    def stored(self, name: BlockHash) -> None: ...

    def removed(self, name: BlockHash) -> None: ...

    def cleared(self) -> None: ...


class BlockManager:
    """Owns the bookkeeping of `total` blocks, not their tensors; used by the engine thread only."""

    def __init__(self, total: int, block_tokens: int, listener: CacheListener) -> None:
        self.total = total
        self.block_tokens = block_tokens
        self._listener = listener
        # A byte per block, so that `find` looks for contiguous room at memory speed.
        self._free_map = bytearray([_FREE]) * total
        self._free = total
        self._references = [0] * total
        self._name_of: list[BlockHash | None] = [None] * total
        self._block_of: dict[BlockHash, int] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Blocks that `allocate` can give: free ones and cached ones nobody uses."""
        return self._free + len(self._unused)

    @property
    def cached(self) -> int:
        """Cached blocks that nobody uses."""
        return len(self._unused)

    def names(self) -> list[BlockHash]:
        """Names of all blocks that can be matched."""
        return list(self._block_of)

    def match(self, chain: Sequence[BlockHash]) -> list[int]:
        """Blocks of the longest stored prefix of `chain`. Takes no reference."""
        found: list[int] = []
        for name in chain:
            block = self._block_of.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def acquire(self, blocks: Iterable[int]) -> None:
        """Add a reference to blocks that `match` found."""
        for block in blocks:
            if self._references[block] == 0:
                del self._unused[block]
            self._references[block] += 1

    def allocate(self, count: int, after: int | None = None) -> list[int] | None:
        """Take `count` blocks with one reference each, evicting as needed; None if there are
        too few. Contiguous where possible; a single block preferably next to `after`.
        """
        if count > self.available:
            return None
        while self._free < count:
            self._evict_oldest()
        taken: list[int] = []
        if after is not None and after + 1 < self.total and self._free_map[after + 1] == _FREE:
            run = 1
            while run < count and self._free_map[after + 1 + run : after + 2 + run] == b"\x01":
                run += 1
            taken.extend(self._take(after + 1, run))
        size = count - len(taken)
        while len(taken) < count:
            size = min(size, count - len(taken))
            start = self._free_map.find(bytes([_FREE]) * size)
            if start < 0:
                size //= 2
                continue
            taken.extend(self._take(start, size))
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference of each. The last are evicted first: a prefix outlives its tails."""
        for block in reversed(blocks):
            references = self._references[block]
            if references < 1:
                raise AssertionError(f"block {block} released more often than taken")
            self._references[block] = references - 1
            if references == 1:
                if self._name_of[block] is None:
                    self._give_back(block)
                else:
                    self._unused[block] = None

    def store(self, block: int, name: BlockHash) -> None:
        """Name an owned, full block so that others can match it; keeps the older of two twins."""
        if name in self._block_of or self._name_of[block] is not None:
            return
        self._name_of[block] = name
        self._block_of[name] = block
        self._listener.stored(name)

    def forget(self, name: BlockHash) -> None:
        """Take a name away; its block is free once nobody uses it. Unknown names are ignored."""
        block = self._block_of.pop(name, None)
        if block is None:
            return
        self._name_of[block] = None
        if block in self._unused:
            del self._unused[block]
            self._give_back(block)
        self._listener.removed(name)

    def clear_cache(self) -> None:
        """Forget all names. Blocks in use stay with their owners, unnamed."""
        for block in self._block_of.values():
            self._name_of[block] = None
        self._block_of.clear()
        for block in self._unused:
            self._give_back(block)
        self._unused.clear()
        self._listener.cleared()

    def check(self, owners: Mapping[str, Sequence[int]]) -> None:
        """Raise AssertionError unless the books balance and agree with what `owners` hold."""
        held: Counter[int] = Counter()
        for owner, blocks in owners.items():
            if len(set(blocks)) != len(blocks):
                raise AssertionError(f"{owner} holds a block twice: {blocks}")
            held.update(blocks)
        owned = 0
        for block, references in enumerate(self._references):
            if references != held[block]:
                holders = [owner for owner, blocks in owners.items() if block in blocks]
                raise AssertionError(
                    f"block {block} has {references} references but {held[block]} owners {holders}"
                )
            free, name = self._free_map[block] == _FREE, self._name_of[block]
            owned += references > 0
            if free and (references or name is not None):
                raise AssertionError(f"block {block} is free and in use or named")
            if name is not None and self._block_of.get(name) != block:
                raise AssertionError(f"block {block} has a name that leads elsewhere")
            if (block in self._unused) != (not references and name is not None):
                raise AssertionError(f"block {block} is wrongly listed as evictable or not")
        if self._free != self._free_map.count(_FREE):
            raise AssertionError(
                f"{self._free} blocks counted free, {self._free_map.count(_FREE)} are"
            )
        if self._free + owned + len(self._unused) != self.total:
            raise AssertionError(
                f"{self._free} free + {owned} owned + {len(self._unused)} cached "
                f"is not {self.total} blocks"
            )
        if len(self._block_of) != sum(name is not None for name in self._name_of):
            raise AssertionError("two names lead to one block")

    def _take(self, start: int, count: int) -> range:
        self._free_map[start : start + count] = bytes([_TAKEN]) * count
        self._free -= count
        taken = range(start, start + count)
        for block in taken:
            self._references[block] = 1
        return taken

    def _give_back(self, block: int) -> None:
        self._free_map[block] = _FREE
        self._free += 1

    def _evict_oldest(self) -> None:
        block, _ = self._unused.popitem(last=False)
        name = self._name_of[block]
        assert name is not None
        self._name_of[block] = None
        del self._block_of[name]
        self._give_back(block)
        self._listener.removed(name)
