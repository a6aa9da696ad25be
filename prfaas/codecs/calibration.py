"""A model's calibration: bases, scales and steps for lossy codecs, and how good each was measured.

A file of arrays (npz, no pickle) with a JSON header. Its digest covers everything that decides
bytes on the wire, not what was measured, and is part of the codecs' names in the handshake: two
sides with different calibrations have no calibrated codec in common.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from prfaas.codecs.base import Quality
from prfaas.errors import ConfigError

Floats = npt.NDArray[np.float32]

VERSION = 1
CODING = 2
"""Of what the codecs make of the coefficients; sides with different ones have none in common."""
_DIGEST_BYTES = 6


@dataclass(frozen=True, slots=True)
class Measured:
    """What a codec did on text that it was not calibrated on; KL in nats, of bf16 KV."""

    positions: int
    kl: float
    """Mean over the text that follows the prompts."""
    kl_p99: float
    """Of that text, or of greedy continuations where it is larger there."""
    top1: float
    """Share of positions where the most likely token is the same."""
    top1_floor: float
    """The same share for bf16 against fp32 KV."""
    nmse_max: float
    """Of the worst tensor (layer, K or V): squared error over variance of its channels."""
    ratio: float
    """Raw over encoded bytes."""
    free_running_kl: float
    """Mean over greedy continuations of bf16 KV."""


@dataclass(frozen=True, slots=True)
class Rung:
    """One codec of a calibration. `columns` are kept of each layer group's K and V basis; none:
    channel by channel, without a basis. int8, which takes nothing out of a calibration, is here for
    what was measured of it alone.
    """

    codec: str
    quality: Quality
    step: float
    columns: tuple[tuple[int, int], ...] = ()
    measured: Measured | None = None


@dataclass(frozen=True, slots=True)
class Header:
    """What is not an array."""

    version: int
    model_identity: str
    layers: tuple[int, ...]
    """Model layers of the attention group, in order; all arrays are in this order."""
    kv_heads: int
    head_dim: int
    spans: tuple[tuple[int, int], ...]
    """Ranges of positions in `layers` that share a basis."""
    rungs: tuple[Rung, ...]


@dataclass(frozen=True, slots=True)
class Calibration:
    """Calibration of one model. Nothing to close.

    `inv_freq` [head_dim / 2]: radians per token; empty where K is not rotated back. `mean` [layers,
    2, heads * dim] of K before rope and of V. `scale` [layers, 2, heads * dim]: what a channel is
    multiplied with where there is no basis. `metric` [layers, 2, heads, dim, dim]: symmetric, of
    each head, its rows already weighted by the layer. `basis`: for each span and k|v [width,
    columns], orthonormal, in the metric's space.
    """

    header: Header
    inv_freq: Floats
    mean: Floats
    scale: Floats
    metric: Floats
    basis: tuple[Floats, ...]

    @property
    def digest(self) -> str:
        """Of all that decides bytes on the wire."""
        plain = replace(
            self.header, rungs=tuple(replace(r, measured=None) for r in self.header.rungs)
        )
        said = json.dumps([CODING, asdict(plain)])
        digest = hashlib.blake2b(said.encode(), digest_size=_DIGEST_BYTES)
        for array in (self.inv_freq, self.mean, self.scale, self.metric, *self.basis):
            digest.update(repr(array.shape).encode())
            digest.update(np.ascontiguousarray(array, dtype="<f4").tobytes())
        return digest.hexdigest()

    def save(self, path: Path) -> None:
        """Write the file. Raises ConfigError where that is not possible."""
        header = np.frombuffer(json.dumps(asdict(self.header)).encode(), dtype=np.uint8)
        arrays: dict[str, npt.NDArray[np.generic]] = {
            "header": header, "inv_freq": self.inv_freq, "mean": self.mean,
            "scale": self.scale, "metric": self.metric,
        }  # fmt: skip
        # Bases are orthonormal: half precision is far below any step.
        arrays |= {f"basis{i}": b.astype(np.float16) for i, b in enumerate(self.basis)}
        buffer = io.BytesIO()
        np.savez_compressed(buffer, allow_pickle=False, **arrays)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(buffer.getvalue())
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from error

    @classmethod
    def load(cls, path: Path) -> Calibration:
        """Read and check a file. Raises ConfigError that names it."""
        try:
            # From memory: of a broken file numpy would leave the handle open.
            with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            header = msgspec.json.decode(arrays.pop("header").tobytes(), type=Header)
            basis = tuple(
                arrays.pop(f"basis{i}").astype(np.float32) for i in range(2 * len(header.spans))
            )
            found = cls(header, **arrays, basis=basis)
            found.check()
        except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile,
                msgspec.MsgspecError) as error:  # fmt: skip
            raise ConfigError(f"{path} is not a calibration of KV codecs: {error}") from error
        return found

    def check(self) -> None:
        """Raise ValueError where sizes contradict each other or values are not finite."""
        h = self.header
        if h.version != VERSION:
            raise ValueError(f"version {h.version} is not {VERSION}")
        if not (1 <= h.head_dim <= 4096 and 1 <= h.kv_heads <= 65535 and h.layers):
            raise ValueError("no layers, or sizes out of range")
        if [i for a, b in h.spans for i in range(a, b)] != list(range(len(h.layers))):
            raise ValueError("spans do not cover the layers in order")
        layers, width = len(h.layers), h.kv_heads * h.head_dim
        shapes: Mapping[str, tuple[int, ...]] = {
            "mean": (layers, 2, width),
            "scale": (layers, 2, width),
            "metric": (layers, 2, h.kv_heads, h.head_dim, h.head_dim),
        }
        for name, shape in shapes.items():
            if getattr(self, name).shape != shape:
                raise ValueError(f"{name} is {getattr(self, name).shape}, not {shape}")
        if self.inv_freq.shape not in ((0,), (h.head_dim // 2,)):
            raise ValueError(f"inv_freq is {self.inv_freq.shape}")
        for (a, b), k, v in zip(h.spans, self.basis[::2], self.basis[1::2], strict=True):
            if k.ndim != 2 or v.ndim != 2 or {k.shape[0], v.shape[0]} != {(b - a) * width}:
                raise ValueError(f"bases of layers {a} to {b} are {k.shape} and {v.shape}")
        for rung in h.rungs:
            if not rung.step > 0 or (rung.columns and len(rung.columns) != len(h.spans)):
                raise ValueError(f"{rung.codec} has no proper step or columns")
            for index, columns in enumerate(n for pair in rung.columns for n in pair):
                if not 1 <= columns <= self.basis[index].shape[1]:
                    raise ValueError(f"{rung.codec} keeps {columns} columns")
        if not all(
            np.isfinite(a).all()
            for a in (self.inv_freq, self.mean, self.scale, self.metric, *self.basis)
        ):
            raise ValueError("some values are not finite")
        if not (self.scale > 0).all():
            raise ValueError("some scales are not positive")

    def rung(self, codec: str) -> Rung | None:
        """That of a codec, if it is here."""
        return next((r for r in self.header.rungs if r.codec == codec), None)

    def with_measured(self, measured: Mapping[str, Measured]) -> Calibration:
        """The same with what was measured of some rungs."""
        rungs = tuple(
            replace(r, measured=measured.get(r.codec, r.measured)) for r in self.header.rungs
        )
        return replace(self, header=replace(self.header, rungs=rungs))
