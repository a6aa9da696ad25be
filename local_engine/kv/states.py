"""The state pool: one tensor per recurrent layer, a slot for each sequence or cached prefix."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from prfaas.errors import ConfigError
from prfaas.layout import LayerGroup

Bytes = npt.NDArray[np.uint8]

NO_SLOT = 0
"""The slot of whoever has none: what warm-up computes lands there, and nobody reads it."""


class StatePool:
    """Owns the state tensors of an engine; which slot belongs to whom is `StateBook`'s affair.

    `layers[i]` is [slots + 1, heads, state_dim, head_dim] in float32, of the i-th recurrent layer;
    a slot of it is the canonical layout. Slots in use are 1 to `slots`.
    """

    def __init__(self, group: LayerGroup, slots: int, device: torch.device) -> None:
        if slots < 2:
            raise ConfigError(
                f"the state pool has {slots} slots and needs 2: one to run and one to keep",
                field="state_memory_bytes",
            )
        self.slots = slots
        self.shape = (group.kv_heads, group.state_dim, group.head_dim)
        self.layer_bytes = group.state_bytes
        self.layers = [
            torch.zeros((slots + 1, *self.shape), dtype=torch.float32, device=device)
            for _ in group.layers
        ]

    def clear(self, slot: int) -> None:
        """The state before the first token."""
        for layer in self.layers:
            layer[slot].zero_()

    def copy(self, source: int, target: int) -> None:
        """All layers of one slot into another."""
        for layer in self.layers:
            layer[target].copy_(layer[source])

    def read(self, layer: int, slots: Tensor) -> Tensor:
        """A copy of one layer's states, [len(slots), heads, state_dim, head_dim]."""
        return self.layers[layer].index_select(0, slots)

    def write(self, layer: int, slots: Tensor, states: Tensor) -> None:
        """Inverse of `read`."""
        self.layers[layer].index_copy_(0, slots, states)

    def export(self, layer: int, slot: int, out: Bytes) -> None:
        """Write one layer's state to `out`, in canonical layout."""
        out[:] = self.layers[layer][slot].cpu().contiguous().view(torch.uint8).numpy().reshape(-1)

    def load(self, layer: int, slot: int, data: Bytes) -> None:
        """Inverse of `export`."""
        # A copy: shared memory need not be aligned for float32.
        state = torch.from_numpy(data.copy()).view(torch.float32).view(self.shape)
        self.layers[layer][slot].copy_(state)
