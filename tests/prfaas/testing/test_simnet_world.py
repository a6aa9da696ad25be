"""Whole transfers in the simulated network: what must hold, under many seeds."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from prfaas.codecs import default_codecs
from prfaas.send_session import SendSession
from prfaas.testing.kv_contracts import Carried, KvStreamContract, Question, summary
from prfaas.testing.simnet import Weather
from prfaas.testing.simnet_decode import DecodeOptions
from prfaas.testing.simnet_fetch import FetchOptions
from prfaas.testing.simnet_prefill import PrefillOptions
from prfaas.testing.simnet_world import (
    CHUNK_TOKENS,
    LAYOUT,
    Scenario,
    Transfer,
    World,
    outcomes_of,
    random_scenario,
)

ROOT = Path(__file__).parents[3]
FAST_SEEDS = 200
SLOW_SEEDS = 2000
ONE = Scenario((Transfer(0.0, 24),))


def ran(seed: int, scenario: Scenario) -> World:
    world = World(seed, scenario)
    world.run()
    return world


def digest_of_logs(seeds: range) -> str:
    logs = b"".join(ran(seed, random_scenario(seed)).log for seed in seeds)
    return hashlib.sha256(logs).hexdigest()


# --- seeds ---


def test_the_same_seed_gives_the_same_log_to_the_byte() -> None:
    for seed in range(20):
        log = ran(seed, random_scenario(seed)).log
        assert log == ran(seed, random_scenario(seed)).log
        assert len(log) > 100
    assert ran(1, ONE).log != ran(2, ONE).log


def test_the_same_seed_gives_the_same_log_in_another_process() -> None:
    code = "from test_simnet_world import *; print(digest_of_logs(range(10)))"
    found = set()
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=Path(__file__).parent,
            env=os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        found.add(done.stdout.strip())
    assert found == {digest_of_logs(range(10))}


def run_seeds(seeds: range) -> Counter[str]:
    """Every promise that `World` checks, and how transfers ended."""
    outcomes: Counter[str] = Counter()
    for seed in seeds:
        try:
            world = ran(seed, random_scenario(seed))
        except AssertionError as exc:
            raise AssertionError(f"seed {seed} (random_scenario): {exc}") from exc
        outcomes += outcomes_of(world)
        outcomes["lost"] += world.lost
    return outcomes


def run_calm_seeds(seeds: range) -> None:
    """Cuts, losses, flips and duplicates alone end no transfer."""
    for seed in seeds:
        scenario = random_scenario(seed, calm=True)
        try:
            world = ran(seed, scenario)
        except AssertionError as exc:
            raise AssertionError(f"seed {seed} (calm): {exc}") from exc
        assert outcomes_of(world) == {"staged": len(scenario.transfers)}, (seed, world.outcomes)


def test_promises_hold_under_many_seeds() -> None:
    outcomes = run_seeds(range(FAST_SEEDS))
    assert set(outcomes) == {"staged", "partial", "local", "aborted", "lost"}
    assert outcomes["staged"] > FAST_SEEDS


def test_what_ends_no_transfer_lets_it_complete_under_many_seeds() -> None:
    run_calm_seeds(range(FAST_SEEDS))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_promises_hold_under_very_many_seeds() -> None:
    run_seeds(range(FAST_SEEDS, SLOW_SEEDS))
    run_calm_seeds(range(FAST_SEEDS, SLOW_SEEDS))


# --- the promises can be broken ---


@pytest.mark.parametrize(
    ("method", "scenario"),
    [
        ("_send_again", replace(ONE, weather=Weather(cut=0.1))),
        ("lane_lost", replace(ONE, weather=Weather(corrupt=0.3))),
    ],
)
def test_a_sender_that_forgets_is_found_out(
    method: str, scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SendSession, method, lambda self, number: None)
    if method == "lane_lost":
        monkeypatch.setattr(SendSession, "_send_again", lambda self, number: None)
    outcomes: Counter[str] = Counter()
    for seed in range(10):
        outcomes += outcomes_of(ran(seed, scenario))
    assert outcomes["partial"] + outcomes["local"] > 0  # the progress deadline, not a hang


def test_a_sender_that_ignores_its_credit_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SendSession, "_fits", lambda self, sequence, more: True)
    scenario = replace(ONE, decode=DecodeOptions(window_bytes=0))
    with pytest.raises(AssertionError):
        ran(1, scenario)


def test_wrong_bytes_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = type(default_codecs().by_id(1))
    decode_into = codec.decode_into

    def wrong(self, payload, out, item_bytes):  # type: ignore[no-untyped-def]
        decode_into(self, payload, out, item_bytes)
        out[-1] ^= 1

    monkeypatch.setattr(codec, "decode_into", wrong)
    world = ran(1, ONE)
    assert world.outcomes == {"t0": "local corrupt_kv"}  # and nothing of it is kept


# --- one thing at a time ---


@pytest.mark.parametrize("on_demand", [False, True])
@pytest.mark.parametrize("fault", ["cut lane", "cut control", "cut all"])
def test_a_cut_costs_at_most_what_was_under_way(fault: str, on_demand: bool) -> None:
    slow = Scenario(
        (Transfer(0.0, 80, on_demand),),
        Weather(bytes_per_s=20e3),
        ((1.0, fault),),
        prefill=PrefillOptions(tensor_s=0.001),
        decode=DecodeOptions(window_bytes=4096),
    )
    for seed in range(5):
        world = ran(seed, slow)
        assert world.outcomes == {"t0": "staged"}
        assert world.net.cuts > 0
        assert world.resent_bytes <= (0 if fault == "cut control" else 4096)


def test_after_a_restart_of_p_whole_chunks_are_not_sent_again() -> None:
    restart = Scenario(
        (Transfer(0.0, 80),), Weather(bytes_per_s=20e3), ((0.35, "restart P"),),
        prefill=PrefillOptions(tensor_s=0.001),
    )  # fmt: skip
    world = World(1, restart)
    starts: list[int] = []
    source = world._source

    def noted(request):  # type: ignore[no-untyped-def]
        starts.append(request.send_from)
        return source(request)

    world.p._open_source = noted
    world.run()
    assert world.outcomes == {"t0": "staged"}
    assert len(starts) == 2
    assert starts[0] == 0 < starts[1]


def test_when_nothing_arrives_any_more_the_progress_deadline_ends_it_and_the_lease() -> None:
    silence = Scenario(
        (Transfer(0.0, 80), Transfer(0.0, 80, on_demand=True)),
        Weather(bytes_per_s=20e3),
        ((0.6, "silence"),),
        prefill=PrefillOptions(tensor_s=0.001),
        decode=DecodeOptions(window_bytes=4096),
    )
    world = ran(3, silence)
    assert len(world.outcomes) == 2
    assert all(outcome.endswith(" progress") for outcome in world.outcomes.values())
    assert world.sim.now_s < 0.6 + FetchOptions().progress_s + PrefillOptions().lease_s


def test_who_waits_to_ask_is_not_late() -> None:
    pause = FetchOptions(think_s=8.0, progress_s=1.0, first_frame_s=1.0, lease_s=3.0)
    scenario = Scenario((Transfer(0.0, 24, on_demand=True),), decode=DecodeOptions(fetch=pause))
    world = ran(0, scenario)
    assert world.outcomes == {"t0": "staged"}
    assert world.sim.now_s > 10


def test_after_a_restart_of_d_p_frees_everything_within_the_lease() -> None:
    scenario = Scenario((Transfer(0.0, 80),), Weather(bytes_per_s=20e3), ((0.5, "restart D"),))
    world = ran(0, scenario)
    assert (world.lost, world.outcomes) == (1, {})
    assert world.sim.now_s <= 0.5 + PrefillOptions().lease_s + 1.0


def test_more_fetches_than_staging_or_retention_wait_and_complete() -> None:
    size = LAYOUT.session_bytes(0, 40)
    for decode, prefill in ((size, 10 * size), (10 * size, size)):
        scenario = Scenario(
            tuple(Transfer(0.0, 40, number % 2 == 0) for number in range(6)),
            prefill=PrefillOptions(retention_bytes=prefill),
            decode=DecodeOptions(staging_bytes=decode),
        )
        assert outcomes_of(ran(1, scenario)) == {"staged": 6}


class TestOverSimnet(KvStreamContract):
    tensors = frozenset((e.span.index, e.layer) for e in LAYOUT.extents(0, 24, CHUNK_TOKENS))
    weather = Weather(jitter_s=0.05, loss=0.1, duplicate=0.1, corrupt=0.02, cut=0.02)

    async def carry(self, questions: list[Question] | None) -> Carried:
        fetch = FetchOptions(questions=tuple(questions or ()))
        scenario = Scenario(
            (Transfer(0.0, 24, questions is not None),),
            self.weather,
            decode=DecodeOptions(fetch=fetch),
        )
        world = World(11, scenario)
        world.run()
        done = world.complete[0x1000]
        (sent,) = world.p.ended
        assert done.machine is not None
        expected = [
            done.kv.tensor(extent).tobytes() for extent in LAYOUT.extents(0, 24, CHUNK_TOKENS)
        ]
        return Carried(
            done.buffer[: LAYOUT.extent_bytes(0, 24, CHUNK_TOKENS)].tobytes(),
            b"".join(expected),
            summary(sent.ledger),
            summary(done.machine.ledger),
            tuple(done.came),
        )
