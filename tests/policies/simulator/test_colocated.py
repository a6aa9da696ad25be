"""A simulated node that prefills and decodes keeps the turns of the engine that it stands for."""

from __future__ import annotations

import random
from typing import Any

import pytest

from local_engine.kv.pool import KvPool
from local_engine.paced import PacedRunner
from local_engine.paced_profile import PacedProfile
from local_engine.testing import CHAIN_VOCAB, CoreHarness
from policies.registry import make_policy
from policies.scenario import Profiles, Scenario
from policies.simulator.run import simulate
from policies.workload.request import Request
from prfaas.layout import GroupKind, KvLayout, LayerGroup
from prfaas.profile import Profile
from prfaas.settings import PolicySettings
from prfaas.testing.clock import ManualClock
from prfaas.testing.fake_port import FakePort
from prfaas_connect.port.messages import Fetch, FetchDone

MODEL = {"layers": 1, "kv_heads": 1, "head_dim": 2, "dtype": "float32", "max_context": 4096}
NEAR: dict[str, Any] = {
    "name": "near",
    "source": "made up",
    "model": MODEL,
    "prefill": {"base_s": 0.01, "token_s": 4e-4, "token_context_s": 2e-8, "chunk_tokens": 64},
    "decode": {"step_s": 0.02, "sequence_s": 0.003, "max_batch": 64},
}
FAR = {**NEAR, "name": "far", "prefill": {"base_s": 0.0, "token_s": 1e-4, "chunk_tokens": 64}}
RTT_S, OPENING_S = 0.02, 0.03
THRESHOLD = 300


def requests(rate_per_s: float) -> list[Request]:
    """Of all lengths; those above the threshold are prefilled elsewhere."""
    draws, at = random.Random(3), 0.0
    rows = []
    for number in range(120):
        at += draws.expovariate(rate_per_s)
        rows.append(Request(number, at, draws.randint(20, 600), draws.randint(1, 30)))
    return rows


class Held:
    """The clock of a harness, which the runner has to have before there is one."""

    clock: ManualClock

    def now(self) -> float:
        return self.clock.now()

    def wall(self) -> float:
        return self.clock.wall()


class Engine:
    """D in virtual time, and a peer that computes one prompt after the other."""

    def __init__(self) -> None:
        held = Held()

        def runner(pool: KvPool) -> PacedRunner:
            profile = PacedProfile.model_validate({**NEAR, "tokenizer": "none"})
            return PacedRunner(
                profile, pool, range(9), clock=held, sleep=lambda s: held.clock.advance(s)
            )

        self.port = FakePort()
        self._d = CoreHarness(
            blocks=1024,
            block_tokens=16,
            port=self.port,
            layout=KvLayout((LayerGroup(GroupKind.FULL, (0,), 1, 2, "float32"),)),
            make_runner=runner,
            chunk_tokens=64,
            max_batch=64,
            prefix_cache=False,
        )
        held.clock = self._d.clock
        self._far = Profile.model_validate(FAR)
        self._free_at = 0.0
        self._arrivals: list[tuple[float, FetchDone]] = []

    def ttft_s(self, rows: list[Request]) -> list[float]:
        """Of each request, from its arrival to the end of the step that made its first token."""
        start, coming = self._d.clock.now(), list(rows)
        found: dict[int, float] = {}
        while len(found) < len(rows):
            now = self._d.clock.now() - start
            due = now + 1e-9  # of rounding
            while coming and coming[0].arrival_s <= due:
                self._submit(coming.pop(0))
            for at, done in [each for each in self._arrivals if each[0] <= due]:
                self._arrivals.remove((at, done))
                self._d.core.handle(done, b"")
            for fetch, _ in self.port.take(Fetch):
                self._arrivals.append((self._arrives_at(fetch, now), self._done(fetch)))
            if not self._d.core.step():
                next_at = min([at for at, _ in self._arrivals] + [r.arrival_s for r in coming[:1]])
                self._d.clock.advance(next_at - now)
            self._d.core.touched.clear()
            for row in rows:
                stream = self._d.streams.get(f"r{row.number}")
                if stream is None:
                    break
                stream.read_all()
                if row.number not in found and stream.events:
                    found[row.number] = self._d.clock.now() - start - row.arrival_s
        return [found[row.number] for row in rows]

    def _submit(self, row: Request) -> None:
        words = random.Random(row.number)
        prompt = [words.randrange(CHAIN_VOCAB) for _ in range(row.prompt_tokens)]
        away = row.prompt_tokens > THRESHOLD
        self._d.submit(
            f"r{row.number}", prompt, row.output_tokens, params={"v": 1} if away else None
        )

    def _arrives_at(self, fetch: Fetch, now: float) -> float:
        begun = max(self._free_at, now + OPENING_S + RTT_S / 2)
        self._free_at = begun + self._far.prefill_s(fetch.want)
        return self._free_at + RTT_S / 2

    @staticmethod
    def _done(fetch: Fetch) -> FetchDone:
        return FetchDone(fetch.session, "staged", "", fetch.want, 0, 64)


def simulated(rows: list[Request]) -> list[float]:
    scenario = Scenario.model_validate(
        {
            "local": {"prefill": "paper-h20", "instances": 1, "colocated": True},
            "peers": [
                {
                    "profile": "paper-h20",
                    "instances": 1,
                    "link": {
                        "gbit_per_s": 1e6,
                        "rtt_ms": 1e3 * RTT_S,
                        "opening_ms": 1e3 * OPENING_S,
                    },
                }
            ],
        }
    )
    profiles = Profiles(scenario)
    profiles.prefill = profiles.decode = Profile.model_validate(NEAR)
    profiles.peers = {"peer": Profile.model_validate(FAR)}
    policy = make_policy(PolicySettings(name="length_threshold", threshold_tokens=THRESHOLD))
    return [row.ttft_s for row in simulate(scenario, profiles, rows, policy).rows]


@pytest.mark.parametrize("rate_per_s", [1.0, 6.0])
def test_first_tokens_come_when_the_engine_makes_them(rate_per_s: float) -> None:
    """At both rates prompts come in the middle of steps, and KV in the middle of chunks."""
    rows = requests(rate_per_s)
    assert simulated(rows) == pytest.approx(Engine().ttft_s(rows), abs=1e-4)
