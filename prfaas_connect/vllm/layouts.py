"""How attention backends store a layer's KV in paged tensors, and copies to and from canonical KV.

A layout is nothing but views: the parts of a paged tensor (K and V, or one latent) as
[block, token in block, head, dim], whatever the strides. Everything else is the same for all
backends. What a backend really does is checked by `require_layout` against its own write
operation, because shapes may lie: on CPU a tensor [block, head, token, 2 * dim] holds, for each
block and head, K transposed ([dim, token]) and then V ([token, dim]).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from prfaas_connect.port.layout import LayoutError

Bytes = npt.NDArray[np.uint8]
CacheWriter = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""An engine's own write: key and value [tokens, heads, dim], paged tensor, slots [tokens]; a slot
is block * block_tokens + place in the block.
"""

DTYPE_NAMES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}
CHECK_SEED = 20


@dataclass(frozen=True, slots=True)
class HeadRange:
    """The KV heads [start, end) of `total` that one tensor-parallel rank keeps.

    `first_copy` is False where another rank keeps the same heads and is the one that exports.
    """

    start: int
    end: int
    total: int
    first_copy: bool = True

    @property
    def count(self) -> int:
        return self.end - self.start

    @staticmethod
    def of_rank(rank: int, ranks: int, total: int) -> HeadRange:
        """Split as vLLM does: evenly, or copied evenly where there are more ranks than heads.

        Raises LayoutError where neither is possible.
        """
        if not 0 <= rank < ranks:
            raise LayoutError(f"rank {rank} is not one of {ranks}")
        if total >= ranks:
            if total % ranks:
                raise LayoutError(f"{total} KV heads cannot be split over {ranks} ranks")
            each = total // ranks
            return HeadRange(rank * each, (rank + 1) * each, total)
        if ranks % total:
            raise LayoutError(f"{total} KV heads cannot be copied over {ranks} ranks")
        copies = ranks // total
        head = rank // copies
        return HeadRange(head, head + 1, total, first_copy=rank % copies == 0)


@dataclass(frozen=True, slots=True)
class PagedLayout:
    """One way to lay out a paged tensor; `dims` names its dimensions in order.

    B: block, N: token in block, H: head, D: dim of a head, K: k|v, C: K's dims then V's, G: dims of
    all heads, L: latent and rope dims. Strides are the tensor's own, so one layout serves every
    physical order of the same dimensions. `key_transposed`: within a block and head K lies as
    [dim, token], whatever `dims` says.
    """

    name: str
    dims: str
    key_transposed: bool = False

    @property
    def block_dim(self) -> int:
        return self.dims.index("B")

    @property
    def latent(self) -> bool:
        return "L" in self.dims

    def fits(self, shape: Sequence[int], heads: int, dim: int, block_tokens: int) -> bool:
        """Whether a tensor of this shape can be laid out so."""
        sizes = {"N": block_tokens, "H": heads, "D": dim, "K": 2, "C": 2 * dim}
        sizes |= {"G": heads * dim, "L": dim}
        return len(shape) == len(self.dims) and all(
            name == "B" or sizes[name] == size for name, size in zip(self.dims, shape, strict=True)
        )

    def parts(self, cache: Tensor, heads: int, dim: int) -> tuple[Tensor, ...]:
        """Views [block, token in block, head, dim]: K and V, or the latent alone."""
        if self.key_transposed:
            return self._transposed_parts(cache, dim)
        dims = self.dims
        if "G" in dims:
            cache = _unflatten(cache, dims.index("G"), heads, dim)
            dims = dims.replace("G", "HD")
        if "L" in dims:
            parts, dims = [cache], dims.replace("L", "D")
            if "H" not in dims:
                parts, dims = [cache.unsqueeze(-2)], dims.replace("D", "HD")
        elif "K" in dims:
            parts = list(cache.unbind(dims.index("K")))
            dims = dims.replace("K", "")
        else:
            at = dims.index("C")
            parts = [cache.narrow(at, 0, dim), cache.narrow(at, dim, dim)]
            dims = dims.replace("C", "D")
        order = [dims.index(name) for name in "BNHD"]
        return tuple(part.permute(order) for part in parts)

    def _transposed_parts(self, cache: Tensor, dim: int) -> tuple[Tensor, ...]:
        """K as [dim, token] and V as [token, dim], in each block and head."""
        try:
            if self.dims == "BHNC":
                blocks, heads, tokens, _ = cache.shape
                plane = cache.view(blocks, heads, 2 * tokens * dim)
                half = tokens * dim
                key = _unflatten(plane[:, :, :half], 2, dim, tokens)
                value = _unflatten(plane[:, :, half:], 2, tokens, dim)
            else:
                first, value = cache.unbind(self.dims.index("K"))
                blocks, heads, tokens, _ = first.shape
                key = first.view(blocks, heads, dim, tokens)
        except RuntimeError as exc:
            raise LayoutError(
                f"layout {self.name}: a block of strides {tuple(cache.stride())} is not contiguous"
            ) from exc
        return key.permute(0, 3, 1, 2), value.permute(0, 2, 1, 3)


