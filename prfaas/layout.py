"""KV layout and fingerprint: what two sides must agree on before KV moves between them."""

from __future__ import annotations

from dataclasses import dataclass

from prfaas.errors import IncompatibleLayout
from prfaas_connect.port.layout import (
    ITEM_BYTES,
    ChunkSpan,
    Extent,
    GroupKind,
    KvLayout,
    LayerGroup,
    LayoutError,
    chunk_spans,
)

__all__ = [
    "ITEM_BYTES",
    "ChunkSpan",
    "Extent",
    "Fingerprint",
    "GroupKind",
    "KvLayout",
    "LayerGroup",
    "LayoutError",
    "chunk_spans",
]


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Identity of a model's KV; never engine version, page size or file format.

    `model_identity` is what the operator states, by default a digest of config, tokenizer and
    tensor names and shapes; weights themselves are proven by the numeric probe.
    """

    wire_major: int
    model_identity: str
    config_digest: str
    tokenizer_digest: str
    adapters: tuple[str, ...]
    layout: KvLayout

    def require_compatible(self, other: Fingerprint) -> None:
        """Raise IncompatibleLayout naming the first field in which `other` differs."""
        for name in ("wire_major", "config_digest", "tokenizer_digest", "adapters"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                raise IncompatibleLayout(
                    f"{name} differs: {mine!r} here, {theirs!r} there", field=name
                )
        if len(self.layout.groups) != len(other.layout.groups):
            raise IncompatibleLayout(
                f"layer groups differ: {len(self.layout.groups)} here, "
                f"{len(other.layout.groups)} there",
                field="groups",
            )
        for i, (a, b) in enumerate(zip(self.layout.groups, other.layout.groups, strict=True)):
            for name in ("kind", "layers", "kv_heads", "head_dim", "dtype", "state_dim"):
                mine, theirs = getattr(a, name), getattr(b, name)
                if mine != theirs:
                    field = f"groups[{i}].{name}"
                    raise IncompatibleLayout(
                        f"{field} differs: {mine!r} here, {theirs!r} there", field=field
                    )
        # Last: a differing identity is explained by the fields above wherever one of them differs.
        if self.model_identity != other.model_identity:
            raise IncompatibleLayout(
                f"model_identity differs: {self.model_identity!r} here, "
                f"{other.model_identity!r} there",
                field="model_identity",
            )
