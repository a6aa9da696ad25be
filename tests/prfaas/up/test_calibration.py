"""Calibration finds the curves, steps and link that a fleet has, and says what it could not see."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from policies.scenario import load_scenario
from prfaas.errors import ConfigError, PrfaasError
from prfaas.profile import DecodeTimes
from prfaas.up.calibration import (
    BATCHES,
    Carried,
    Plan,
    Samples,
    fitted,
    link,
    measure,
    profiles,
    scenario,
)
from prfaas.up.client import StreamedAnswer

CHUNK, TOKEN_BYTES = 256, 2048
STEP_S, SEQUENCE_S = 0.02, 0.001
GOODPUT, METERED, RTT_S, BEYOND_S = 3e6, 4.5e6, 0.02, 0.03
RATIO = 1.6
PLAN = Plan("m", lengths=(100, 1000, 3000), rounds=2)


class Fleet:
    """Gateway and engine at once, in virtual time: the parts of what it answers are known."""

    def __init__(self, *, offloads: bool = True, usage: bool = True) -> None:
        self._offloads, self._usage = offloads, usage
        self._records: dict[str, dict[str, Any]] = {}
        self.engine = Engine(self)

    @staticmethod
    def prefill_s(tokens: int, token_s: float) -> float:
        return 0.01 * math.ceil(tokens / CHUNK) + token_s * tokens + 1e-8 * tokens**2 / 2

    async def complete(
        self, prompt: str | Sequence[int], *, max_tokens: int, **_: Any
    ) -> StreamedAnswer:
        tokens = len(prompt)
        if not self._offloads:
            return self._answer(tokens, 1.0, {"target": "local", "outcome": None})
        wire = int(TOKEN_BYTES / RATIO * tokens)
        compute_s = self.prefill_s(tokens, 2e-4)
        link = {"goodput_bytes_per_s": METERED, "rtt_s": RTT_S}
        record = {
            "target": "remote",
            "snapshot": {
                "token_bytes": TOKEN_BYTES, "state_bytes": 0,
                "remotes": [{"peer": "far", "link": link}],
            },
            "outcome": {
                "status": "staged", "peer": "far", "want_tokens": tokens,
                "remote_cached_tokens": 0, "raw_bytes": TOKEN_BYTES * tokens,
                "wire_bytes": wire, "phases": {"remote_compute": compute_s},
            },
        }  # fmt: skip
        ttft_s = max(compute_s, wire / GOODPUT) + BEYOND_S + STEP_S + SEQUENCE_S
        return self._answer(tokens, ttft_s, {**record, "decision": None})

    async def get(self, path: str) -> dict[str, Any]:
        if path == "/prfaas/cluster":
            curve = {"chunk_tokens": CHUNK}
            remotes = [{"peer": "far", "curve": curve} for _ in range(3)]
            return {"local": {"curve": curve}, "engines": [{}, {}], "remotes": remotes}
        return self._records[path.rsplit("/", 1)[1]]

    def _answer(self, tokens: int, ttft_s: float, record: dict[str, Any]) -> StreamedAnswer:
        name = f"r{len(self._records)}"
        self._records[name] = record
        return self.answered(name, tokens, ttft_s, 1, 1)

    def answered(
        self, name: str, tokens: int, ttft_s: float, count: int, batch: int
    ) -> StreamedAnswer:
        answer = StreamedAnswer(name, 0.0, first_event_at=ttft_s)
        step_s = STEP_S + SEQUENCE_S * batch
        answer.token_at = [ttft_s + step_s * at for at in range(count)]
        answer.usage = {"prompt_tokens": tokens} if self._usage else {}
        return answer


class Engine:
    """D itself. Answers that overlap are one batch."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.batch = iter(batch for batch in BATCHES for _ in range(batch))

    async def complete(
        self, prompt: str | Sequence[int], *, max_tokens: int, **_: Any
    ) -> StreamedAnswer:
        tokens = len(prompt)
        batch = next(self.batch) if max_tokens > 1 else 1
        ttft_s = Fleet.prefill_s(tokens, 6e-4) + STEP_S + SEQUENCE_S
        return self._fleet.answered("", tokens, ttft_s, max_tokens, batch)

    async def get(self, path: str) -> dict[str, Any]:
        raise AssertionError(path)


async def measured(fleet: Fleet, plan: Plan = PLAN) -> Samples:
    return await measure(fleet, fleet.engine, plan)


