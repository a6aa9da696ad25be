"""Rotary position embedding: frequencies under every supported scaling, and the rotation."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from prfaas.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Slow frequencies are divided by `factor`, fast ones kept, those between interpolated."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int

    def __post_init__(self) -> None:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ConfigError("rope: high_freq_factor must exceed low_freq_factor", field="rope")


@dataclass(frozen=True, slots=True)
class Rope:
    """Frequencies theta ** (-2 i / head_dim), then divided by `divisors` (none: 1) or `llama3`.

    Linear scaling divides all by one factor; a GGUF file may list a divisor per frequency.
    """

    theta: float
    head_dim: int
    divisors: tuple[float, ...] = ()
    llama3: Llama3Scaling | None = None

    def __post_init__(self) -> None:
        if self.theta <= 0 or any(divisor <= 0 for divisor in self.divisors):
            raise ConfigError("rope: theta and factors must be positive", field="rope")
        if len(self.divisors) not in (0, 1, self.head_dim // 2):
            raise ConfigError(
                f"rope: {len(self.divisors)} factors for head_dim {self.head_dim}", field="rope"
            )

    def inverse_frequencies(self) -> Tensor:
        """Radians per token, fp32 [head_dim / 2], computed in the order other engines do.

        The last bit matters: at position 8,000 it moves the fastest angles by about 1e-3.
        """
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
        inverse = 1.0 / (self.theta**exponents)
        if self.divisors:
            inverse = inverse / torch.tensor(self.divisors)
        return inverse if self.llama3 is None else _scale_llama3(inverse, self.llama3)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [tokens, heads, head_dim] by cos, sin [tokens, 1, head_dim / 2].

    Dimension i is paired with i + head_dim / 2.
    """
    half = x.shape[-1] // 2
    low, high = x[..., :half], x[..., half:]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    torch.mul(low, cos, out=out[..., :half]).addcmul_(high, sin, value=-1)
    torch.mul(high, cos, out=out[..., half:]).addcmul_(low, sin)
    return out


def _scale_llama3(inverse: Tensor, scaling: Llama3Scaling) -> Tensor:
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelengths = 2 * math.pi / inverse
    slowed = inverse / scaling.factor
    weight = (scaling.original_context / wavelengths - low) / (high - low)
    between = (1 - weight) * inverse / scaling.factor + weight * inverse
    scaled = torch.where(wavelengths > scaling.original_context / low, slowed, between)
    return torch.where(wavelengths < scaling.original_context / high, inverse, scaled)
