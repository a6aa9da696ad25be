"""Canonical KV layout: layer groups, chunk spans and where each piece lies in a staging extent.

Canonical tensor of a `full` group: K after rope, then V, as [k|v][token][global kv head][dim],
little endian, one tensor for each (chunk span, layer). Of a `recurrent` group: the state after a
checkpoint's last token, as [head][state dim][dim] in float32, one tensor for each (checkpoint,
layer). Page size, TP degree and the engine's own layout are each side's affair; both sides and the
wire agree only on what is here.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from operator import index
from typing import Any

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
MAX_COUNT = 0xFFFF
"""Layers and heads are 16-bit numbers in a frame."""
MAX_HEAD_STATE_BYTES = 16 << 20
"""A state is cut between heads only, and a frame has to hold the part of one."""
CHECKPOINT_SHARE = 10
"""Before the end, states travel where they are at most this part of the KV since the last ones."""


class LayoutError(ValueError):
    """A layout that is inconsistent or not supported; the message names the field."""


class GroupKind(enum.StrEnum):
    """What a layer group keeps: paged KV (`full`, `window`, `latent`) or state."""

    FULL = "full"
    WINDOW = "window"
    LATENT = "latent"
    RECURRENT = "recurrent"
    CONV = "conv"


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that keep the same kind of KV; `layers` are model layer indices, ascending.

    `full`: for each token K and V of `kv_heads` heads with `head_dim` values. `recurrent`: for all
    tokens together a state of `kv_heads` heads with `state_dim` times `head_dim` values.
    """

    kind: GroupKind
    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    dtype: str
    state_dim: int = 0

    def __post_init__(self) -> None:
        if self.kind not in (GroupKind.FULL, GroupKind.RECURRENT):
            raise LayoutError(f"group kind {self.kind.value!r} is not implemented in this version")
        if self.dtype not in ITEM_BYTES:
            raise LayoutError(f"KV dtype {self.dtype!r} is not one of {sorted(ITEM_BYTES)}")
        if self.keeps_state and self.dtype != "float32":
            raise LayoutError(f"recurrent state has dtype float32, not {self.dtype!r}")
        if not self.layers or list(self.layers) != sorted(set(self.layers)):
            raise LayoutError("layers must be ascending and not empty")
        if self.layers[0] < 0 or self.layers[-1] >= MAX_COUNT:
            raise LayoutError(f"layers must be from 0 to {MAX_COUNT - 1}")
        if not (1 <= self.kv_heads <= MAX_COUNT and 1 <= self.head_dim <= MAX_COUNT):
            raise LayoutError(f"kv_heads and head_dim must be from 1 to {MAX_COUNT}")
        if self.keeps_state and not 1 <= self.state_dim <= MAX_COUNT:
            raise LayoutError(f"state_dim of a recurrent group must be from 1 to {MAX_COUNT}")
        if self.state_dim and not self.keeps_state:
            raise LayoutError(f"a {self.kind.value} group has no state_dim")
        if self.state_bytes > MAX_HEAD_STATE_BYTES * self.kv_heads:
            raise LayoutError(f"the state of a head is over {MAX_HEAD_STATE_BYTES} bytes")

    @property
    def keeps_state(self) -> bool:
        """Whether it keeps one state for all tokens, not something for each."""
        return self.kind is GroupKind.RECURRENT

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one layer: K and V over all heads; 0 where it keeps state."""
        return 0 if self.keeps_state else 2 * self.kv_heads * self.head_dim * self.item_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of one layer's state over all heads; 0 where it keeps KV of each token."""
        return self.kv_heads * self.state_dim * self.head_dim * self.item_bytes


