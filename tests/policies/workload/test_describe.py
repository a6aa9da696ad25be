"""Descriptions count what is there."""

from __future__ import annotations

import pytest

from policies.prefix_cache import CacheSpec
from policies.workload.describe import describe, read_columns
from policies.workload.generate import Arrivals, Generator
from policies.workload.request import Request
from prfaas.errors import ConfigError


def test_lengths_reuse_and_rate_of_a_few_requests() -> None:
    rows = [Request(n, float(n), 1024 if n % 2 else 2048, 10, tuple(range(4))) for n in range(10)]
    found = describe(read_columns(rows, CacheSpec()))
    assert found.requests == 10
    assert found.rate_per_s == 1.0
    assert found.prompt.mean == 1536
    assert found.prompt.largest == 2048
    assert found.full_hit_share == 0.9
    assert found.reuse_share == pytest.approx(1 - (2048 + 9) / 15_360)
    assert found.uncached_above[2048] == 0.0
    assert found.interarrival_cv2 == 0.0


def test_a_full_hit_is_one_of_all_whole_blocks() -> None:
    again = [Request(n, float(n), 1300, 10, (0, 1, 10 + n)) for n in range(4)]
    short = [Request(n, float(n), 300, 10, (20,)) for n in range(4, 8)]
    told = [Request(n, float(n), 300, 10, cached_tokens=299) for n in range(8, 10)]
    found = describe(read_columns([*again, *short, *told], CacheSpec()))
    assert found.full_hit_share == 0.5


def test_a_smaller_cache_reuses_less() -> None:
    rows = list(Generator(kind="sessions", requests=600).stream())
    shares = [
        describe(read_columns(rows, CacheSpec(tokens))).reuse_share
        for tokens in (0, 50_000, 500_000, None)
    ]
    assert shares == sorted(shares)
    assert shares[0] == 0
    assert shares[-1] > 0.3


def test_poisson_looks_like_poisson_and_bursts_do_not() -> None:
    def found(kind: str) -> tuple[float, float]:
        arrivals = Arrivals(rate_per_s=5.0, kind=kind)  # type: ignore[arg-type]
        text = describe(
            read_columns(Generator(requests=20_000, arrivals=arrivals).stream(), CacheSpec())
        )
        return text.interarrival_cv2, text.bursts[1].dispersion

    cv2, dispersion = found("poisson")
    assert cv2 == pytest.approx(1.0, abs=0.1)
    assert dispersion == pytest.approx(1.0, abs=0.2)
    cv2, dispersion = found("bursty")
    assert cv2 > 1.3
    assert dispersion > 5


def test_one_request_can_be_described_and_none_cannot() -> None:
    text = describe(read_columns([Request(0, 5.0, 10, 1)], CacheSpec())).to_text()
    assert text.startswith("1 requests in 0 s")
    with pytest.raises(ConfigError, match="no requests"):
        read_columns([], CacheSpec())