async def test_the_curves_and_the_link_of_the_fleet_are_found(tmp_path: Path) -> None:
    samples = await measured(Fleet())
    for name, data in profiles(samples, 16, "a test").items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(data))
    file = tmp_path / "scenario.yaml"
    file.write_text(yaml.safe_dump(scenario(samples, "m", 0.25)))
    site, found = load_scenario(str(file))
    assert (site.local.instances, site.peers[0].instances) == (2, 3)
    for tokens in (100, 700, 3000):
        assert found.prefill.prefill_s(tokens) == pytest.approx(Fleet.prefill_s(tokens, 6e-4))
        assert found.peers["far"].prefill_s(tokens) == pytest.approx(Fleet.prefill_s(tokens, 2e-4))
    assert found.decode.step_s(4, 0) == pytest.approx(STEP_S + 4 * SEQUENCE_S)
    assert found.prefill.model.token_bytes == TOKEN_BYTES
    assert found.prefill.wire_ratio("exact") == pytest.approx(RATIO, rel=1e-3)
    # What KV really took, whatever the gateway's meter says.
    found_link = site.peers[0].link
    assert found_link.bytes_per_s == pytest.approx(GOODPUT, rel=0.02)
    # Policies are told the round trip; what a transfer takes beyond it they do not know.
    assert found_link.rtt_ms == pytest.approx(1e3 * RTT_S)
    assert found_link.opening_ms == pytest.approx(1e3 * (BEYOND_S - RTT_S), rel=0.3)
    assert (site.telemetry.interval_s, site.telemetry.settle_s) == (0.25, 0.25)


async def test_steps_that_leap_are_points_and_not_a_line() -> None:
    samples = await measured(Fleet())
    leaps = {1: 0.05, 2: 0.1, 3: 0.12, 4: 0.08, 8: 0.09}
    samples.steps = [(batch, late * s) for batch, s in leaps.items() for late in (0.9, 1, 3)]
    decode = DecodeTimes(**profiles(samples, 16, "a test")["far"]["decode"])
    assert [decode.seconds(batch, 0) for batch in leaps] == pytest.approx([*leaps.values()])
    assert decode.seconds(6, 0) == pytest.approx(0.085)


def test_what_a_link_explains_of_noise_is_not_believed() -> None:
    """P computes more slowly than the link carries, and answers are late by chance."""
    rest_s = (0.046, 0.042, 0.083, 0.048, 0.044, 0.063)
    carried = [
        Carried(n, 10 * n, 10 * n, 1, 0, METERED, RTT_S, 3e-3 * n, 3e-3 * n + rest)
        for n, rest in zip((187, 521, 1485, 174, 520, 1449), rest_s, strict=True)
    ]
    assert link(carried, CHUNK, 30)[0] == METERED


def test_of_a_link_that_is_never_waited_for_the_meter_is_believed() -> None:
    carried = [Carried(n, n, n, 1, 0, METERED, RTT_S, n / 1e3, n / 1e3 + 0.03) for n in (100, 900)]
    assert link(carried, CHUNK, 10**6) == (METERED, pytest.approx(0.03))


def test_the_last_layer_of_a_chunk_leaves_when_it_is_computed() -> None:
    """Of prompts that the link is faster than, by what that layer takes."""
    layers, compute_s = 4, 1e-3
    carried = []
    for tokens in (100, 200, 400, 900, 3000):
        tail_s = min(tokens, CHUNK) / layers / GOODPUT
        took_s = max(compute_s * tokens + tail_s, tokens / GOODPUT) + BEYOND_S
        carried.append(
            Carried(tokens, tokens, tokens, 1, 0, GOODPUT, RTT_S, compute_s * tokens, took_s)
        )
    goodput, beyond_s = link(carried, CHUNK, layers)
    assert (goodput, beyond_s) == (GOODPUT, pytest.approx(BEYOND_S))


def test_one_late_measurement_bends_no_curve() -> None:
    tokens = np.array([150.0, 700.0, 1900.0, 4096.0] * 3)
    columns = np.stack([np.ceil(tokens / CHUNK), tokens, tokens**2 / 2], axis=1)
    seconds = columns @ np.array([0.01, 4e-4, 2e-8])
    seconds[0] *= 2  # the first of all, while something warmed up
    assert fitted(columns, seconds, required=1) == pytest.approx((0.01, 4e-4, 2e-8), rel=1e-3)


async def test_a_gateway_that_keeps_everything_is_told_of() -> None:
    samples = await measured(Fleet(offloads=False))
    with pytest.raises(ConfigError, match="always_remote"):
        profiles(samples, 16, "a test")


async def test_a_server_that_does_not_count_tokens_is_told_of() -> None:
    with pytest.raises(PrfaasError, match="how many tokens"):
        await measured(Fleet(usage=False))


@pytest.mark.parametrize("plan", [Plan("m", (100,)), Plan("m", (100, 200), rounds=1)])
async def test_a_plan_that_gives_no_curve_is_refused(plan: Plan) -> None:
    with pytest.raises(ConfigError, match="at least"):
        await measured(Fleet(), plan)


def test_no_coefficient_is_negative() -> None:
    tokens = np.array([100.0, 200.0, 400.0])
    columns = np.stack([np.ones(3), tokens], axis=1)
    base_s, token_s = fitted(columns, 0.01 * tokens - 0.5, required=1)
    assert base_s == 0.0
    assert token_s > 0


def test_times_that_do_not_grow_are_no_curve() -> None:
    with pytest.raises(ConfigError, match="idle"):
        fitted(np.array([[1.0, 10.0], [1.0, 20.0]]), np.array([2.0, 1.0]) * -1, required=1)
