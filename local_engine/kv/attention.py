"""Attention over the paged pool: the engine's `AttentionKv`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from local_engine.kv.pool import KvPool
from local_engine.kv.states import NO_SLOT, StatePool
from local_engine.kv.table import BlockTable

# (q, k, v, dropout, causal) -> (output, log of the sum of exponentials)
_Flash = Callable[[Tensor, Tensor, Tensor, float, bool], tuple[Tensor, Tensor]]

# Shorter runs of slots are gathered by index, those in a row in one go: copying each would cost
# more in calls than in bytes.
_MIN_RUN_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Part:
    """One sequence's rows [q_start, q_start + q_len) of a step; `ctx_len` tokens precede them.

    `state`: its slot in the pool of states.
    """

    table: BlockTable
    q_start: int
    q_len: int
    ctx_len: int
    state: int = NO_SLOT

    @property
    def total(self) -> int:
        """Tokens stored once the step's own are."""
        return self.ctx_len + self.q_len


class Workspace:
    """Reused memory for gathered KV, [2, tokens, kv_heads, head_dim] in compute dtype.

    Fresh memory for each layer would cost more in page faults than the copy itself.
    """

    def __init__(self, pool: KvPool, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._pool = pool
        self._buffer = torch.empty(2, 0, pool.kv_heads, pool.head_dim, dtype=dtype)

    def reserve(self, tokens: int) -> None:
        """Make room for so many; what was taken before stays valid but is another buffer's."""
        if self._buffer.shape[1] < tokens:
            shape = (2, 1 << (tokens - 1).bit_length(), self._pool.kv_heads, self._pool.head_dim)
            self._buffer = torch.empty(shape, dtype=self.dtype, device=self._pool.device)

    def take(self, tokens: int) -> Tensor:
        """The first `tokens` of the buffer, at most what was reserved; all takers share them."""
        return self._buffer[:, :tokens]


class PagedKv:
    """KV of one step; made for it and dropped after it.

    Written and read back in KV dtype, the step's own tokens included: what a token attends to does
    not depend on where chunks begin. On the CPU each sequence is gathered and attended by itself:
    gathering is bound by memory, and padding would add to it. Elsewhere launches count, and a
    decode batch is one padded gather.
    """

    def __init__(
        self, pool: KvPool, parts: Sequence[Part], workspace: Workspace, *, padded: bool
    ) -> None:
        self._pool = pool
        self._parts = parts
        self._padded = padded and all(part.q_len == 1 for part in parts)
        self._masked = padded
        self._new_slots = torch.cat([part.table.slots(part.ctx_len, part.total) for part in parts])
        self._masks: dict[int, Tensor] = {}
        self._views: list[_PartView] = []
        if self._padded:
            self._grid, self._grid_mask = _padded_slots(parts)
        else:
            workspace.reserve(max(part.total for part in parts))
            self._views = [_PartView(pool, part, workspace) for part in parts]

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        stored = self._pool.layers[layer]
        stored[0].index_copy_(0, self._new_slots, k.to(stored.dtype))
        stored[1].index_copy_(0, self._new_slots, v.to(stored.dtype))

    def attend(self, layer: int, q: Tensor) -> Tensor:
        kv_heads = self._pool.kv_heads
        tokens, heads, dim = q.shape
        grouped = q.view(tokens, kv_heads, heads // kv_heads, dim)
        if self._padded:
            return self._attend_padded(layer, grouped).reshape(tokens, heads, dim)
        outputs: list[Tensor] = []
        for index, view in enumerate(self._views):
            part = view.part
            k, v = view.gather(layer)
            rows = grouped[part.q_start : part.q_start + part.q_len]
            if part.q_len == 1:
                out = F.scaled_dot_product_attention(rows, k, v)
            elif self._masked:
                out = _attend_masked(rows, k, v, self._mask(index, part))
            else:
                out = _attend_split(rows, k, v, part.ctx_len)
            outputs.append(out.reshape(part.q_len, heads, dim))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def read_states(self, layer: int, shape: tuple[int, int, int]) -> Tensor:
        states = self._state_pool(shape)
        return states.read(layer, self._state_slots)

    def write_states(self, layer: int, states: Tensor) -> None:
        self._state_pool(states.shape[1:]).write(layer, self._state_slots, states)

    def _state_pool(self, shape: Sequence[int]) -> StatePool:
        states = self._pool.states
        if states is None or states.shape != tuple(shape):
            raise ValueError(f"the pool keeps no states of {tuple(shape)}")
        return states

    @cached_property
    def _state_slots(self) -> Tensor:
        slots = [part.state for part in self._parts]
        return torch.tensor(slots, dtype=torch.int64, device=self._pool.device)

    def _attend_padded(self, layer: int, grouped: Tensor) -> Tensor:
        """grouped [batch, kv_heads, group, dim] over the padded contexts of all sequences."""
        kv = self._pool.layers[layer][:, self._grid].to(grouped.dtype).transpose(2, 3)
        return F.scaled_dot_product_attention(grouped, kv[0], kv[1], attn_mask=self._grid_mask)

    def _mask(self, index: int, part: Part) -> Tensor:
        mask = self._masks.get(index)
        if mask is None:
            shape = (part.q_len, part.total)
            mask = torch.ones(shape, dtype=torch.bool, device=self._pool.device).tril(part.ctx_len)
            self._masks[index] = mask
        return mask


class _PartView:
    """Where one sequence's KV lies and where it is gathered to, worked out once for all layers."""

    def __init__(self, pool: KvPool, part: Part, workspace: Workspace) -> None:
        self.part = part
        self._pool = pool
        runs = part.table.runs(0, part.total)
        # In place where nothing has to be cast or moved.
        self._whole = runs[0] if len(runs) == 1 and pool.dtype == workspace.dtype else None
        space = workspace.take(part.total)
        by_head = space.transpose(1, 2)
        self._k, self._v = by_head[:1], by_head[1:]
        self._copies: list[tuple[Tensor, int, int]] = []
        self._gathers: list[tuple[Tensor, Tensor]] = []
        for start, end, slot in _segments(runs):
            if slot is None:
                self._gathers.append((space[:, start:end], part.table.slots(start, end)))
            else:
                self._copies.append((space[:, start:end], slot, slot + end - start))

    def gather(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values, each [1, kv_heads, total, dim] in compute dtype."""
        stored = self._pool.layers[layer]
        if self._whole is not None:
            low, high = self._whole
            by_head = stored[:, low:high].transpose(1, 2)
            return by_head[:1], by_head[1:]
        for space, low, high in self._copies:
            space.copy_(stored[:, low:high])
        for space, slots in self._gathers:
            space.copy_(stored.index_select(1, slots))
        return self._k, self._v


def _segments(runs: Sequence[tuple[int, int]]) -> list[tuple[int, int, int | None]]:
    """Positions [start, end) and the first slot; None where short runs are gathered together."""
    found: list[tuple[int, int, int | None]] = []
    start = 0
    for low, high in runs:
        end = start + high - low
        if high - low >= _MIN_RUN_TOKENS:
            found.append((start, end, low))
        elif found and found[-1][2] is None:
            found[-1] = (found[-1][0], end, None)
        else:
            found.append((start, end, None))
        start = end
    return found


def _attend_split(grouped: Tensor, k: Tensor, v: Tensor, ctx_len: int) -> Tensor:
    """Causal attention without a mask: over the context, over the step's own tokens, then joined.

    grouped [tokens, kv_heads, group, dim]; k, v [1, kv_heads, ctx_len + tokens, dim]. A mask would
    be [tokens, ctx_len + tokens] and cost a tenth of the time at long contexts.
    """
    flash: _Flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    q, group = grouped.permute(1, 2, 0, 3), grouped.shape[2]
    own, own_lse = flash(
        q, _spread(k[:, :, ctx_len:], group), _spread(v[:, :, ctx_len:], group), 0.0, True
    )
    if ctx_len:
        before, before_lse = flash(
            q, _spread(k[:, :, :ctx_len], group), _spread(v[:, :, :ctx_len], group), 0.0, False
        )
        share = torch.sigmoid(before_lse - own_lse).unsqueeze(-1).to(own.dtype)
        own = torch.lerp(own, before, share)
    return own.permute(2, 0, 1, 3)


def _attend_masked(grouped: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """The same through a [tokens, ctx_len + tokens] mask, for devices without that kernel."""
    group = grouped.shape[2]
    out = F.scaled_dot_product_attention(
        grouped.permute(1, 2, 0, 3), _spread(k, group), _spread(v, group), attn_mask=mask
    )
    return out.permute(2, 0, 1, 3)


def _spread(x: Tensor, group: int) -> Tensor:
    """[1, kv_heads, tokens, dim] as [kv_heads, group, tokens, dim], without copying."""
    return x.transpose(0, 1).expand(-1, group, -1, -1)


def _padded_slots(parts: Sequence[Part]) -> tuple[Tensor, Tensor]:
    """Slots [batch, longest] and mask [batch, 1, 1, longest]; padding repeats a sequence's first
    slot, whose content is never NaN."""
    longest = max(part.total for part in parts)
    rows = []
    for part in parts:
        slots = part.table.slots(0, part.total)
        rows.append(torch.cat((slots, slots[:1].expand(longest - part.total))))
    grid = torch.stack(rows)
    lengths = torch.tensor([part.total for part in parts], device=grid.device)
    mask = torch.arange(longest, device=grid.device) < lengths[:, None]
    return grid, mask[:, None, None]
