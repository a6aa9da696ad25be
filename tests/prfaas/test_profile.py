"""Profiles: two forms of a curve that mean the same, and errors that name the key and its unit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from prfaas.errors import ConfigError
from prfaas.profile import DecodeTimes, PrefillTimes, Profile, load_profile

GOOD: dict[str, Any] = {
    "name": "test",
    "source": "made up",
    "model": {"layers": 2, "kv_heads": 2, "head_dim": 4, "dtype": "float32", "max_context": 4096},
    "prefill": {"base_s": 0.1, "token_s": 0.01, "token_context_s": 1e-5, "chunk_tokens": 16},
    "decode": {"step_s": 0.02, "max_batch": 4},
}
POINTS = PrefillTimes(points_tokens_s=((100, 2.0), (200, 3.0), (400, 7.0)), chunk_tokens=1000)


def profile(**changes: Any) -> Profile:
    return Profile.model_validate({**GOOD, **changes})


def load(path: Path, data: object) -> Profile:
    path.write_text(yaml.safe_dump(data))
    return load_profile(path)


@pytest.mark.parametrize(
    ("uncached", "cached", "seconds"),
    [
        (100, 0, 2.0),
        (150, 0, 2.5),
        (400, 0, 7.0),
        (50, 0, 1.5),
        (0, 100, 0.0),
        (100, 100, 2.0),  # 1.0 of marginal cost and the base of 1.0
        (200, 200, 5.0),
        (500, 0, 9.0),  # goes on at the last slope
    ],
)
def test_points_are_joined_and_a_suffix_costs_what_it_costs_there(
    uncached: int, cached: int, seconds: float
) -> None:
    assert POINTS.seconds(uncached, cached) == pytest.approx(seconds)


def test_many_prompts_at_once_take_what_each_takes() -> None:
    uncached, cached = np.array([0.0, 1, 50, 150, 400, 900]), np.array([5.0, 0, 0, 120, 100, 0])
    for times in (POINTS, profile().prefill, POINTS.model_copy(update={"chunk_tokens": 64})):
        one_by_one = [times.seconds(u, c) for u, c in zip(uncached, cached, strict=True)]
        assert times.seconds_of(uncached, cached) == pytest.approx(one_by_one)


def test_a_suffix_over_a_long_prefix_costs_more_than_the_suffix_alone() -> None:
    assert POINTS.seconds(100, 250) > POINTS.seconds(100)
    assert profile().prefill_s(100, 900) > profile().prefill_s(100)


def test_the_base_is_paid_for_each_chunk_in_both_forms() -> None:
    chunked = PrefillTimes(points_tokens_s=((100, 2.0), (200, 3.0)), chunk_tokens=50)
    assert chunked.seconds(100) == pytest.approx(1.0 + 2 * 1.0)
    assert profile().prefill_s(32) - profile().prefill_s(16) > 0.1


def test_a_curve_fitted_to_points_of_a_quadratic_is_that_quadratic() -> None:
    points = tuple((x, 0.4 + 1e-4 * x + 3e-9 * x * x) for x in (1000, 8000, 32000, 128000))
    curve = PrefillTimes(points_tokens_s=points, chunk_tokens=131072).curve
    assert curve.base_s == pytest.approx(0.4)
    assert curve.token_s == pytest.approx(1e-4)
    assert curve.token_context_s == pytest.approx(6e-9)


def test_time_scale_reaches_every_time() -> None:
    slow = profile(time_scale=3.0)
    assert slow.prefill_s(100) == pytest.approx(3 * profile().prefill_s(100))
    assert slow.step_s(1, 10) == pytest.approx(3 * profile().step_s(1, 10))
    assert slow.curve.seconds(100) == pytest.approx(slow.prefill_s(100))


def test_steps_between_measured_batches_lie_on_a_line_and_need_not_rise() -> None:
    points = ((1, 0.05), (2, 0.1), (4, 0.08))
    steps = DecodeTimes(points_batch_s=points, context_token_s=1e-3, max_batch=8)
    found = [steps.seconds(batch, 10) - 0.01 for batch in (1, 2, 3, 4, 7)]
    assert found == pytest.approx([0.05, 0.1, 0.09, 0.08, 0.11])
    falling = DecodeTimes(points_batch_s=((1, 0.2), (4, 0.1)), max_batch=8)
    assert falling.seconds(8, 0) == pytest.approx(0.1)


def test_wire_bytes_pack_tokens_and_not_the_state() -> None:
    model = profile(model={**GOOD["model"], "state_bytes": 1000}).model
    assert model.raw_bytes(10) == 10 * model.token_bytes + 1000
    assert model.wire_bytes(10, 2.0) == 5 * model.token_bytes + 1000


def test_an_unknown_quality_class_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"no wire ratio for quality 'compact'.*has exact"):
        profile().wire_ratio("compact")


def test_lengths_beyond_what_was_measured_are_refused() -> None:
    profile().require_covers(4096)
    with pytest.raises(ConfigError, match="up to 4096 tokens, 4097 are asked for"):
        profile().require_covers(4097)
    assert profile(prefill=POINTS.model_dump(exclude_none=True)).covers_tokens == 400


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prefill": {**GOOD["prefill"], "base": 1.0}}, "prefill.base: the unit is missing; did"),
        ({"prefill": {"base_s": 1.0, "chunk_tokens": 1}}, "token_s missing"),
        ({"prefill": {**GOOD["prefill"], "points_tokens_s": [[1, 1.0], [2, 2.0]]}}, "not both"),
        ({"prefill": {"points_tokens_s": [[2, 1.0], [1, 2.0]], "chunk_tokens": 1}}, "must rise"),
        ({"prefill": {"points_tokens_s": [[9, 1.0], [10, 9.0]], "chunk_tokens": 1}}, "negative"),
        ({"decode": {**GOOD["decode"], "speed": 1}}, "decode.speed: unknown key; there are step_s"),
        ({"decode": {"max_batch": 4}}, "step_s missing"),
        ({"decode": {**GOOD["decode"], "points_batch_s": [[1, 1.0], [2, 1.0]]}}, "not both"),
        ({"decode": {"points_batch_s": [[2, 1.0], [4, 1.0]], "max_batch": 4}}, "begin at 1 and"),
        ({"decode": {"points_batch_s": [[1, 1.0], [1, 2.0]], "max_batch": 4}}, "must rise"),
        ({"decode": {"points_batch_s": [[1, 1.0], [2, 0.0]], "max_batch": 4}}, "takes some time"),
        ({"label": "sure"}, "label:"),
        ({"model": {**GOOD["model"], "wire_ratios": {"exact": 0.5}}}, "wire_ratios.exact:"),
    ],
)
def test_an_error_names_the_file_the_key_and_the_unit(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = tmp_path / "p.yaml"
    with pytest.raises(ConfigError) as caught:
        load(path, {**GOOD, **changes})
    assert str(path) in caught.value.message
    assert message in caught.value.message


def test_a_tokenizer_is_found_beside_the_file(tmp_path: Path) -> None:
    loaded = load(tmp_path / "p.yaml", {**GOOD, "tokenizer": "bytes"})
    assert loaded.tokenizer == tmp_path / "bytes"
    assert load(tmp_path / "q.yaml", GOOD).tokenizer is None
