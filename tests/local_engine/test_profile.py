"""The fitted curve finds the true one through noise, outliers and a machine that changes pace."""

from __future__ import annotations

import random

import pytest

from local_engine.profile import MovingMean, PrefillFit

BASE, TOKEN, CONTEXT = 0.02, 0.002, 1e-6
CHUNK = 256


def seconds(tokens: int, context: int, pace: float = 1.0) -> float:
    return pace * (BASE + TOKEN * tokens + CONTEXT * tokens * (context + tokens / 2))


def warmed(noise: float = 0.0, seed: int = 0) -> tuple[PrefillFit, random.Random]:
    rng = random.Random(seed)
    fit = PrefillFit(CHUNK)
    for tokens, context in ((32, 0), (256, 0), (32, 1024), (256, 1024)):
        fit.observe(tokens, context, seconds(tokens, context) * (1 + rng.uniform(-noise, noise)))
    fit.finish_warm_up()
    return fit, rng


def worst_error(fit: PrefillFit, pace: float = 1.0) -> float:
    """Largest relative error over prompts of all lengths."""
    errors = []
    for tokens in (32, 256, 512, 2048, 4096):
        spans = [(256, at) for at in range(0, tokens, 256)] if tokens >= 256 else [(tokens, 0)]
        true = sum(seconds(u, c, pace) for u, c in spans)
        errors.append(abs(fit.curve.seconds(tokens) / true - 1))
    return max(errors)


def test_exact_measurements_give_the_exact_curve() -> None:
    fit, _ = warmed()
    curve = fit.curve
    assert curve.base_s == pytest.approx(BASE, rel=1e-3)
    assert curve.token_s == pytest.approx(TOKEN, rel=1e-3)
    assert curve.token_context_s == pytest.approx(CONTEXT, rel=1e-3)
    assert curve.chunk_tokens == CHUNK
    assert curve.known


def test_before_any_measurement_the_curve_is_unknown() -> None:
    assert not PrefillFit(CHUNK).curve.known


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_averaged_out(seed: int) -> None:
    fit, rng = warmed(0.1, seed)
    for _ in range(200):
        tokens, context = rng.choice((17, 100, 256, 256)), 256 * rng.randrange(12)
        fit.observe(tokens, context, seconds(tokens, context) * (1 + rng.uniform(-0.1, 0.1)))
    assert worst_error(fit) < 0.06


@pytest.mark.parametrize("seed", range(5))
def test_single_outliers_hardly_count(seed: int) -> None:
    fit, rng = warmed(0.02, seed)
    for index in range(200):
        context = 256 * rng.randrange(8)
        slow = 20.0 if index % 10 == 0 else 1.0
        fit.observe(256, context, seconds(256, context) * slow)
    assert worst_error(fit) < 0.12


@pytest.mark.parametrize("pace", [0.1, 0.4, 3.0, 10.0])
def test_a_change_of_pace_is_followed_within_forty_chunks(pace: float) -> None:
    fit, rng = warmed()
    for _ in range(40):
        context = 256 * rng.randrange(8)
        fit.observe(256, context, seconds(256, context, pace))
    assert worst_error(fit, pace) < 0.1


def test_chunks_of_one_size_keep_what_the_warm_up_knew_of_others() -> None:
    fit, _ = warmed()
    for _ in range(500):
        fit.observe(256, 0, seconds(256, 0))
    assert worst_error(fit) < 0.01


@pytest.mark.parametrize("seed", range(20))
def test_coefficients_are_never_negative(seed: int) -> None:
    rng = random.Random(seed)
    fit = PrefillFit(CHUNK)
    for _ in range(30):
        fit.observe(rng.randrange(1, 257), rng.randrange(4096), rng.uniform(1e-4, 1.0))
        curve = fit.curve
        assert min(curve.base_s, curve.token_s, curve.token_context_s) >= 0
        assert curve.seconds(256) > 0


def test_measurements_that_do_not_tell_go_to_tokens() -> None:
    fit = PrefillFit(CHUNK)
    fit.observe(256, 0, 0.5)
    fit.observe(256, 256, 0.5)
    assert fit.curve.known
    assert fit.curve.seconds(256) == pytest.approx(0.5, rel=0.01)


def test_a_curve_without_a_price_for_tokens_is_known_all_the_same() -> None:
    fit = PrefillFit(CHUNK)
    for tokens in (1, 16, 256):
        fit.observe(tokens, 0, 0.01)
    assert fit.curve.known
    assert fit.curve.seconds(256) == pytest.approx(0.01, rel=0.01)


def test_no_time_says_nothing() -> None:
    fit, _ = warmed()
    before = fit.curve
    fit.observe(256, 0, 0.0)
    assert fit.curve == before


def test_the_moving_mean_starts_with_the_first_and_follows() -> None:
    mean = MovingMean(0.1)
    assert mean.mean_s == 0.0
    mean.observe(2.0)
    assert mean.mean_s == 2.0
    for _ in range(60):
        mean.observe(1.0)
    assert mean.mean_s == pytest.approx(1.0, rel=0.01)