def _unflatten(tensor: Tensor, at: int, first: int, second: int) -> Tensor:
    """A view with dimension `at` as two."""
    shape = tensor.shape
    return tensor.view(*shape[:at], first, second, *shape[at + 1 :])


LAYOUTS = {
    layout.name: layout
    for layout in (
        PagedLayout("cpu", "BHNC", key_transposed=True),
        PagedLayout("cpu_split", "KBHND", key_transposed=True),
        PagedLayout("hnd", "BHNC"),
        PagedLayout("nhd", "BNHC"),
        PagedLayout("hnd_split", "BKHND"),
        PagedLayout("nhd_split", "BKNHD"),
        PagedLayout("hnd_kv_first", "KBHND"),
        PagedLayout("nhd_kv_first", "KBNHD"),
        PagedLayout("head_groups", "BKNG"),
        PagedLayout("mla", "BNL"),
        PagedLayout("mla_heads", "BHNL"),
    )
}
"""By name. vLLM since 0.32 gives [B, H, N, C] views whose strides tell HND from NHD, or latent
[B, 1, N, L]; the others are what earlier versions' backends have.
"""


def candidates(
    shape: Sequence[int], *, heads: int, dim: int, block_tokens: int, device: str, latent: bool
) -> list[PagedLayout]:
    """Layouts that a paged tensor of this shape may have, the likeliest first."""
    return [
        layout
        for layout in LAYOUTS.values()
        if layout.latent == latent
        and layout.fits(shape, heads, dim, block_tokens)
        and (device == "cpu" or not layout.key_transposed)
    ]


class PagedKv:
    """One layer's paged tensor of one rank, addressed by a sequence's tokens; owns nothing.

    `table` is always the sequence's block ids: token t lies in block `table[t // block_tokens]`.
    Canonical tensors are [part][token][head][dim], with parts K and V or the latent alone.
    """

    def __init__(self, cache: Tensor, layout: PagedLayout, heads: HeadRange, dim: int) -> None:
        self.cache = cache
        self.layout = layout
        self.heads = heads
        self.dim = dim
        self.parts = layout.parts(cache, heads.count, dim)
        self.blocks, self.block_tokens = self.parts[0].shape[:2]
        self.dtype = cache.dtype
        self.token_bytes = len(self.parts) * heads.count * dim * cache.element_size()

    def __repr__(self) -> str:
        return (
            f"<PagedKv {self.layout.name} blocks={self.blocks}x{self.block_tokens} "
            f"heads=[{self.heads.start}, {self.heads.end}) of {self.heads.total} {self.dtype}>"
        )

    def read(self, table: Sequence[int], start: int, end: int, out: Tensor) -> None:
        """Copy tokens [start, end) to `out` [part, token, this rank's heads, dim]."""
        for index, rows, low, high, at, count in self._runs(table, start, end):
            for part, target in zip(self.parts, out, strict=True):
                view = target[at : at + count]
                if index is None:
                    view.copy_(part[rows[0], low:high], non_blocking=True)
                    continue
                shaped = _unflatten(view, 0, len(rows), self.block_tokens)
                if shaped.device == part.device and shaped.is_contiguous():
                    torch.index_select(part, 0, index, out=shaped)
                else:
                    shaped.copy_(part.index_select(0, index), non_blocking=True)

    def write(self, table: Sequence[int], start: int, end: int, data: Tensor) -> None:
        """Inverse of `read`; the rest of a block that is written in part keeps its bytes."""
        for index, rows, low, high, at, count in self._runs(table, start, end):
            for part, source in zip(self.parts, data, strict=True):
                view = source[at : at + count]
                if index is None:
                    part[rows[0], low:high].copy_(view, non_blocking=True)
                    continue
                shaped = _unflatten(view, 0, len(rows), self.block_tokens)
                part.index_copy_(0, index, shaped.to(part.device, non_blocking=True))

    def export(self, table: Sequence[int], start: int, end: int, out: Bytes) -> None:
        """Write tokens [start, end) of this rank's heads to `out`, in canonical layout."""
        self.read(table, start, end, self._canonical(out, end - start, self.heads.count))

    def load(self, table: Sequence[int], start: int, end: int, data: Bytes) -> None:
        """Take tokens [start, end) from canonical bytes of *all* heads; this rank keeps its own."""
        whole = self._canonical(data, end - start, self.heads.total)
        self.write(table, start, end, whole[:, :, self.heads.start : self.heads.end])

    def _canonical(self, data: Bytes, tokens: int, heads: int) -> Tensor:
        if not data.flags.writeable:
            data = data.copy()
        flat = torch.from_numpy(data).view(self.dtype)
        return flat.view(len(self.parts), tokens, heads, self.dim)

    def _runs(
        self, table: Sequence[int], start: int, end: int
    ) -> list[tuple[Tensor | None, Sequence[int], int, int, int, int]]:
        """At most three pieces of [start, end): part of a block, whole blocks, part of a block.

        Each: index of whole blocks or None, block ids, place in the block, first token, tokens.
        """
        size = self.block_tokens
        if not 0 <= start <= end <= len(table) * size:
            raise LayoutError(f"tokens [{start}, {end}) are not in {len(table)} blocks of {size}")
        runs: list[tuple[Tensor | None, Sequence[int], int, int, int, int]] = []
        at = start
        while at < end:
            block, low = divmod(at, size)
            stop = end // size
            if low or stop <= block:
                high = min(size, end - block * size)
                runs.append((None, [table[block]], low, high, at - start, high - low))
                at += high - low
            else:
                rows = table[block:stop]
                index = torch.tensor(rows, dtype=torch.long, device=self.cache.device)
                runs.append((index, rows, 0, size, at - start, len(rows) * size))
                at += len(rows) * size
        return runs


