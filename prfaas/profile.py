"""Profiles: what an engine's steps take and what its model's KV weighs, as one YAML format.

Paced engines, planner and simulator read the same files. Units are the last part of each key.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from prfaas.errors import ConfigError
from prfaas.snapshot import PrefillCurve
from prfaas.yaml_text import parse_yaml

Vector = npt.NDArray[np.float64]

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

Quality = Literal["exact", "near", "compact", "tight"]
Label = Literal["published", "derived", "measured", "data_sheet", "estimate"]


class Part(BaseModel):
    """Base of all sections: frozen, strict, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def _as_pairs(points: object) -> object:
    """YAML knows lists only."""
    if isinstance(points, list):
        return tuple(tuple(p) if isinstance(p, list) else p for p in points)
    return points


def _batch_of(point: tuple[int, float]) -> int:
    return point[0]


class WireRatios(Part):
    """Raw over wire bytes of token KV by quality class; fixed state is never packed lossily."""

    exact: float = Field(1.0, ge=1, description="Bit for bit.")
    near: float | None = Field(None, ge=1, description="Quality class `near`.")
    compact: float | None = Field(None, ge=1, description="Quality class `compact`.")
    tight: float | None = Field(None, ge=1, description="Quality class `tight`.")


class ModelKv(Part):
    """What the KV of a model looks like."""

    layers: int = Field(ge=1, le=1024, description="Layers that keep KV for every token.")
    kv_heads: int = Field(ge=1, le=1024, description="KV heads of a layer.")
    head_dim: int = Field(ge=1, le=4096, description="Values of a head, for K and for V alike.")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(description="KV dtype.")
    max_context: int = Field(ge=2, description="Longest context in tokens.")
    seed: int = Field(0, ge=0, lt=1 << 32, description="Stands for the weights.")
    state_bytes: int = Field(
        0, ge=0, description="Recurrent and window state of one request, whatever its length."
    )
    wire_ratios: WireRatios = Field(WireRatios(), description="What codecs make of it.")

    @property
    def token_bytes(self) -> int:
        """Raw KV bytes a token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * ITEM_BYTES[self.dtype]

    def raw_bytes(self, tokens: float) -> float:
        """KV of `tokens` tokens and the fixed state."""
        return self.token_bytes * tokens + self.state_bytes

    def wire_bytes(self, tokens: float, ratio: float = 1.0) -> float:
        """The same as it crosses a link: the token KV packed `ratio` times, the state as it is."""
        return self.token_bytes * tokens / ratio + self.state_bytes


class Hardware(Part):
    """What one engine runs on, for people and for prices."""

    chip: str = Field(min_length=1, description="Name of the chip.")
    chips: int = Field(ge=1, description="Chips of one engine.")


class PrefillTimes(Part):
    """Seconds to prefill u tokens after c, by coefficients or by measured points; one of the two.

    Coefficients: base + token * u + token_context * u * (c + u / 2). Points: base + G(c + u) - G(c)
    where G joins the points with straight lines and the base is where the first one starts. Either
    way the base is paid for each chunk, and tokens late in a context cost what they cost there.
    """

    base_s: float | None = Field(None, ge=0, description="Each chunk.")
    token_s: float | None = Field(None, gt=0, description="Each token.")
    token_context_s: float | None = Field(
        None, ge=0, description="Each token, per token of its context."
    )
    points_tokens_s: tuple[tuple[int, float], ...] | None = Field(
        None,
        min_length=2,
        description="Pairs of prompt length and seconds without a cached prefix.",
    )
    chunk_tokens: int = Field(ge=1, description="Prefill chunk, unless the settings name another.")

    @field_validator("points_tokens_s", mode="before")
    @classmethod
    def _pairs(cls, points: object) -> object:
        return _as_pairs(points)

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if self.points_tokens_s is None:
            missing = [name for name in ("base_s", "token_s") if getattr(self, name) is None]
            if missing:
                raise ValueError(f"{' and '.join(missing)} missing (or give points_tokens_s)")
        elif (self.base_s, self.token_s, self.token_context_s) != (None, None, None):
            raise ValueError("give points_tokens_s or coefficients, not both")
        else:
            self._check_points(self.points_tokens_s)
        return self

    @staticmethod
    def _check_points(points: tuple[tuple[int, float], ...]) -> None:
        if points[0][0] < 1 or any(a[0] >= b[0] or a[1] > b[1] for a, b in pairwise(points)):
            raise ValueError("points_tokens_s: lengths and seconds must rise from point to point")
        (x0, y0), (x1, y1) = points[:2]
        if y0 - x0 * (y1 - y0) / (x1 - x0) < 0:
            raise ValueError("points_tokens_s: the first two give a negative base")

    @cached_property
    def covers_tokens(self) -> int | None:
        """The longest context that was measured; None where coefficients hold for any."""
        return None if self.points_tokens_s is None else self.points_tokens_s[-1][0]

    @cached_property
    def _segments(self) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
        """Where each segment starts (tokens), what it starts with (seconds), and its slope."""
        assert self.points_tokens_s is not None
        xs = [float(x) for x, _ in self.points_tokens_s]
        ys = [y for _, y in self.points_tokens_s]
        slopes = [(ys[i + 1] - ys[i]) / (xs[i + 1] - xs[i]) for i in range(len(xs) - 1)]
        starts = [0.0, *xs[1:-1]]
        values = [ys[0] - xs[0] * slopes[0], *ys[1:-1]]
        return tuple(starts), tuple(values), tuple(slopes)

    def seconds(self, uncached: float, cached: float = 0) -> float:
        """Compute time without queueing. Lengths beyond `covers_tokens` go on at the last slope;
        `Profile.require_covers` is what refuses them."""
        if uncached <= 0:
            return 0.0
        chunks = -(-uncached // self.chunk_tokens)
        if self.points_tokens_s is None:
            return (
                (self.base_s or 0.0) * chunks
                + (self.token_s or 0.0) * uncached
                + (self.token_context_s or 0.0) * uncached * (cached + uncached / 2)
            )
        starts, values, slopes = self._segments
        end = cached + uncached
        at = bisect_right(starts, end) - 1
        total = values[at] + slopes[at] * (end - starts[at])
        if cached:
            at = bisect_right(starts, cached) - 1
            total -= values[at] + slopes[at] * (cached - starts[at])
            return total + values[0] * chunks
        return total + values[0] * (chunks - 1)

    def seconds_of(self, uncached: Vector, cached: Vector) -> Vector:
        """`seconds` of many prompts at once."""
        chunks = np.ceil(uncached / self.chunk_tokens)
        if self.points_tokens_s is None:
            token, context = self.token_s or 0.0, self.token_context_s or 0.0
            return (
                (self.base_s or 0.0) * chunks
                + token * uncached
                + context * uncached * (cached + uncached / 2)
            )
        starts, values, slopes = (np.array(part) for part in self._segments)

        def total(tokens: Vector) -> Vector:
            at = np.searchsorted(starts, tokens, side="right") - 1
            return np.asarray(values[at] + slopes[at] * (tokens - starts[at]))

        spent = total(cached + uncached) - total(cached) + values[0] * chunks
        return np.where(uncached > 0, spent, 0.0)

    @cached_property
    def curve(self) -> PrefillCurve:
        """Coefficients as policies see them; for points the fit with the least relative error."""
        if self.points_tokens_s is None:
            return PrefillCurve(
                self.base_s or 0.0,
                self.token_s or 0.0,
                self.token_context_s or 0.0,
                self.chunk_tokens,
            )
        return _fitted(self.points_tokens_s, self.chunk_tokens)


class DecodeTimes(Part):
    """Seconds of one decode step over a batch, by coefficients or by measured points; one of the
    two.

    Points are joined by straight lines, and beyond the last one it goes on as from the first to the
    last. They need not rise: some kernels take longer for two sequences than for four.
    """

    step_s: float | None = Field(None, gt=0, description="Each step.")
    sequence_s: float | None = Field(None, ge=0, description="Each sequence in the batch.")
    points_batch_s: tuple[tuple[int, float], ...] | None = Field(
        None,
        min_length=2,
        description="Pairs of sequences in the batch, from 1 on, and seconds of a step.",
    )
    context_token_s: float = Field(0.0, ge=0, description="Each token of KV the step reads.")
    max_batch: int = Field(ge=1, le=4096, description="Most sequences in a step.")

    @field_validator("points_batch_s", mode="before")
    @classmethod
    def _pairs(cls, points: object) -> object:
        return _as_pairs(points)

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        points = self.points_batch_s
        if points is None:
            if self.step_s is None:
                raise ValueError("step_s missing (or give points_batch_s)")
        elif (self.step_s, self.sequence_s) != (None, None):
            raise ValueError("give points_batch_s or coefficients, not both")
        elif points[0][0] != 1 or any(a[0] >= b[0] for a, b in pairwise(points)):
            raise ValueError("points_batch_s: batches begin at 1 and must rise from point to point")
        elif any(not seconds > 0 for _, seconds in points):
            raise ValueError("points_batch_s: a step takes some time")
        return self

    def seconds(self, batch: int, context_tokens: float) -> float:
        """One step over `batch` sequences that together read `context_tokens`."""
        read_s = self.context_token_s * context_tokens
        if self.points_batch_s is None:
            return (self.step_s or 0.0) + (self.sequence_s or 0.0) * batch + read_s
        return read_s + self._joined(self.points_batch_s, batch)

    @staticmethod
    def _joined(points: tuple[tuple[int, float], ...], batch: int) -> float:
        (first, first_s), (last, last_s) = points[0], points[-1]
        if batch >= last:
            return last_s + max(0.0, last_s - first_s) / (last - first) * (batch - last)
        at = bisect_right(points, batch, key=_batch_of)
        (x0, y0), (x1, y1) = points[at - 1], points[at]
        return y0 + (y1 - y0) / (x1 - x0) * (batch - x0)


class Profile(Part):
    """One engine: its hardware, its model's KV, its step times; frozen, nothing to close."""

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9._-]+$", description="Shown everywhere.")
    label: Label = Field("estimate", description="How far the numbers can be trusted.")
    source: str = Field(min_length=1, description="Where the numbers come from, for people.")
    tokenizer: Path | None = Field(
        None,
        strict=False,
        description="Model directory or GGUF, which only paced engines need; relative to the file.",
    )
    hardware: Hardware | None = Field(None, description="What one engine runs on.")
    model: ModelKv = Field(description="KV layout.")
    prefill: PrefillTimes = Field(description="Prefill curve.")
    decode: DecodeTimes = Field(description="Decode step.")
    time_scale: float = Field(
        1.0, gt=0, le=1000, description="All step times are multiplied by this."
    )

    def prefill_s(self, uncached: float, cached: float = 0) -> float:
        """Seconds to prefill `uncached` tokens after `cached` ones, alone."""
        return self.time_scale * self.prefill.seconds(uncached, cached)

    def step_s(self, batch: int, context_tokens: float) -> float:
        """Seconds of one decode step."""
        return self.time_scale * self.decode.seconds(batch, context_tokens)

    @cached_property
    def curve(self) -> PrefillCurve:
        """What a policy is told of `prefill_s`."""
        c, scale = self.prefill.curve, self.time_scale
        return PrefillCurve(
            scale * c.base_s, scale * c.token_s, scale * c.token_context_s, c.chunk_tokens
        )

    @property
    def covers_tokens(self) -> int:
        """The longest context these numbers hold for."""
        return min(self.prefill.covers_tokens or self.model.max_context, self.model.max_context)

    def require_covers(self, tokens: int) -> None:
        """Raise ConfigError where a context of `tokens` is outside of what was measured."""
        if tokens > self.covers_tokens:
            raise ConfigError(
                f"profile {self.name} covers contexts of up to {self.covers_tokens} tokens, "
                f"{tokens} are asked for"
            )

    def wire_ratio(self, quality: str) -> float:
        """Raw over wire bytes of token KV in a quality class. Raises ConfigError."""
        ratio: float | None = getattr(self.model.wire_ratios, quality, None)
        if ratio is None:
            known = [name for name, value in self.model.wire_ratios if value is not None]
            raise ConfigError(
                f"profile {self.name} has no wire ratio for quality {quality!r}; "
                f"model.wire_ratios has {', '.join(known)}"
            )
        return ratio


