"""Paged layouts: copies by whole and partial blocks, head ranges, and the check at start."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from prfaas_connect.port.layout import LayoutError
from prfaas_connect.vllm.layouts import (
    LAYOUTS,
    CacheWriter,
    HeadRange,
    PagedKv,
    PagedLayout,
    candidates,
    check_layout,
    require_layout,
)

HEADS, DIM, BLOCKS = 3, 8, 11
SPLIT = [name for name, layout in LAYOUTS.items() if not layout.latent]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def shape_of(layout: PagedLayout, block: int, heads: int = HEADS) -> list[int]:
    sizes = {"B": BLOCKS, "N": block, "H": heads, "D": DIM, "K": 2, "C": 2 * DIM}
    sizes |= {"G": heads * DIM, "L": DIM}
    if layout.latent:
        sizes["H"] = 1
    return [sizes[name] for name in layout.dims]


def new_cache(
    name: str, block: int, dtype: torch.dtype = torch.float32, heads: int = HEADS
) -> Tensor:
    return torch.zeros(shape_of(LAYOUTS[name], block, heads), dtype=dtype)


def place(name: str, cache: Tensor, part: int, block: int, token: int, head: int) -> Tensor:
    """Where one token's K, V or latent lies, written down a second time and without views."""
    tokens = cache.shape[LAYOUTS[name].dims.index("N")]
    match name:
        case "cpu" | "cpu_split":
            flat = (cache[block, head] if name == "cpu" else cache[part, block, head]).reshape(-1)
            if part == 0:
                return flat[: tokens * DIM].view(DIM, tokens)[:, token]
            return flat[-tokens * DIM :].view(tokens, DIM)[token]
        case "hnd":
            return cache[block, head, token, part * DIM : part * DIM + DIM]
        case "nhd":
            return cache[block, token, head, part * DIM : part * DIM + DIM]
        case "hnd_split":
            return cache[block, part, head, token]
        case "nhd_split":
            return cache[block, part, token, head]
        case "hnd_kv_first":
            return cache[part, block, head, token]
        case "nhd_kv_first":
            return cache[part, block, token, head]
        case "head_groups":
            return cache[block, part, token, head * DIM : head * DIM + DIM]
        case "mla":
            return cache[block, token]
        case "mla_heads":
            return cache[block, 0, token]
    raise AssertionError(name)


