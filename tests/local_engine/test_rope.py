"""Rotation and frequencies, against complex numbers and closed forms."""

from __future__ import annotations

import math

import pytest
import torch

from local_engine.models.rope import Llama3Scaling, Rope, rotate
from prfaas.errors import ConfigError


def test_rotation_is_multiplication_of_complex_numbers() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3, 8, generator=generator)
    angles = torch.randn(5, 1, 4, generator=generator)
    pairs = torch.complex(x[..., :4], x[..., 4:])
    want = pairs * torch.polar(torch.ones_like(angles), angles)
    got = rotate(x, angles.cos(), angles.sin())
    torch.testing.assert_close(got, torch.cat((want.real, want.imag), dim=-1))


def test_scores_depend_on_the_distance_only() -> None:
    inverse = Rope(theta=10000.0, head_dim=8).inverse_frequencies()
    generator = torch.Generator().manual_seed(1)
    q, k = torch.randn(1, 1, 8, generator=generator), torch.randn(1, 1, 8, generator=generator)

    def at(x: torch.Tensor, position: int) -> torch.Tensor:
        angles = (position * inverse).reshape(1, 1, 4)
        return rotate(x, angles.cos(), angles.sin())

    scores = [(at(q, start + 7) * at(k, start)).sum() for start in (0, 5, 100)]
    torch.testing.assert_close(scores[1], scores[0])
    torch.testing.assert_close(scores[2], scores[0])
    assert not torch.isclose((at(q, 8) * at(k, 0)).sum(), scores[0], atol=1e-3)


def test_frequencies_fall_from_one_radian_per_token() -> None:
    inverse = Rope(theta=100.0, head_dim=8).inverse_frequencies()
    torch.testing.assert_close(inverse, torch.tensor([1.0, 100**-0.25, 0.1, 100**-0.75]))
    divided = Rope(theta=100.0, head_dim=8, divisors=(4.0,)).inverse_frequencies()
    torch.testing.assert_close(divided, inverse / 4)


def test_llama3_keeps_fast_frequencies_slows_slow_ones_and_blends_between() -> None:
    rope = Rope(10000.0, 64, llama3=Llama3Scaling(8.0, 1.0, 4.0, original_context=512))
    plain = Rope(10000.0, 64).inverse_frequencies()
    ratio = plain / rope.inverse_frequencies()
    wavelengths = 2 * math.pi / plain
    assert (ratio[wavelengths < 128] == 1).all()
    torch.testing.assert_close(
        ratio[wavelengths > 512], torch.full_like(ratio[wavelengths > 512], 8.0)
    )
    between = ratio[(wavelengths > 128) & (wavelengths < 512)]
    assert len(between) > 2
    assert ((between > 1) & (between < 8)).all()
    assert (between.diff() > 0).all()


@pytest.mark.parametrize("theta", [0.0, -1.0])
def test_theta_must_be_positive(theta: float) -> None:
    with pytest.raises(ConfigError, match="must be positive"):
        Rope(theta, 8)
