"""The paged pool: one tensor per layer, and copies in and out of it in canonical layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from local_engine.kv.states import StatePool
from local_engine.kv.table import BlockTable
from prfaas.errors import ConfigError
from prfaas.layout import KvLayout

Bytes = npt.NDArray[np.uint8]
_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a name used in settings and layouts."""
    return _DTYPES[name]


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Where a model layer is kept: its group in the layout, its index among the group's layers."""

    group: int
    index: int


class KvPool:
    """Owns the KV tensors of an engine; which block belongs to whom is `BlockManager`'s affair.

    `layers[i]` is [2 (k, v), slots, kv_heads, head_dim] in KV dtype, of the i-th layer that keeps
    KV; a block is `block_tokens` slots in a row. `[:, slots]` of it is the canonical layout, so
    export and import are copies. `states` are those of the recurrent layers, if the model has any.
    """

    def __init__(
        self,
        layout: KvLayout,
        blocks: int,
        block_tokens: int,
        device: torch.device | str = "cpu",
        state_slots: int = 0,
    ) -> None:
        kv_groups = [group for group in layout.groups if not group.keeps_state]
        state_groups = [group for group in layout.groups if group.keeps_state]
        if len(kv_groups) != 1 or len(state_groups) > 1:
            raise ConfigError(
                f"the pool holds one layer group with KV and one with states at most, the layout "
                f"has {len(kv_groups)} and {len(state_groups)}"
            )
        group = kv_groups[0]
        if sorted(layer for g in layout.groups for layer in g.layers) != list(
            range(sum(len(g.layers) for g in layout.groups))
        ):
            raise ConfigError("the layers of all layer groups must be 0, 1, 2, ...")
        if blocks < 1:
            raise ConfigError("the KV pool has no room for a single block", field="kv_memory_bytes")
        self.layout = layout
        self.blocks = blocks
        self.block_tokens = block_tokens
        self.device = torch.device(device)
        self.dtype = torch_dtype(group.dtype)
        self.kv_heads = group.kv_heads
        self.head_dim = group.head_dim
        # Zeroed, because padding may be read: uninitialised memory can hold NaN.
        shape = (2, blocks * block_tokens, group.kv_heads, group.head_dim)
        self.layers = [torch.zeros(shape, dtype=self.dtype, device=device) for _ in group.layers]
        self.states = StatePool(state_groups[0], state_slots, self.device) if state_groups else None
        self.kv_group = layout.groups.index(group)
        self.places = {
            layer: LayerPlace(gi, index)
            for layer, gi, index in sorted(
                (layer, gi, index)
                for gi, g in enumerate(layout.groups)
                for index, layer in enumerate(g.layers)
            )
        }
        """By model layer, in order."""

    def new_table(self) -> BlockTable:
        """An empty table on the pool's device."""
        return BlockTable(self.block_tokens, self.device)

    def write(self, layer: int, table: BlockTable, start: int, end: int, kv: Tensor) -> None:
        """Store kv [2, end - start, kv_heads, head_dim] (any dtype and device)."""
        at = 0
        for low, high in table.runs(start, end):
            self.layers[layer][:, low:high].copy_(kv[:, at : at + high - low])
            at += high - low

    def read(self, layer: int, table: BlockTable, start: int, end: int, out: Tensor) -> None:
        """Copy tokens [start, end) to `out` [2, tokens, kv_heads, head_dim], cast to its dtype."""
        at = 0
        for low, high in table.runs(start, end):
            out[:, at : at + high - low].copy_(self.layers[layer][:, low:high])
            at += high - low

    def gather(self, layer: int, runs: Sequence[tuple[int, int]]) -> Tensor:
        """Slots of one layer [2, tokens, kv_heads, head_dim], a copy on the pool's device. `runs`:
        of a table, taken before blocks may change hands.
        """
        return torch.cat([self.layers[layer][:, low:high] for low, high in runs], 1)

    def export(self, layer: int, table: BlockTable, start: int, end: int, out: Bytes) -> None:
        """Write tokens [start, end) of one layer to `out`, in canonical layout and KV dtype."""
        self.read(layer, table, start, end, self._canonical(out, end - start))

    def load(self, layer: int, table: BlockTable, start: int, end: int, data: Bytes) -> None:
        """Inverse of `export`."""
        self.write(layer, table, start, end, self._canonical(data, end - start))

    def _canonical(self, data: Bytes, tokens: int) -> Tensor:
        if not data.flags.writeable:
            data = data.copy()
        flat = torch.from_numpy(data).view(self.dtype)
        return flat.view(2, tokens, self.kv_heads, self.head_dim)


def pool_blocks(layout: KvLayout, block_tokens: int, memory_bytes: int) -> int:
    """Blocks of `block_tokens` that fit `memory_bytes`."""
    return memory_bytes // (layout.token_bytes * block_tokens)


def pool_state_slots(layout: KvLayout, blocks: int, memory_bytes: int) -> int:
    """State slots that fit `memory_bytes`, 0 where the layout has no states.

    Whoever has a slot has a block, and so has each kept prefix: more than both can use are none.
    """
    if not layout.state_bytes:
        return 0
    return min(memory_bytes // layout.state_bytes, 2 * blocks)
