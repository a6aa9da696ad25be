"""A mix is the workload, however many points stand for it."""

from __future__ import annotations

from statistics import fmean, pvariance

import numpy as np
import pytest

from policies.mix import mix_of_lengths, mix_of_requests
from policies.prefix_cache import CacheSpec
from policies.profiles import find_profile
from policies.workload.generate import Answers, Generator, Lengths
from policies.workload.request import Request
from prfaas.errors import ConfigError


def test_generated_lengths_and_drawn_requests_are_the_same_mix() -> None:
    exact = mix_of_lengths(Lengths(), 1024)
    drawn = mix_of_requests(Generator(requests=20_000).stream())
    assert len(drawn.uncached) == len(exact.uncached)
    for mix in (exact, drawn):
        assert mix.weight.sum() == pytest.approx(1.0)
        assert (np.diff(mix.uncached) >= 0).all()
    assert drawn.mean(drawn.uncached) == pytest.approx(exact.mean(exact.uncached), rel=0.02)
    profile = find_profile("paper-h20")
    exact_s, drawn_s = exact.mean(exact.prefill_s(profile)), drawn.mean(drawn.prefill_s(profile))
    assert drawn_s == pytest.approx(exact_s, rel=0.02)


def test_grouping_points_keeps_the_sums() -> None:
    rows = [Request(n, float(n), 100 + n, n % 7 + 1) for n in range(5000)]
    few, all_of_them = mix_of_requests(rows, points=50), mix_of_requests(rows, points=5000)
    assert len(few.uncached) == 50
    for column in ("uncached", "cached", "output"):
        many = all_of_them.mean(getattr(all_of_them, column))
        assert few.mean(getattr(few, column)) == pytest.approx(many)
    assert few.longest_prompt <= all_of_them.longest_prompt


def test_what_is_cached_depends_on_the_cache_and_one_token_is_always_computed() -> None:
    rows = [Request(n, float(n), 1024, 5, (0, 1)) for n in range(10)]
    unbounded, none = mix_of_requests(rows), mix_of_requests(rows, CacheSpec(0))
    assert none.mean(none.cached) == 0
    assert unbounded.mean(unbounded.cached) == pytest.approx(0.9 * 1023)
    assert unbounded.uncached.min() == 1
    logged = mix_of_requests([Request(0, 0.0, 1000, 5, cached_tokens=400)])
    assert logged.uncached[0] == 600


def test_no_requests_are_an_error() -> None:
    with pytest.raises(ConfigError, match="no requests"):
        mix_of_requests([])


def test_answers_that_differ_are_planned_with_all_their_lengths_beside_every_prompt() -> None:
    mix = mix_of_lengths(Lengths(), Answers())
    drawn = [r.output_tokens for r in Generator(requests=20000, output=Answers()).stream()]
    assert mix.mean_output == pytest.approx(fmean(drawn), rel=0.02)
    spread = mix.mean((mix.output - mix.mean_output) ** 2)
    assert spread == pytest.approx(pvariance(drawn), rel=0.08)
    assert abs(float(np.corrcoef(mix.uncached, mix.output)[0, 1])) < 0.02
    for part in (mix.output[:100], mix.output[-100:]):
        assert float(part.mean()) == pytest.approx(mix.mean_output, rel=0.05)