P = TypeVar("P", bound=BaseModel)


def read_yaml(path: Path) -> Any:
    """The file's content. Raises ConfigError where it cannot be read or is not YAML."""
    try:
        return parse_yaml(path.read_bytes(), path)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error


def parse_as(model: type[P], data: object, where: str, what: str) -> P:
    """`data` as `model`. Raises ConfigError naming `where` and each key; `what` stands for the
    whole, and a key that only lacks its unit is answered with the one meant.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        problems = "; ".join(
            ": ".join((*_place(e, what, where), _said(model, e))) for e in error.errors()
        )
        raise ConfigError(f"{where}: {problems}") from error


def _place(error: Any, what: str, where: str) -> tuple[str, ...]:
    """The key that is wrong; the whole, unless `where` has said so."""
    key = ".".join(str(part) for part in error["loc"])
    return (key,) if key else (what,) if what != where else ()


def load_profile(path: Path) -> Profile:
    """Read and check a profile. Raises ConfigError naming the file and the key."""
    profile = parse_as(Profile, read_yaml(path), str(path), "profile")
    if profile.tokenizer is None:
        return profile
    return profile.model_copy(update={"tokenizer": path.parent / profile.tokenizer})


def _said(model: type[BaseModel], error: Any) -> str:
    if error["type"] in ("model_type", "dict_type", "mapping_type"):
        return "is not a mapping of keys"
    if error["type"] != "extra_forbidden":
        return str(error["msg"]).removeprefix("Value error, ")
    at: Any = model
    for part in error["loc"][:-1]:
        at = _section(at, part)
    name = str(error["loc"][-1])
    fields = at.model_fields if isinstance(at, type) and issubclass(at, BaseModel) else {}
    meant = [field for field in fields if field.startswith(f"{name}_")]
    if meant:
        return f"the unit is missing; did you mean {' or '.join(meant)}?"
    return f"unknown key; there are {', '.join(fields)}" if fields else "unknown key"


def _section(model: Any, part: object) -> Any:
    """The model class below a key, as far as annotations tell."""
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        return model
    info = model.model_fields.get(str(part))
    if info is None:
        return model
    candidates = [info.annotation, *getattr(info.annotation, "__args__", ())]
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), model)


def _fitted(points: tuple[tuple[int, float], ...], chunk_tokens: int) -> PrefillCurve:
    tokens = np.array([x for x, _ in points], dtype=float)
    seconds = np.array([y for _, y in points])
    features = np.stack([np.ceil(tokens / chunk_tokens), tokens, tokens**2 / 2], axis=1)
    supports = [(0, 1, 2), (0, 1), (1, 2), (0, 2), (1,), (0,), (2,)]
    best, best_error = np.zeros(3), float("inf")
    for support in supports:
        weighted = features[:, support] / seconds[:, None]
        found = np.linalg.lstsq(weighted, np.ones(len(points)), rcond=None)[0]
        error = float(((weighted @ found - 1) ** 2).sum())
        if (found >= 0).all() and error < best_error - 1e-12:
            best, best_error = np.zeros(3), error
            best[list(support)] = found
    base, token, context = (float(x) for x in best)
    return PrefillCurve(base, token, context, chunk_tokens)