def require_layout(
    cache: Tensor,
    write: CacheWriter,
    heads: HeadRange,
    *,
    dim: int,
    block_tokens: int,
    latent: bool = False,
    name: str = "",
) -> PagedLayout:
    """The layout (`name`, or any that fits) under which what `write` stores reads back right.

    Uses up to three blocks of `cache`, whose bytes are restored; nothing may be live in it.
    Raises LayoutError that says what was tried.
    """
    if name and name not in LAYOUTS:
        raise LayoutError(f"KV layout {name!r} is not one of {sorted(LAYOUTS)}")
    tried = (
        [LAYOUTS[name]]
        if name
        else candidates(
            cache.shape,
            heads=heads.count,
            dim=dim,
            block_tokens=block_tokens,
            device=cache.device.type,
            latent=latent,
        )
    )
    reasons = []
    for layout in tried:
        if not layout.fits(cache.shape, heads.count, dim, block_tokens):
            reasons.append(f"{layout.name} does not fit the shape")
            continue
        try:
            found = PagedKv(cache, layout, heads, dim)
            check_layout(found, write)
        except LayoutError as exc:
            reasons.append(str(exc))
            continue
        return layout
    raise LayoutError(
        f"the KV cache of shape {tuple(cache.shape)}, strides {tuple(cache.stride())} on "
        f"{cache.device.type} has no known layout: {'; '.join(reasons) or 'no shape fits'}"
    )


def check_layout(kv: PagedKv, write: CacheWriter) -> None:
    """Write a pattern through the engine's own operation and compare, both ways.

    Raises LayoutError that names the first part that differs; see `require_layout`.
    """
    dim = kv.layout.block_dim
    usable = min(3, kv.blocks - 1)  # Block 0 is nobody's.
    if usable < 1:
        raise LayoutError(f"{kv.blocks} blocks are too few to check the layout")
    # Neither in order nor next to each other, and the last one in part.
    table = [kv.blocks - 1, 1, (kv.blocks + 1) // 2][:usable]
    table = list(dict.fromkeys(table))
    tokens = len(table) * kv.block_tokens - kv.block_tokens // 2
    blocks = torch.tensor(table, device=kv.cache.device)
    before = kv.cache.index_select(dim, blocks)
    pattern = _pattern(kv, tokens)
    key, value = pattern[0], pattern[-1]
    try:
        kv.cache.index_fill_(dim, blocks, 0)
        place = torch.arange(tokens, device=kv.cache.device)
        slots = blocks[place // kv.block_tokens] * kv.block_tokens + place % kv.block_tokens
        write(key, value, kv.cache, slots)
        found = torch.empty_like(pattern)
        kv.read(table, 0, tokens, found)
        names = ("k", "v") if len(kv.parts) > 1 else ("latent",)
        for name, mine, theirs in zip(names, found, pattern, strict=True):
            if not torch.equal(mine, theirs):
                raise LayoutError(f"under {kv.layout.name} {name} does not read back as written")
        theirs = kv.cache.index_select(dim, blocks)
        kv.cache.index_fill_(dim, blocks, 0)
        kv.write(table, 0, tokens, pattern)
        if not torch.equal(kv.cache.index_select(dim, blocks), theirs):
            raise LayoutError(f"under {kv.layout.name} other bytes are written than the engine's")
    finally:
        kv.cache.index_copy_(dim, blocks, before)


def _pattern(kv: PagedKv, tokens: int) -> Tensor:
    """Seeded numbers [part, token, head, dim], all different enough to tell any two places."""
    generator = torch.Generator().manual_seed(CHECK_SEED)
    shape = (len(kv.parts), tokens, kv.heads.count, kv.dim)
    return torch.randn(shape, generator=generator).to(kv.dtype).to(kv.cache.device)
