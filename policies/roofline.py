"""Profiles from data sheets: what a model must take on a chip, from rates and an assumed share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, Field

from prfaas.errors import ConfigError
from prfaas.profile import (
    DecodeTimes,
    Hardware,
    ModelKv,
    Part,
    PrefillTimes,
    Profile,
    parse_as,
    read_yaml,
)

SHIPPED = Path(__file__).parent / "shipped"
CHUNK_TOKENS = 8192
"""Prefill chunk of a roofline: weights are read once for each."""
MEMORY_SHARE = 0.9
"""Of a chip's memory, what weights and KV may fill."""
BATCH_CONTEXT_TOKENS = 32768
"""Context for which the largest batch is computed."""
MAX_BATCH = 256


class Chip(Part):
    """Data-sheet figures of one chip."""

    name: str
    source: str = Field(min_length=1)
    dense_tflop_per_s: float = Field(gt=0)
    memory_gb_per_s: float = Field(gt=0)
    memory_gb: float = Field(gt=0)
    weight_bits: int = Field(ge=1, le=32)


class ModelShape(Part):
    """What a roofline asks of a model."""

    source: str = Field(min_length=1)
    total_gparams: float = Field(gt=0)
    active_gparams: float = Field(gt=0)
    attention_layers: int = Field(ge=0)
    attention_heads: int = Field(ge=1)
    attention_qk_dim: int = Field(ge=1)
    attention_v_dim: int = Field(ge=1)
    kv: ModelKv


@dataclass(frozen=True, slots=True)
class Shares:
    """How much of a data sheet's rate is reached. Assumptions, not measurements."""

    matmul: float = 0.5
    attention: float = 0.2
    """Of the narrow format's rate: attention computes in 16 bits, at half of it."""
    memory: float = 0.7


def roofline(
    chip: Chip, chips: int, model_name: str, model: ModelShape, shares: Shares | None = None
) -> Profile:
    """One engine of `chips` chips. Raises ConfigError where the weights do not fit them."""
    shares = shares or Shares()
    flop_per_s = chip.dense_tflop_per_s * 1e12 * chips
    bytes_per_s = chip.memory_gb_per_s * 1e9 * chips * shares.memory
    weight_bytes = model.total_gparams * 1e9 * chip.weight_bits / 8
    room = chip.memory_gb * 1e9 * chips * MEMORY_SHARE - weight_bytes
    one_context = model.kv.raw_bytes(BATCH_CONTEXT_TOKENS)
    if room < one_context:
        raise ConfigError(
            f"{model_name} does not fit {chips} x {chip.name}: weights of "
            f"{weight_bytes / 1e9:.0f} GB and one context of {BATCH_CONTEXT_TOKENS} tokens "
            f"({one_context / 1e9:.1f} GB), memory {chip.memory_gb * chips:.0f} GB"
        )
    token_flop = 2 * model.active_gparams * 1e9
    pair_flop = (
        2
        * model.attention_layers
        * model.attention_heads
        * (model.attention_qk_dim + model.attention_v_dim)
    )
    token_s = token_flop / (flop_per_s * shares.matmul)
    return Profile(
        name=f"{chips}x{chip.name}-{model_name}",
        label="data_sheet",
        source=(
            f"roofline: {chip.source}; {model.source}; {shares.matmul:.0%} of the matmul rate, "
            f"{shares.attention:.0%} of it for attention, {shares.memory:.0%} of the memory rate"
        ),
        hardware=Hardware(chip=chip.name, chips=chips),
        model=model.kv,
        prefill=PrefillTimes(
            base_s=weight_bytes / bytes_per_s,
            token_s=token_s,
            token_context_s=pair_flop / (flop_per_s * shares.attention),
            chunk_tokens=CHUNK_TOKENS,
        ),
        decode=DecodeTimes(
            step_s=weight_bytes / bytes_per_s,
            sequence_s=token_s,
            context_token_s=model.kv.token_bytes / bytes_per_s,
            max_batch=int(min(MAX_BATCH, room // one_context)),
        ),
    )


def shipped_chips() -> Mapping[str, Chip]:
    """Chips with data-sheet figures, by the name used in profile names."""
    return _entries(SHIPPED / "chips.yaml", Chip)


def shipped_models() -> Mapping[str, ModelShape]:
    """Models that rooflines know, by name."""
    return _entries(SHIPPED / "models.yaml", ModelShape)


E = TypeVar("E", bound=BaseModel)


def _entries(path: Path, model: type[E]) -> Mapping[str, E]:
    return {
        name: parse_as(model, entry, str(path), name) for name, entry in read_yaml(path).items()
    }
