"""A sequence's blocks as pool slots."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class BlockTable:
    """Maps a sequence's token positions to pool slots (block * block_tokens + offset).

    Holds block numbers, not their ownership: whoever gets blocks from the manager returns them.
    """

    def __init__(self, block_tokens: int, device: torch.device | str = "cpu") -> None:
        self._block_tokens = block_tokens
        self._offsets = torch.arange(block_tokens, device=device)
        self._slots = torch.empty(0, dtype=torch.int64, device=device)
        self.blocks: list[int] = []
        # Runs of slots that follow each other: [first position, first slot, tokens].
        self._runs: list[list[int]] = []

    @property
    def capacity(self) -> int:
        """Tokens the blocks have room for."""
        return len(self.blocks) * self._block_tokens

    def extend(self, blocks: Sequence[int]) -> None:
        """Append blocks, in token order."""
        if not blocks:
            return
        size = self._block_tokens
        for block in blocks:
            slot, position = block * size, len(self.blocks) * size
            last = self._runs[-1] if self._runs else None
            if last is not None and last[1] + last[2] == slot:
                last[2] += size
            else:
                self._runs.append([position, slot, size])
            self.blocks.append(block)
        first = torch.tensor(blocks, dtype=torch.int64, device=self._slots.device) * size
        self._slots = torch.cat((self._slots, (first[:, None] + self._offsets).flatten()))

    def slots(self, start: int, end: int) -> Tensor:
        """Slots of positions [start, end), int64, on the pool's device."""
        return self._slots[start:end]

    def runs(self, start: int, end: int) -> list[tuple[int, int]]:
        """Positions [start, end) as slot ranges (first, past the last), in order."""
        found: list[tuple[int, int]] = []
        for position, slot, tokens in self._runs:
            low, high = max(start, position), min(end, position + tokens)
            if low < high:
                found.append((slot + low - position, slot + high - position))
        return found
