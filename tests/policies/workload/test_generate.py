"""Generated workloads have the distributions they name, and the same seed gives the same rows."""

from __future__ import annotations

from hashlib import sha256
from itertools import pairwise
from statistics import fmean, median, variance
from typing import Any

import pytest
from pydantic import ValidationError

from policies.workload.generate import Answers, Arrivals, Generator, Lengths, Sessions
from policies.workload.request import BLOCK_TOKENS


def test_the_papers_lengths_have_the_papers_mean_and_share_above_the_threshold() -> None:
    tokens = [r.prompt_tokens for r in Generator(requests=20000).stream()]
    assert fmean(tokens) == pytest.approx(27_500, rel=0.03)
    assert sum(t > 19_400 for t in tokens) / len(tokens) == pytest.approx(0.496, abs=0.01)
    assert min(tokens) >= 128
    assert max(tokens) <= 131_072


def test_quantiles_invert_the_truncated_distribution() -> None:
    lengths = Lengths()
    assert lengths.quantile(0.0) == pytest.approx(128, rel=1e-3)
    assert lengths.quantile(1.0) == pytest.approx(131_072, rel=1e-3)
    assert lengths.quantile(0.5) < lengths.quantile(0.9)


@pytest.mark.parametrize("kind", ["poisson", "bursty"])
def test_arrivals_have_the_rate_they_name(kind: str) -> None:
    arrivals = Arrivals(rate_per_s=5.0, kind=kind)  # type: ignore[arg-type]
    spec = Generator(requests=40000, arrivals=arrivals)
    last = list(spec.stream())[-1]
    assert 40000 / last.arrival_s == pytest.approx(5.0, rel=0.1)


def test_poisson_arrivals_vary_as_poisson_and_bursts_more() -> None:
    def dispersion(kind: str) -> float:
        spec = Generator(requests=20000, arrivals=Arrivals(rate_per_s=5.0, kind=kind))  # type: ignore[arg-type]
        counts: dict[int, int] = {}
        for r in spec.stream():
            counts[int(r.arrival_s // 10)] = counts.get(int(r.arrival_s // 10), 0) + 1
        values = [counts.get(i, 0) for i in range(max(counts))]
        return variance(values) / fmean(values)

    assert dispersion("poisson") == pytest.approx(1.0, abs=0.15)
    assert dispersion("bursty") > 5


def test_one_seed_gives_one_workload_and_another_another() -> None:
    for kind in ("lengths", "sessions"):
        one = list(Generator(kind=kind, requests=500).stream())
        assert one == list(Generator(kind=kind, requests=500).stream())
        assert one != list(Generator(kind=kind, requests=500, seed=1).stream())
        assert len(one) == 500


def test_sessions_grow_by_their_own_prefix() -> None:
    spec = Generator(kind="sessions", requests=3000, sessions=Sessions(turns=5.0))
    rows = list(spec.stream())
    assert all(a.arrival_s <= b.arrival_s for a, b in pairwise(rows))
    seen: dict[int, int] = {}
    grown = 0
    for row in rows:
        assert len(row.blocks) == -(-row.prompt_tokens // BLOCK_TOKENS)
        assert row.blocks[:4] == (-4, -3, -2, -1)  # the system prompt of 2048 tokens
        own = [b for b in row.blocks if b >= 0]
        reused = [b for b in own if b in seen]
        assert own[: len(reused)] == reused  # what is reused is a prefix
        grown += bool(reused)
        # A part-filled last block has an id of its own that nobody can continue.
        for block in row.blocks[: row.prompt_tokens // BLOCK_TOKENS]:
            seen[block] = row.number
    assert 0.4 < grown / len(rows) < 0.8


@pytest.mark.parametrize(
    ("kind", "digest"),
    [
        ("lengths", "38e0195b0b6353e7"),
        ("sessions", "4a6e291204e0842a"),
    ],
)
def test_what_is_generated_by_default_stays_as_it_is(kind: Any, digest: str) -> None:
    """Results that are published were simulated with these rows."""
    text = "\n".join(map(repr, Generator(kind=kind, requests=300).stream()))
    assert sha256(text.encode()).hexdigest()[:16] == digest


def test_answers_have_the_lengths_that_are_asked_for_and_change_nothing_else() -> None:
    same = list(Generator(requests=20000).stream())
    rows = list(Generator(requests=20000, output=Answers()).stream())
    assert [(r.arrival_s, r.prompt_tokens) for r in rows] == [
        (r.arrival_s, r.prompt_tokens) for r in same
    ]
    answers = [r.output_tokens for r in rows]
    assert fmean(answers) == pytest.approx(345, rel=0.02)
    assert median(answers) == pytest.approx(270, rel=0.02)
    narrow = Answers(mu=4.0, sigma=2.0, low_tokens=20, high_tokens=40)
    found = {r.output_tokens for r in Generator(requests=500, output=narrow).stream()}
    assert min(found) == 20
    assert max(found) == 40


def test_the_next_turn_of_a_session_has_the_answer_before_in_its_prompt() -> None:
    added = Lengths(mu=3.0, sigma=0.1, low_tokens=20, high_tokens=20)
    talk = Sessions(turns=50.0, system_tokens=0, turn_tokens=added)
    rows = list(
        Generator(
            kind="sessions", requests=40, sessions=talk, output=Answers(),
            arrivals=Arrivals(rate_per_s=1e-9),
        ).stream()
    )  # fmt: skip
    assert len({r.output_tokens for r in rows}) > 20
    assert all(
        b.prompt_tokens == a.prompt_tokens + a.output_tokens + 20
        for a, b in pairwise(rows)
        if b.prompt_tokens > 20  # 20 tokens are the first turn of another session
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"output": Answers(), "output_tokens": 3}, "give one of them, not both"),
        ({"output": {"low_tokens": 9, "high_tokens": 8}}, "high_tokens must be at least"),
        ({"output": {"mu": 40.0}}, "lies between 1 and 8192 tokens"),
        ({"prompt": {"mu": float("nan")}}, "prompt.mu"),
        ({"prompt": {"sigma": float("inf")}}, "prompt.sigma"),
        ({"arrivals": {"rate_per_s": float("nan")}}, "arrivals.rate_per_s"),
        ({"arrivals": {"rate_per_s": -1.0}}, "arrivals.rate_per_s"),
    ],
)
def test_lengths_and_rates_that_make_no_sense_are_refused(
    changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValidationError) as refused:
        Generator.model_validate(changes)
    places = [".".join(map(str, e["loc"])) + " " + e["msg"] for e in refused.value.errors()]
    assert any(said in place for place in places), places
