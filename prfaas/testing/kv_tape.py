"""A tape of KV, recorded from a real engine or seeded, that stands for the KV of any prompt."""

from __future__ import annotations

import hashlib
import json
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from prfaas.errors import ConfigError
from prfaas.layout import GroupKind, KvLayout, LayerGroup

Bytes = npt.NDArray[np.uint8]
Tokens = npt.NDArray[np.int32]

SMOLLM2_LAYOUT = KvLayout((LayerGroup(GroupKind.FULL, tuple(range(30)), 3, 64, "bfloat16"),))
"""The demo model's, so that a seeded tape has the shape of a recorded one."""
_PLACED_BY_TOKENS = 64


class KvTape:
    """KV of some tokens in all layers, read in a circle; frozen, nothing to close.

    The tokens of a prompt decide where on the tape its KV begins, so two prompts have other bytes
    and both ends of a link find the same.
    """

    def __init__(self, layout: KvLayout, groups: Sequence[Bytes], source: str) -> None:
        """`groups`: for each layer group uint8 [layer][k|v][token][bytes of a token]."""
        lengths = {array.shape[2] for array in groups}
        for group, array in zip(layout.groups, groups, strict=True):
            expected = (len(group.layers), 2, array.shape[2], group.token_bytes // 2)
            if array.shape != expected or array.dtype != np.uint8:
                raise ValueError(f"a tape of shape {array.shape} where {expected} was expected")
        if len(lengths) != 1 or 0 in lengths:
            raise ValueError("all groups of a tape must have the same tokens, at least one")
        self.layout = layout
        self.source = source
        """What it was recorded from, for people."""
        self.tokens = lengths.pop()
        self._groups = tuple(np.ascontiguousarray(array) for array in groups)
        self._index = [{layer: i for i, layer in enumerate(g.layers)} for g in layout.groups]

    def __repr__(self) -> str:
        return f"<KvTape {self.source!r} {self.tokens} tokens of {self.layout.token_bytes} B>"

    @property
    def digest(self) -> str:
        """Of layout and bytes; the same at both ends of a pair."""
        state = hashlib.blake2b(json.dumps(self.layout.to_dict()).encode(), digest_size=16)
        for array in self._groups:
            state.update(array.data)
        return state.hexdigest()

    def start_of(self, prompt: Tokens) -> int:
        """Where on the tape the KV of `prompt` begins."""
        head = np.ascontiguousarray(prompt[:_PLACED_BY_TOKENS], dtype="<i4")
        return int(zlib.crc32(head.tobytes()) % self.tokens)

    def pieces(
        self, start: int, group: int, layer: int, begin: int, end: int
    ) -> list[tuple[int, Bytes]]:
        """KV of a prompt's tokens [begin, end) in one layer: (tokens before it, [k|v][token][...]).

        `start` is that of the prompt. Views of the tape, more than one where it comes round.
        """
        array = self._groups[group][self._index[group][layer]]
        found = []
        at = begin
        while at < end:
            place = (start + at) % self.tokens
            count = min(end - at, self.tokens - place)
            found.append((at - begin, array[:, place : place + count]))
            at += count
        return found

    def copy(self, out: Bytes, start: int, group: int, layer: int, begin: int, end: int) -> None:
        """Fill flat `out` with KV of the tokens [begin, end) in canonical layout."""
        rows = out.reshape(2, end - begin, -1)
        for at, piece in self.pieces(start, group, layer, begin, end):
            rows[:, at : at + piece.shape[1]] = piece

    def equals(
        self, found: Bytes, start: int, group: int, layer: int, begin: int, end: int
    ) -> bool:
        """Whether flat `found` is what `copy` would write."""
        if found.nbytes != self.layout.groups[group].token_bytes * (end - begin):
            return False
        rows = found.reshape(2, end - begin, -1)
        return all(
            np.array_equal(rows[:, at : at + piece.shape[1]], piece)
            for at, piece in self.pieces(start, group, layer, begin, end)
        )

    def save(self, path: Path) -> None:
        """Write `path`, whole or not at all."""
        meta = json.dumps({"layout": self.layout.to_dict(), "source": self.source})
        scratch = path.with_name(path.name + ".new")
        with scratch.open("wb") as file:
            np.savez(file, *self._groups, meta=np.frombuffer(meta.encode(), dtype=np.uint8))
        scratch.replace(path)

    @staticmethod
    def load(path: Path) -> KvTape:
        """Raises ConfigError for a file that is no tape."""
        try:
            with path.open("rb") as file, np.load(file) as data:
                meta = json.loads(data["meta"].tobytes())
                layout = KvLayout.from_dict(meta["layout"])
                groups = [data[f"arr_{i}"] for i in range(len(layout.groups))]
            return KvTape(layout, groups, str(meta["source"]))
        except OSError as exc:
            raise ConfigError(f"cannot read the tape {path}: {exc}") from exc
        except (KeyError, TypeError, ValueError, EOFError, zipfile.BadZipFile) as exc:
            raise ConfigError(f"{path} is not a tape of KV: {exc}") from exc


def seeded_tape(tokens: int, layout: KvLayout = SMOLLM2_LAYOUT, seed: int = 0) -> KvTape:
    """Unit normal values: their sign and exponent bytes compress as those of real KV do, and their
    mantissa bytes do not.
    """
    rng = np.random.default_rng(seed)
    groups = []
    for group in layout.groups:
        shape = (len(group.layers), 2, tokens, group.kv_heads * group.head_dim)
        values = rng.standard_normal(shape, dtype=np.float32)
        if group.dtype == "float16":
            raw: npt.NDArray[np.uint8] = values.astype("<f2").view(np.uint8)
        elif group.dtype == "bfloat16":
            raw = (values.astype("<f4").view("<u4") >> 16).astype("<u2").view(np.uint8)
        else:
            raw = values.astype("<f4").view(np.uint8)
        groups.append(raw)
    return KvTape(layout, groups, f"seeded normal values (seed {seed})")
