"""Profiles of paced engines: the step times of a machine and the KV layout of a model, as YAML."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from prfaas.errors import ConfigError
from prfaas.layout import GroupKind, KvLayout, LayerGroup
from prfaas.snapshot import PrefillCurve


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class PacedModel(_Part):
    """What the KV looks like. Two engines exchange KV if all of this and the tokenizer agree."""

    layers: int = Field(ge=1, le=1024, description="Layers that keep KV for every token.")
    kv_heads: int = Field(ge=1, le=1024, description="KV heads of a layer.")
    head_dim: int = Field(ge=1, le=4096, description="Values of a head, for K and for V alike.")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(description="KV dtype.")
    max_context: int = Field(ge=2, description="Longest context in tokens.")
    seed: int = Field(0, ge=0, lt=1 << 32, description="Stands for the weights.")


class PacedPrefill(_Part):
    """Seconds to prefill u tokens after c: base + token * u + token_context * u * (c + u / 2).

    The base is paid for each chunk; `chunk_tokens` is the grid on which the curve was measured.
    """

    base_s: float = Field(ge=0, description="Each chunk.")
    token_s: float = Field(gt=0, description="Each token.")
    token_context_s: float = Field(0.0, ge=0, description="Each token, per token of its context.")
    chunk_tokens: int = Field(ge=1, description="Prefill chunk, unless the settings name another.")

    @property
    def curve(self) -> PrefillCurve:
        return PrefillCurve(self.base_s, self.token_s, self.token_context_s, self.chunk_tokens)


class PacedDecode(_Part):
    """Seconds of one decode step over a batch."""

    step_s: float = Field(gt=0, description="Each step.")
    sequence_s: float = Field(0.0, ge=0, description="Each sequence in the batch.")
    context_token_s: float = Field(0.0, ge=0, description="Each token of KV the step reads.")
    max_batch: int = Field(ge=1, le=4096, description="Most sequences in a step.")

    def seconds(self, batch: int, context_tokens: int) -> float:
        """One step over `batch` sequences that together read `context_tokens`."""
        return self.step_s + self.sequence_s * batch + self.context_token_s * context_tokens


class PacedProfile(_Part):
    """One paced engine; frozen, made by `load_profile`."""

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9._-]+$", description="Shown everywhere.")
    source: str = Field(min_length=1, description="Where the numbers come from, for people.")
    tokenizer: Path = Field(
        strict=False, description="Model directory or GGUF; relative to the profile's file."
    )
    model: PacedModel = Field(description="KV layout.")
    prefill: PacedPrefill = Field(description="Prefill curve.")
    decode: PacedDecode = Field(description="Decode step.")
    time_scale: float = Field(
        1.0, gt=0, le=1000, description="All step times are multiplied by this."
    )

    @property
    def layout(self) -> KvLayout:
        group = LayerGroup(
            GroupKind.FULL,
            tuple(range(self.model.layers)),
            self.model.kv_heads,
            self.model.head_dim,
            self.model.dtype,
        )
        return KvLayout((group,))

    @property
    def config_digest(self) -> str:
        """Digest of what decides KV values; times and context length are not part of it."""
        text = self.model.model_dump_json(exclude={"max_context", "dtype"})
        return hashlib.blake2b(b"paced" + text.encode(), digest_size=16).hexdigest()


def load_profile(path: Path) -> PacedProfile:
    """Read and check a profile. Raises ConfigError naming the file and the key."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    try:
        profile = PacedProfile.model_validate(data)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(str(part) for part in e['loc']) or 'profile'}: {e['msg']}"
            for e in error.errors()
        )
        raise ConfigError(f"{path}: {problems}") from error
    return profile.model_copy(update={"tokenizer": path.parent / profile.tokenizer})
