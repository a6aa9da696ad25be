"""The first tokens of a prompt, kept as they are beside what a lossy codec makes of the others."""

from __future__ import annotations

import numpy as np

from prfaas.codecs.base import Bytes, Tile


def _rows(raw: Bytes, shape: Tile) -> Bytes:
    return raw.reshape(len(shape.layers), 2, shape.tokens, -1)


def sink_bytes(shape: Tile) -> int:
    """Bytes of the tile's sinks."""
    return shape.nbytes // shape.tokens * shape.sinks


def split_sinks(raw: Bytes, shape: Tile) -> tuple[bytes, Bytes]:
    """The sinks' bytes, and all others as [layer][bytes of k|v, token, ...]: a view where there is
    no sink.
    """
    rows, n = _rows(raw, shape), shape.sinks
    rest = rows if not n else np.ascontiguousarray(rows[:, :, n:])
    return rows[:, :, :n].tobytes(), rest.reshape(len(shape.layers), -1)


def join_sinks(sinks: memoryview, rest: Bytes, out: Bytes, shape: Tile) -> None:
    """Inverse of `split_sinks`, into `out`; `sinks` has `sink_bytes`."""
    rows, n = _rows(out, shape), shape.sinks
    if n:
        rows[:, :, :n] = np.frombuffer(sinks, np.uint8).reshape(rows[:, :, :n].shape)
    rows[:, :, n:] = rest.reshape(rows[:, :, n:].shape)
