"""The first part of some KV codecs on the device where KV lies, in torch.

Each makes the very bytes that the codec's own first part makes: every step is single precision in
the same order, which torch does not contract and `prfaas/codecs/csrc` is compiled not to. Behind
them a byte says whether all values can be encoded (1) or not (0).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from prfaas.codecs import Calibration, Tile
from prfaas.codecs.transform import BasisStore, NearChannels

SPAN = 64
"""Tokens of K that share a scale in int8."""
_LARGEST = 8191
"""Coefficients of `near-channels` that 14 bits hold: twice what was seen of SmolLM2."""
_KEPT_TURNS = 4


class KvEncoder(Protocol):
    """Prepares tiles of one layer for a codec; used by one thread."""

    @property
    def name(self) -> str:
        """The codec's, as the agents' handshake has it."""
        ...

    def prepared_bytes(self, tile: Tile) -> int:
        """0: not for such a tile."""
        ...

    def prepare(self, kv: Tensor, tile: Tile) -> Tensor:
        """Of kv [2, tokens, heads, dim] uint8 [prepared bytes + 1], on the same device. Waits for
        nothing that the device does.
        """
        ...


class Int8Encoder:
    """All of `int8`: K with a scale for each channel over 64 tokens, V for each token and head."""

    name = "int8"

    def prepared_bytes(self, tile: Tile) -> int:
        rows, width = tile.tokens - tile.sinks, tile.heads * tile.head_dim
        if tile.keeps_state or tile.dtype != "bfloat16" or rows < 1 or len(tile.layers) != 1:
            return 0
        k = -(-rows // SPAN) * width * 2 + rows * width
        return 4 * tile.sinks * width + k + rows * tile.heads * (2 + tile.head_dim)

    def prepare(self, kv: Tensor, tile: Tile) -> Tensor:
        sinks, rest = kv[:, : tile.sinks], kv[:, tile.sinks :]
        k, v = rest[0].reshape(rest.shape[1], -1), rest[1]
        whole = len(k) // SPAN * SPAN
        parts = [_bytes(sinks)]
        worst = []
        for rows in (k[:whole].reshape(-1, SPAN, k.shape[1]), k[whole:][None]):
            if rows.numel():
                scale, coded, most = _eight_bits(rows, 1)
                parts.append(torch.cat((scale.flatten(1), coded.flatten(1)), 1).flatten())
                worst.append(most)
        scale, coded, most = _eight_bits(v, 2)
        parts.append(torch.cat((scale.flatten(2), coded.flatten(2)), 2).flatten())
        good = torch.stack((*worst, most)).amax() < 0x7F80
        return torch.cat((*parts, good.to(torch.uint8)[None]))


def _eight_bits(x: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Bytes of the scales along `dim`, which is the last dimension of the first but one; bytes of
    the values; the largest value, as bits of bfloat16.
    """
    largest = (x.view(torch.int16).to(torch.int32) & 0x7FFF).amax(dim, keepdim=True)
    step = (largest << 16).view(torch.float32) * torch.full((), 1 / 127, device=x.device)
    bits = ((step.view(torch.int32) + 0xFFFF) >> 16).clamp(min=0x80)
    inverse = torch.ones((), device=x.device) / (bits << 16).view(torch.float32)
    v = x.to(torch.float32) * inverse
    v = (v + torch.copysign(torch.full((), 0.5, device=x.device), v)).clamp(-127, 127)
    scale = bits.to(torch.int16).contiguous().view(torch.uint8)
    return scale, v.to(torch.int8).view(torch.uint8), largest.amax()


class ChannelsEncoder:
    """Transform and quantisation of `near-channels`; the agent codes entropy."""

    def __init__(self, calibration: Calibration, device: torch.device) -> None:
        self._store = BasisStore(calibration)
        header = calibration.header
        step = next(r.step for r in header.rungs if r.codec == NearChannels.codec)
        self.name = f"{NearChannels.codec}@{calibration.digest}"
        self._sizes = header.kv_heads, header.head_dim
        self._at = {layer: at for at, layer in enumerate(header.layers)}
        self._mean = torch.from_numpy(calibration.mean).to(device)
        scale = (calibration.scale / step).astype("float32")
        self._scale = torch.from_numpy(scale).to(device)
        self._half = torch.full((), 0.5, device=device)
        self._places = torch.tensor([0, 6, 12, 18], dtype=torch.int32, device=device)
        self._turns: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def prepared_bytes(self, tile: Tile) -> int:
        fits = (tile.kv_heads, tile.head_dim) == self._sizes and tile.whole and not tile.keeps_state
        rows = tile.tokens - tile.sinks
        if (
            not fits
            or rows < 1
            or tile.head_dim % 2
            or len(tile.layers) != 1
            or tile.layers[0] not in self._at
        ):
            return 0
        width = tile.heads * tile.head_dim
        return 2 * width * tile.sinks * tile.item_bytes + 7 * rows * width // 2

    def prepare(self, kv: Tensor, tile: Tile) -> Tensor:
        sinks, rest = kv[:, : tile.sinks], kv[:, tile.sinks :]
        x, at = rest.to(torch.float32), self._at[tile.layers[0]]
        finite = torch.isfinite(x).all()
        k = x[0]
        if self._store.calibration.inv_freq.size:
            cos, sin = self._turned(tile.token_start + tile.sinks, tile.token_end)
            half = tile.head_dim // 2
            low, high = k[..., :half], k[..., half:]
            k = torch.cat((low * cos + high * sin, high * cos - low * sin), -1)
        flat = torch.stack((k.flatten(1), x[1].flatten(1)))
        v = (flat - self._mean[at][:, None]) * self._scale[at][:, None]
        q = (v + torch.copysign(self._half, v)).clamp(-2 * _LARGEST, 2 * _LARGEST).to(torch.int16)
        good = finite & (q.abs() <= _LARGEST).all()
        turned = q.transpose(1, 2).flatten()
        high = (turned.to(torch.int32) >> 8 & 63).view(-1, 4) << self._places
        three = high.sum(1, dtype=torch.int32).view(torch.uint8).view(-1, 4)[:, :3]
        low = (turned & 0xFF).to(torch.uint8)
        return torch.cat((_bytes(sinks), low, three.flatten(), good.to(torch.uint8)[None]))

    def _turned(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines [tokens, 1, dim / 2]; all layers of a chunk have the same."""
        found = self._turns.get((start, end))
        if found is None:
            while len(self._turns) >= _KEPT_TURNS:
                del self._turns[next(iter(self._turns))]
            both = torch.from_numpy(self._store.turns(start, end)).to(self._mean.device)
            cos, sin = both[:, None].chunk(2, -1)
            found = self._turns[start, end] = cos, sin
        return found


def _bytes(x: Tensor) -> Tensor:
    return x.flatten().view(torch.uint8)


def encoders_for(device: torch.device, calibration: Calibration | None) -> Sequence[KvEncoder]:
    """What can be prepared on `device`: nothing where KV lies in host memory, whose agent does all
    of it as fast.
    """
    if device.type == "cpu":
        return ()
    if calibration is None or all(
        rung.codec != NearChannels.codec for rung in calibration.header.rungs
    ):
        return (Int8Encoder(),)
    return Int8Encoder(), ChannelsEncoder(calibration, device)
