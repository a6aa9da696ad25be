"""A site's prefix cache: whole blocks in LRU order, and the states without which hybrids resume
nowhere."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from policies.workload.request import BLOCK_TOKENS
from prfaas.profile import ModelKv


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """Size and rules of one cache."""

    capacity_tokens: int | None = None
    """Tokens of KV it holds, states counted in; None: without bound."""
    state_tokens: int = 0
    """What one recurrent state weighs, in tokens of KV; 0: the model has none, any whole block can
    be reused."""
    checkpoint_blocks: int = 0
    """States are kept at every so many blocks, besides where a prompt ends; 0: only there."""

    @classmethod
    def of(cls, model: ModelKv, capacity_tokens: int | None) -> CacheSpec:
        """The rules of a model's KV. States go with the prompt's end, as the paper keeps them."""
        return cls(capacity_tokens, -(-model.state_bytes // model.token_bytes))


class PrefixCache:
    """Blocks and states of one site; nothing to close.

    A block is evicted after all blocks that continue it, since it is touched after them. With a
    recurrent state, reuse ends at the last whole block that has one (the state is exact for one
    length only), so a prompt that shares its first half with another may reuse nothing.
    """

    def __init__(self, spec: CacheSpec) -> None:
        self._spec = spec
        # A plain dict would scan what was evicted before at each eviction.
        self._blocks: OrderedDict[int, bool] = OrderedDict()
        """Id to whether a state is kept at its end; the least recently used first."""
        self._tokens = 0
        self.evicted_blocks = 0

    @property
    def tokens(self) -> int:
        """What is held, states counted in."""
        return self._tokens

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, blocks: Sequence[int], prompt_tokens: int) -> int:
        """Leading tokens of a prompt that can be reused; whole blocks only. Touches nothing."""
        held = self._blocks
        whole = prompt_tokens // BLOCK_TOKENS
        found = 0
        if not self._spec.state_tokens:
            for block in blocks:
                if block not in held:
                    break
                found += 1
            return (found if found < whole else whole) * BLOCK_TOKENS
        for index in range(min(whole, len(blocks))):
            state = held.get(blocks[index])
            if state is None:
                break
            if state:
                found = index + 1
        return found * BLOCK_TOKENS

    def insert(self, blocks: Sequence[int], prompt_tokens: int) -> None:
        """KV of a prompt is there now: its whole blocks become the most recently used ones."""
        spec, held = self._spec, self._blocks
        whole = min(len(blocks), prompt_tokens // BLOCK_TOKENS)
        if not whole:
            return
        renew = held.move_to_end
        before = len(held)
        for block in reversed(blocks[:whole]):
            if block in held:
                renew(block)
            else:
                held[block] = False
        tokens = self._tokens + (len(held) - before) * BLOCK_TOKENS
        if spec.state_tokens:
            tokens += self._keep_states(blocks, whole)
        self._tokens = tokens
        if spec.capacity_tokens is not None and tokens > spec.capacity_tokens:
            self._evict(spec.capacity_tokens)

    def clear(self) -> None:
        """Everything is lost, as after a restart."""
        self._blocks.clear()
        self._tokens = 0

    def check(self) -> None:
        """Raise AssertionError unless the books agree."""
        states = sum(self._blocks.values())
        held = len(self._blocks) * BLOCK_TOKENS + states * self._spec.state_tokens
        assert held == self._tokens, f"{held} tokens held, {self._tokens} counted"
        capacity = self._spec.capacity_tokens
        assert capacity is None or held <= capacity, f"{held} tokens in {capacity}"

    def _keep_states(self, blocks: Sequence[int], whole: int) -> int:
        """Mark where a prompt can be resumed; tokens that the new states weigh."""
        spec, held = self._spec, self._blocks
        ends = {whole - 1}
        if spec.checkpoint_blocks:
            ends.update(range(spec.checkpoint_blocks - 1, whole, spec.checkpoint_blocks))
        new = [index for index in ends if not held[blocks[index]]]
        for index in new:
            held[blocks[index]] = True
        return len(new) * spec.state_tokens

    def _evict(self, capacity: int) -> None:
        oldest, weight = self._blocks.popitem, self._spec.state_tokens
        before = len(self._blocks)
        tokens = self._tokens
        # What is held weighs `tokens` in all, so this ends before there is nothing left.
        while tokens > capacity:
            tokens -= BLOCK_TOKENS + weight if oldest(False)[1] else BLOCK_TOKENS
        self._tokens = tokens
        self.evicted_blocks += before - len(self._blocks)