@dataclass(frozen=True, slots=True)
class ChunkSpan:
    """The part [start, end) of a session's tokens that falls into chunk `index` of the grid."""

    index: int
    start: int
    end: int

    @property
    def tokens(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Extent:
    """Where one (span, group, layer) tensor lies, from the start of the session's staging.

    A state's span ends at its checkpoint.
    """

    span: ChunkSpan
    group: int
    layer: int
    offset: int
    nbytes: int


def chunk_spans(start: int, end: int, chunk_tokens: int) -> list[ChunkSpan]:
    """Spans of [start, end) on the absolute grid of `chunk_tokens`, in order."""
    if not 0 <= start <= end:
        raise LayoutError(f"token range [{start}, {end}) is not valid")
    spans: list[ChunkSpan] = []
    at = start
    while at < end:
        index = at // chunk_tokens
        stop = min(end, (index + 1) * chunk_tokens)
        spans.append(ChunkSpan(index, at, stop))
        at = stop
    return spans


@dataclass(frozen=True, slots=True)
class KvLayout:
    """All layer groups of a model, in a fixed order that is part of the fingerprint."""

    groups: tuple[LayerGroup, ...]

    @property
    def token_bytes(self) -> int:
        """KV bytes of one token over all groups and layers."""
        return sum(g.token_bytes * len(g.layers) for g in self.groups)

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of one checkpoint over all groups and layers; 0: it has none."""
        return sum(g.state_bytes * len(g.layers) for g in self.groups)

    def session_bytes(self, start: int, end: int) -> int:
        """Raw bytes of the tokens [start, end); with states, the most they are on any grid."""
        kv_bytes, state_bytes = self.token_bytes * (end - start), self.state_bytes
        if not state_bytes or start >= end:
            return kv_bytes
        return kv_bytes + state_bytes * (1 + kv_bytes // (CHECKPOINT_SHARE * state_bytes))

    def extent_bytes(self, start: int, end: int, chunk_tokens: int) -> int:
        """Raw bytes of the tokens [start, end) on the grid of `chunk_tokens`: of all extents."""
        points = self.checkpoints(start, end, chunk_tokens)
        return self.token_bytes * (end - start) + self.state_bytes * len(points)

    def checkpoints(self, start: int, end: int, chunk_tokens: int) -> list[int]:
        """Tokens after which the states of a session over [start, end) travel, ascending.

        The last is `end`. Before it they are ends of chunks, wherever the states are at most a
        tenth of the KV since the checkpoint before (or `start`). What follows a checkpoint does not
        depend on what was before it, so a session may begin or end at any of them and keep the
        others. Empty where there are no tokens or no states.
        """
        state_bytes, token_bytes = self.state_bytes, self.token_bytes
        if not state_bytes or start >= end:
            return []
        found: list[int] = []
        last = start
        for span in chunk_spans(start, end, chunk_tokens)[:-1]:
            if CHECKPOINT_SHARE * state_bytes <= token_bytes * (span.end - last):
                last = span.end
                found.append(last)
        return [*found, end]

    def extents(self, start: int, end: int, chunk_tokens: int) -> Iterator[Extent]:
        """Every tensor of [start, end) in wire order: by chunk, then by layer."""
        offset = 0
        order = sorted((layer, gi) for gi, g in enumerate(self.groups) for layer in g.layers)
        points = set(self.checkpoints(start, end, chunk_tokens))
        for span in chunk_spans(start, end, chunk_tokens):
            for layer, gi in order:
                group = self.groups[gi]
                if group.keeps_state and span.end not in points:
                    continue
                nbytes = group.state_bytes or group.token_bytes * span.tokens
                yield Extent(span, gi, layer, offset, nbytes)
                offset += nbytes

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {"groups": [{**asdict(g), "kind": g.kind.value} for g in self.groups]}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> KvLayout:
        """Inverse of `to_dict`. Raises LayoutError that names what is wrong."""
        try:
            groups = tuple(
                LayerGroup(
                    kind=GroupKind(g["kind"]),
                    layers=tuple(index(x) for x in g["layers"]),
                    kv_heads=index(g["kv_heads"]),
                    head_dim=index(g["head_dim"]),
                    dtype=str(g["dtype"]),
                    state_dim=index(g.get("state_dim", 0)),
                )
                for g in data["groups"]
            )
        except (KeyError, TypeError, ValueError) as exc:
            raise LayoutError(f"malformed KV layout: {exc}") from exc
        if not groups:
            raise LayoutError("a KV layout needs at least one group")
        return KvLayout(groups)
