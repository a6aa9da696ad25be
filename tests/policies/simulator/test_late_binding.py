"""Late binding: who waits moves to an idle site if it gains, and nothing is lost on the way."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from policies.always_local import AlwaysLocal
from policies.always_remote import AlwaysRemote
from policies.priced import Priced
from policies.simulator.result import Result
from policies.simulator.run import simulate
from policies.workload.generate import Generator
from policies.workload.request import Request
from prfaas.late_binding import BindsLate
from prfaas.settings import PolicySettings
from prfaas.snapshot import Decision, Reason, RequestFacts, Snapshot, Target

STEP = 0.01


class LocalThenMove(AlwaysLocal):
    move_gain_s: float | None = 0.1


class RemoteThenMove(AlwaysRemote):
    move_gain_s: float | None = 0.1


class SomeLeave(LocalThenMove):
    """Prompts of 1,000 tokens leave, the others stay until they may move."""

    def decide(self, request: RequestFacts, snapshot: Snapshot, state: None) -> Decision:
        if request.prompt_tokens != 1000:
            return super().decide(request, snapshot, state)
        return Decision(Target.REMOTE, Reason.FORCED_REMOTE, (("peer", "pool"),))


def run(site: Any, policy: type[AlwaysLocal | AlwaysRemote], rows: Iterable[Request]) -> Result:
    return simulate(*site.scenario(), rows, policy(PolicySettings()))


def burst(count: int, tokens: int = 1001) -> list[Request]:
    return [Request(i, 0.0, tokens, 1) for i in range(count)]


def test_only_a_policy_that_says_so_binds_late() -> None:
    assert isinstance(LocalThenMove(PolicySettings()), BindsLate)
    assert isinstance(Priced(PolicySettings(name="priced")), BindsLate)
    assert not isinstance(AlwaysLocal(PolicySettings()), BindsLate)


def test_an_idle_peer_takes_what_waits_at_d(site: Any) -> None:
    """Two of a second each: the second leaves at once and takes one too."""
    assert run(site, AlwaysLocal, burst(2)).rows[1].ttft_s == pytest.approx(2 + STEP)
    result = run(site, LocalThenMove, burst(2))
    assert result.rows[1].remote
    assert result.rows[1].moves == 1
    assert result.rows[1].ttft_s == pytest.approx(1 + STEP, rel=1e-3)
    assert result.summary().moved_share == 0.5


def test_idle_d_takes_back_what_waits_at_a_peer(site: Any) -> None:
    result = run(site, RemoteThenMove, burst(2))
    assert not result.rows[1].remote
    assert result.rows[1].fallback == ""
    assert result.rows[1].ttft_s == pytest.approx(1 + STEP, rel=1e-3)


def test_a_move_takes_a_round_trip(site: Any) -> None:
    site.link["rtt_ms"] = 100.0
    back = run(site, RemoteThenMove, burst(2)).rows[1]
    # 50 ms to the peer, a round trip there and back to take it home
    assert back.ttft_s == pytest.approx(0.05 + 0.05 + 0.05 + 0.05 + 1 + STEP, abs=0.06)
    assert back.moves == 1


def test_a_request_that_would_not_gain_stays(site: Any) -> None:
    """1 MB of KV takes 2 s on the wire: as long as waiting."""
    site.link["gbit_per_s"] = 0.004
    result = run(site, LocalThenMove, burst(2))
    assert not result.rows[1].remote
    assert result.rows[1].moves == 0


def test_a_small_gain_does_not_fill_a_thin_link(site: Any) -> None:
    """Half a second on the wire would gain half a second, and cost everyone else on the link."""
    site.link["gbit_per_s"] = 0.016
    assert run(site, LocalThenMove, burst(2)).rows[1].moves == 0
    site.link["gbit_per_s"] = 0.064
    assert run(site, LocalThenMove, burst(2)).rows[1].moves == 1


@pytest.mark.parametrize(("under_way", "moves"), [(0, 1), (8, 0)])
def test_a_move_pays_for_the_transfers_it_would_share_the_link_with(
    site: Any, under_way: int, moves: int
) -> None:
    """A megabyte alone takes an eighth of a second, so a move must gain two of them. Behind half a
    second of queue at D it gains that; with eight transfers under way, which leave the peer itself
    no slower, it would have to gain half a second more."""
    site.peer = {"instances": 9}
    site.link["gbit_per_s"] = 0.064
    away = [Request(i, 0.0, 1000, 1) for i in range(under_way)]
    first = Request(90, 0.0, 601, 1)
    waits = Request(91, 0.0, 1001, 1)
    result = run(site, SomeLeave, [*away, first, waits])
    assert result.rows[-1].moves == moves


def test_what_has_begun_stays(site: Any) -> None:
    result = run(site, LocalThenMove, burst(1, 10_001))
    assert [row.moves for row in result.rows] == [0]


def test_full_staging_keeps_it_waiting(site: Any) -> None:
    site.local["staging_gb"] = 0.0005
    result = run(site, LocalThenMove, burst(2))
    assert not result.rows[1].remote
    assert result.rows[1].ttft_s == pytest.approx(2 + STEP)


def test_a_peer_that_is_down_takes_nothing(site: Any) -> None:
    site.rest["faults"] = [{"kind": "peer_down", "at_s": 0.0, "for_s": 100.0}]
    rows = [Request(i, 1.0, 1001, 1) for i in range(3)]
    result = run(site, LocalThenMove, rows)
    assert not any(row.remote for row in result.rows)


@pytest.mark.parametrize("policy", [LocalThenMove, RemoteThenMove])
@pytest.mark.parametrize("order", ["fcfs", "srpt"])
@pytest.mark.parametrize("colocated", [False, True])
def test_under_load_all_finish_staging_is_given_back_and_runs_repeat(
    site: Any, policy: Any, order: str, colocated: bool
) -> None:
    site.local = {"instances": 3, "staging_gb": 0.05}
    site.local.update({"colocated": True} if colocated else {"prefill_instances": 2})
    site.peer = {"instances": 2, "central_queue": False, "retention_gb": 0.05}
    site.link = {"gbit_per_s": 0.06, "rtt_ms": 80.0, "dips": {"every_s": 50.0, "for_s": 10.0}}
    site.rest.update(
        queue_order={"name": order},
        telemetry={"interval_s": 0.5},
        faults=[{"kind": "peer_down", "at_s": 100.0, "for_s": 20.0}],
    )
    rows = [
        Request(r.number, r.arrival_s, r.prompt_tokens // 40 + 2, 20)
        for r in Generator(requests=600).stream()
    ]
    result = run(site, policy, rows)
    assert len(result.rows) == 600
    assert all(row.ttft_s > 0 for row in result.rows)
    assert sum(row.moves for row in result.rows) > 5
    parts = [r.queue_s + r.prefill_s + r.transfer_s + r.decode_s for r in result.rows]
    assert parts == pytest.approx([r.ttft_s for r in result.rows])
    assert result.peak_staging_bytes <= 0.05e9
    assert run(site, policy, rows).digest() == result.digest()


def test_moving_never_makes_a_burst_slower(site: Any) -> None:
    site.peer = {"instances": 2}
    stays = run(site, AlwaysLocal, burst(20)).summary()
    moves = run(site, LocalThenMove, burst(20)).summary()
    assert moves.ttft_mean_s < 0.5 * stays.ttft_mean_s