def writer(name: str) -> CacheWriter:
    """An engine's write operation, token by token."""

    def write(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
        block_tokens = cache.shape[LAYOUTS[name].dims.index("N")]
        parts = [key] if LAYOUTS[name].latent else [key, value]
        for token, slot in enumerate(slots.tolist()):
            block, at = divmod(slot, block_tokens)
            for part, data in enumerate(parts):
                for head in range(data.shape[1]):
                    place(name, cache, part, block, at, head)[:] = data[token, head]

    return write


def paged(name: str, block: int, dtype: torch.dtype = torch.float32) -> PagedKv:
    heads = 1 if LAYOUTS[name].latent else HEADS
    cache = new_cache(name, block, dtype)
    return PagedKv(cache, LAYOUTS[name], HeadRange(0, heads, heads), DIM)


def numbers(kv: PagedKv, tokens: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (len(kv.parts), tokens, kv.heads.count, DIM)
    return torch.randn(shape, generator=generator).to(kv.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [16, 32])
@pytest.mark.parametrize("name", LAYOUTS)
def test_what_the_engine_writes_reads_back_by_any_range(
    name: str, block: int, dtype: torch.dtype
) -> None:
    kv = paged(name, block, dtype)
    table = [7, 2, 9, 1, 4]
    tokens = 4 * block + 5
    data = numbers(kv, tokens)
    slots = torch.tensor([table[t // block] * block + t % block for t in range(tokens)])
    writer(name)(data[0], data[-1], kv.cache, slots)
    for start, end in [
        (0, tokens), (0, block), (3, 7), (block - 1, block + 1), (5, 3 * block), (block, tokens),
        (block, block), (2 * block, 2 * block + 1), (block // 2, tokens - 1),
    ]:  # fmt: skip
        found = torch.empty(len(kv.parts), end - start, kv.heads.count, DIM, dtype=dtype)
        kv.read(table, start, end, found)
        assert torch.equal(found, data[:, start:end]), (start, end)


@pytest.mark.parametrize("name", LAYOUTS)
def test_writes_by_pieces_store_the_bytes_of_the_engine_and_touch_no_others(name: str) -> None:
    block, table = 16, [7, 2, 9, 1]
    kv, theirs = paged(name, block), paged(name, block)
    kv.cache.fill_(7.0)
    theirs.cache.fill_(7.0)
    data = numbers(kv, 3 * block + 4)
    for start, end in [(0, 5), (5, block), (block, 3 * block), (3 * block, 3 * block + 4)]:
        kv.write(table, start, end, data[:, start:end])
    slots = torch.tensor([table[t // block] * block + t % block for t in range(3 * block + 4)])
    writer(name)(data[0], data[-1], theirs.cache, slots)
    assert torch.equal(kv.cache, theirs.cache)


@pytest.mark.parametrize("order", [(0, 2, 1, 3), (1, 0, 2, 3)])
def test_one_layout_serves_every_physical_order_of_its_dimensions(order: tuple[int, ...]) -> None:
    block = 16
    shape = shape_of(LAYOUTS["hnd"], block)
    inverse = [order.index(i) for i in range(4)]
    cache = torch.zeros([shape[i] for i in order]).permute(inverse)
    kv = PagedKv(cache, LAYOUTS["hnd"], HeadRange(0, HEADS, HEADS), DIM)
    assert not cache.is_contiguous()
    check_layout(kv, writer("hnd"))
    assert require_layout(
        cache, writer("hnd"), HeadRange(0, HEADS, HEADS), dim=DIM, block_tokens=block
    ) == LAYOUTS["hnd"]  # fmt: skip


def test_padded_pages_keep_their_padding() -> None:
    block = 16
    flat = torch.full((BLOCKS, HEADS * block * 2 * DIM + 40), 3.0)
    cache = flat[:, : HEADS * block * 2 * DIM].unflatten(1, (HEADS, block, 2 * DIM))
    check_layout(PagedKv(cache, LAYOUTS["cpu"], HeadRange(0, 3, 3), DIM), writer("cpu"))
    assert torch.equal(flat, torch.full_like(flat, 3.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SPLIT)
def test_a_rank_takes_its_heads_of_canonical_bytes_and_gives_only_those(
    name: str, dtype: torch.dtype
) -> None:
    total, block, tokens = 6, 16, 37
    data = torch.randn(2, tokens, total, DIM).to(dtype)
    raw = data.contiguous().view(torch.uint8).reshape(-1).numpy()
    raw.flags.writeable = False
    for rank in range(2):
        heads = HeadRange.of_rank(rank, 2, total)
        cache = new_cache(name, block, dtype, heads.count)
        kv = PagedKv(cache, LAYOUTS[name], heads, DIM)
        kv.load([5, 3, 8], 0, tokens, raw)
        out = np.zeros(kv.token_bytes * (tokens - 3), dtype=np.uint8)
        kv.export([5, 3, 8], 3, tokens, out)
        mine = data[:, 3:, heads.start : heads.end].contiguous()
        assert out.tobytes() == mine.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(
    ("ranks", "total", "expected"),
    [
        (1, 3, [(0, 3, True)]),
        (2, 4, [(0, 2, True), (2, 4, True)]),
        (4, 2, [(0, 1, True), (0, 1, False), (1, 2, True), (1, 2, False)]),
    ],
)
def test_heads_are_split_or_copied_evenly(
    ranks: int, total: int, expected: list[tuple[int, int, bool]]
) -> None:
    found = [HeadRange.of_rank(rank, ranks, total) for rank in range(ranks)]
    assert [(h.start, h.end, h.first_copy) for h in found] == expected


@pytest.mark.parametrize(("rank", "ranks", "total"), [(0, 3, 4), (0, 4, 3), (2, 2, 4)])
def test_heads_that_cannot_be_split_are_refused(rank: int, ranks: int, total: int) -> None:
    with pytest.raises(LayoutError):
        HeadRange.of_rank(rank, ranks, total)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_check_finds_the_layout_and_leaves_the_cache_as_it_was(name: str) -> None:
    cache = new_cache(name, 16)
    cache.copy_(torch.randn(cache.shape))
    before = cache.clone()
    latent = LAYOUTS[name].latent
    heads = HeadRange(0, 1, 1) if latent else HeadRange(0, HEADS, HEADS)
    found = require_layout(cache, writer(name), heads, dim=DIM, block_tokens=16, latent=latent)
    assert found.name == name
    assert torch.equal(cache, before)


def test_a_cpu_tensor_that_looks_like_hnd_is_not_taken_for_it() -> None:
    """The trap: shapes say K lies beside V, the kernel says otherwise."""
    cache = new_cache("cpu", 16)
    heads = HeadRange(0, HEADS, HEADS)
    with pytest.raises(LayoutError, match="under hnd k does not read back"):
        require_layout(cache, writer("cpu"), heads, dim=DIM, block_tokens=16, name="hnd")
    found = require_layout(cache, writer("hnd"), heads, dim=DIM, block_tokens=16)
    assert found.name == "hnd"


def wrong_writers() -> dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], None]]:
    right = writer("hnd")
    return {
        "k and v swapped": lambda k, v, c, s: right(v, k, c, s),
        "one token late": lambda k, v, c, s: right(k, v, c, (s + 1) % (BLOCKS * 16)),
        "heads reversed": lambda k, v, c, s: right(k.flip(1), v.flip(1), c, s),
        "nothing": lambda k, v, c, s: None,
        "scaled": lambda k, v, c, s: right(k, v * 1.01, c, s),
    }


@pytest.mark.parametrize("what", wrong_writers())
def test_a_backend_that_stores_otherwise_is_refused_with_what_was_tried(what: str) -> None:
    cache = new_cache("hnd", 16)
    with pytest.raises(LayoutError, match=r"no known layout: .*under cpu .*under hnd"):
        require_layout(
            cache, wrong_writers()[what], HeadRange(0, HEADS, HEADS), dim=DIM, block_tokens=16
        )


def test_a_backend_that_scribbles_on_a_block_is_refused() -> None:
    right = writer("hnd")

    def write(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
        right(key, value, cache, slots)
        cache[slots[-1] // 16, :, -1] = 1.0

    with pytest.raises(LayoutError, match="other bytes"):
        require_layout(
            new_cache("hnd", 16), write, HeadRange(0, HEADS, HEADS), dim=DIM, block_tokens=16
        )


def test_unknown_names_and_shapes_are_refused_by_name() -> None:
    cache, heads = new_cache("hnd", 16), HeadRange(0, HEADS, HEADS)
    with pytest.raises(LayoutError, match="'dnh' is not one of"):
        require_layout(cache, writer("hnd"), heads, dim=DIM, block_tokens=16, name="dnh")
    with pytest.raises(LayoutError, match="no shape fits"):
        require_layout(cache[..., :5], writer("hnd"), heads, dim=DIM, block_tokens=16)
    with pytest.raises(LayoutError, match="does not fit the shape"):
        require_layout(cache, writer("hnd"), heads, dim=DIM, block_tokens=16, name="mla")


def test_transposed_keys_are_no_candidate_on_a_gpu() -> None:
    shape = shape_of(LAYOUTS["hnd"], 16)
    names = [
        layout.name
        for layout in candidates(
            shape, heads=HEADS, dim=DIM, block_tokens=16, device="cuda", latent=False
        )
    ]
    assert names == ["hnd"]


def test_ranges_outside_the_table_are_refused() -> None:
    kv = paged("cpu", 16)
    out = torch.empty(2, 17, HEADS, DIM)
    with pytest.raises(LayoutError, match=r"tokens \[0, 17\) are not in 1 blocks"):
        kv.read([3], 0, 17, out)
    with pytest.raises(LayoutError):
        kv.write([3], 4, 2, out)
