"""The bounds of each quality class, and whether what was measured of a codec keeps within them."""

from __future__ import annotations

from dataclasses import dataclass

from prfaas.codecs.base import Quality
from prfaas.codecs.calibration import Measured, Rung

MIN_POSITIONS = 2000
"""Fewer positions prove nothing."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a class promises; KL in nats per token."""

    kl: float
    """Mean, both over text and over greedy continuations."""
    kl_p99: float
    top1_loss: float
    """Below the noise floor (bf16 against fp32 KV), as a share of positions."""
    nmse_max: float


BOUNDS = {
    Quality.NEAR: Bounds(kl=2e-4, kl_p99=4e-3, top1_loss=0.003, nmse_max=0.02),
    Quality.COMPACT: Bounds(kl=1e-3, kl_p99=2e-2, top1_loss=0.015, nmse_max=0.1),
    Quality.TIGHT: Bounds(kl=1e-2, kl_p99=2e-1, top1_loss=0.05, nmse_max=0.4),
}


def misses(quality: Quality, measured: Measured) -> list[str]:
    """Each bound that was not kept, as text; none: the codec may be offered."""
    bounds = BOUNDS[quality]
    loss = measured.top1_floor - measured.top1
    found = [
        f"{name} {value:.3g} is over {bound:.3g}"
        for name, value, bound in (
            ("KL", measured.kl, bounds.kl),
            ("free-running KL", measured.free_running_kl, bounds.kl),
            ("p99 KL", measured.kl_p99, bounds.kl_p99),
            ("top-1 loss", loss, bounds.top1_loss),
            ("error of the worst tensor", measured.nmse_max, bounds.nmse_max),
        )
        if not value <= bound
    ]
    if measured.positions < MIN_POSITIONS:
        found.append(f"{measured.positions} positions are fewer than {MIN_POSITIONS}")
    return found


def why_not(rung: Rung) -> list[str]:
    """Why a lossy codec is not offered on this model; none: it was measured to keep its class."""
    return ["not measured"] if rung.measured is None else misses(rung.quality, rung.measured)
