"""A transfer that became slower than computing the rest is given up, and what has come kept."""

from __future__ import annotations

from typing import Any

import pytest

import remote_prefill.fetch
import remote_prefill.worth_waiting as worth_waiting
from prfaas.testing.scripted_port import PrefillScript
from prfaas.testing.waiting import eventually
from remote_prefill.worth_waiting import LOOK_S, PATIENCE_S, WINDOW_S, WorthWaiting

MB = 1_000_000


def given_up_at(rates: list[float], total: int, recompute_s: float | None) -> float | None:
    """Seconds after the first bytes, at so many bytes a second in each second; None: it ends."""
    worth, came, now = WorthWaiting(2.0), 1, 0.0
    for rate in rates:
        for _ in range(round(1 / LOOK_S)):
            now += LOOK_S
            came = min(total, came + int(rate * LOOK_S))
            if came == total:
                return None
            if not worth.look(now, came, total - came, recompute_s):
                return now
    return None


def test_one_that_keeps_pace_is_waited_for_however_long_it_takes() -> None:
    assert given_up_at([10 * MB] * 100, 900 * MB, 60.0) is None


def test_one_that_is_slower_from_the_start_is_given_up_soon() -> None:
    at = given_up_at([MB] * 60, 100 * MB, 10.0)
    assert at is not None
    assert at <= WINDOW_S + PATIENCE_S + 2 * LOOK_S


def test_one_that_becomes_slower_midway_is_given_up_then() -> None:
    at = given_up_at([50 * MB] * 5 + [MB] * 60, 1000 * MB, 20.0)
    assert at is not None
    assert 5.0 < at <= 5.0 + WINDOW_S + PATIENCE_S + 2 * LOOK_S


def test_a_dip_is_waited_for() -> None:
    assert given_up_at([50 * MB] * 5 + [20 * MB] + [50 * MB] * 60, 1000 * MB, 10.0) is None


def test_the_end_of_a_transfer_is_always_waited_for() -> None:
    """However fast D is, what is left comes within the margin."""
    assert given_up_at([100 * MB, 90 * MB] + [50 * MB] * 3, 240 * MB, 0.0) is None


@pytest.mark.parametrize("recompute_s", [None, 0.1])
def test_what_stands_still_or_cannot_be_compared_is_not_judged(recompute_s: float | None) -> None:
    if recompute_s is None:
        assert given_up_at([1.0] * 60, MB, recompute_s) is None
    else:
        assert given_up_at([10 * MB] + [0.0] * 60, 20 * MB, recompute_s) is None


@pytest.mark.parametrize(("on_failure", "slower_by"), [("local", 2), ("local", 0), ("reject", 2)])
async def test_d_gets_what_has_come_and_computes_the_rest(
    prefill_site: Any,
    decode_site: Any,
    tokens: Any,
    monkeypatch: Any,
    on_failure: str,
    slower_by: float,
) -> None:
    monkeypatch.setattr(remote_prefill.fetch, "LOOK_S", 0.02)
    for name in ("WINDOW_S", "MARGIN_S", "PATIENCE_S"):
        monkeypatch.setattr(worth_waiting, name, 0.1)
    script = PrefillScript()
    p = await prefill_site(engine={"script": script})
    d = await decode_site({"fra/p0": p, "fra/p1": p}, staging_bytes=1 << 18, slower_by=slower_by)
    await d.ready("fra/p0", "fra/p1")
    d.engine.stats(prefill_token_s=1e-6)
    await eventually(lambda: d.agent._mirror.prefill_s(10, 0) is not None)
    script.layer_s = 0.05
    prompt = tokens(62)
    params = d.params("fra/p0", "fra/p1", on_failure=on_failure)
    done = await d.engine.fetch(params, prompt, 0)
    if on_failure == "reject" or not slower_by:  # who may not compute has to wait
        assert done.status == "staged"
    else:
        assert (done.status, done.reason) == ("partial", "prefill_timeout_slower")
        assert 0 < done.token_end < 61
    assert d.engine.staged_is_right(done, prompt, 0)
    d.engine.release(done)
    outcome = await d.outcome(params)
    assert outcome.tried == ("fra/p0",), "another instance is not asked"
    await d.clean(p)
