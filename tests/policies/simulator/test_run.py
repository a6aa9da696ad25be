"""Whole runs: by hand where a hand can follow, and what must hold whatever happens."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from policies.always_local import AlwaysLocal
from policies.registry import make_policy
from policies.scenario import load_scenario
from policies.simulator.result import Result
from policies.simulator.run import simulate
from policies.workload.generate import Generator
from policies.workload.request import BLOCK_TOKENS, Request
from prfaas.errors import ConfigError
from prfaas.profile import Profile
from prfaas.settings import PolicySettings
from prfaas.snapshot import Decision, RequestFacts, Snapshot

STEP = 0.01
MB = 1000  # tokens that make a megabyte of KV


def random_requests(count: int = 400, rate: float = 0.8, seed: int = 1) -> list[Request]:
    rng, now, found = random.Random(seed), 0.0, []
    for number in range(count):
        now += rng.expovariate(rate)
        tokens = rng.randint(10, 3000)
        whole = tokens // BLOCK_TOKENS
        family = rng.randrange(4)
        blocks = (*(family * 100 + i for i in range(whole)), 10_000 + number)
        found.append(Request(number, now, tokens, rng.randint(1, 50), blocks))
    return found


def ttft(result: Result) -> list[float]:
    return [row.ttft_s for row in result.rows]


def test_one_request_at_d_takes_its_prefill_and_a_step(site: Any) -> None:
    result = site.run([Request(0, 1.0, 1001, 5)])
    assert ttft(result) == pytest.approx([1.0 + STEP])


def test_one_request_at_a_peer_takes_what_the_pipeline_takes(site: Any) -> None:
    """10 MB at 1 GB/s hide behind 10 s of compute, but for the last layer of the chunk: 1 MB."""
    site.link["rtt_ms"] = 100.0
    result = site.run([Request(0, 0.0, 10 * MB + 1, 5)], "always_remote")
    assert ttft(result) == pytest.approx([0.1 + 10.0 + 0.001 + STEP])
    assert result.egress_bytes == pytest.approx(10e6)
    assert result.rows[0].transfer_s == pytest.approx(0.101)


def test_a_thin_link_is_what_a_transfer_waits_for(site: Any) -> None:
    """10 MB at 0.5 MB/s take 20 s, longer than the 10 s of compute."""
    site.link["gbit_per_s"] = 0.004
    result = site.run([Request(0, 0.0, 10 * MB + 1, 5)], "always_remote")
    assert ttft(result) == pytest.approx([20.0 + STEP], rel=1e-3)


def test_the_fixed_state_crosses_after_the_computation(
    site: Any, profile: Callable[..., Profile]
) -> None:
    site.profile = profile(model={"state_bytes": 50_000_000})
    result = site.run([Request(0, 0.0, 1001, 5)], "always_remote")
    assert ttft(result)[0] == pytest.approx(1.0 + 0.05 + STEP, abs=1e-3)
    assert result.egress_bytes == pytest.approx(51e6)


def test_lossy_codecs_shrink_tokens_and_not_the_state(
    site: Any, profile: Callable[..., Profile]
) -> None:
    ratios = {"exact": 1.0, "compact": 2.5}
    site.profile = profile(model={"state_bytes": 50_000_000, "wire_ratios": ratios})
    site.rest["quality"] = "compact"
    result = site.run([Request(0, 0.0, 10 * MB + 1, 5)], "always_remote")
    assert result.egress_bytes == pytest.approx(54e6)


def test_transfers_share_a_link_and_tails_grow(site: Any) -> None:
    """Case 47: two transfers at once take twice as long each where the link is what binds."""
    site.peer = {"instances": 2}
    site.link["gbit_per_s"] = 0.004
    result = site.run([Request(i, 0.0, 10 * MB + 1, 5) for i in range(2)], "always_remote")
    assert ttft(result) == pytest.approx([40.0 + STEP] * 2, rel=1e-3)


def test_cross_traffic_takes_its_share(site: Any) -> None:
    site.link.update(gbit_per_s=0.004, cross_traffic_share=0.5)
    result = site.run([Request(0, 0.0, 10 * MB + 1, 5)], "always_remote")
    assert ttft(result) == pytest.approx([40.0 + STEP], rel=1e-3)


def test_a_link_that_changes_changes_what_is_under_way(site: Any) -> None:
    """0.5 MB/s for 4 s, then 1 MB/s: 2 MB and then 8 MB, 12 s in all."""
    site.link.update(gbit_per_s=0.004, changes=[{"at_s": 4.0, "gbit_per_s": 0.008}])
    result = site.run([Request(0, 0.0, 10 * MB + 1, 5)], "always_remote")
    assert ttft(result) == pytest.approx([12.0 + STEP], rel=1e-3)


def test_dips_come_again_and_again(site: Any) -> None:
    """1 MB/s for 2 s, a tenth of it for 2 s, and so on: 2.2 MB every 4 s."""
    site.link.update(gbit_per_s=0.008, dips={"every_s": 4.0, "for_s": 2.0, "to_share": 0.1})
    result = site.run([Request(0, 0.0, 10 * MB + 1, 5)], "always_remote")
    # the first 2 s carry the 1.8 MB that are made in them, four periods 8.6 MB; 1.4 MB are left
    assert ttft(result)[0] == pytest.approx(17.4 + STEP, rel=1e-3)


def test_dips_go_on_while_nothing_is_sent_and_outages_leave_changes_in_force(site: Any) -> None:
    site.link.update(gbit_per_s=0.008, dips={"every_s": 100.0, "for_s": 50.0, "to_share": 0.1})
    late = site.run([Request(0, 0.0, 11, 1), Request(1, 5050.0, 2 * MB + 1, 1)], "always_remote")
    # 0.1 MB/s for 2 s of computing and on until 2 MB are there
    assert ttft(late)[1] == pytest.approx(20.0 + STEP, rel=0.01)
    site.link = {"gbit_per_s": 0.008, "changes": [{"at_s": 2.0, "gbit_per_s": 0.004}]}
    site.rest["faults"] = [{"kind": "link_down", "at_s": 1.0, "for_s": 2.0}]
    result = site.run([Request(0, 0.0, 10 * MB + 1, 1)], "always_remote")
    # 0.9 MB in the first second, nothing for two, then 0.5 MB/s
    assert ttft(result)[0] == pytest.approx(3.0 + 9.1 / 0.5 + STEP, rel=0.01)


def test_a_prefix_is_computed_and_sent_once(site: Any) -> None:
    blocks = tuple(range(20))
    rows = [
        Request(0, 0.0, 20 * 512, 1, blocks),
        Request(1, 60.0, 20 * 512 + 100, 1, (*blocks, 99)),
    ]
    local = site.run(rows)
    assert local.rows[1].uncached_tokens == 99
    assert ttft(local)[1] == pytest.approx(0.099 + STEP)
    remote = site.run(rows, "always_remote")
    assert remote.egress_bytes == pytest.approx((20 * 512 - 1 + 99) * 1000)


def test_a_peer_that_has_the_prefix_computes_only_the_rest_and_sends_all(site: Any) -> None:
    site.local["cache_tokens"] = 0
    blocks = tuple(range(20))
    rows = [Request(0, 0.0, 10241, 1, (*blocks, 98)), Request(1, 60.0, 10241, 1, (*blocks, 99))]
    remote = site.run(rows, "always_remote")
    assert remote.rows[1].prefill_s == pytest.approx(0.001)
    assert remote.egress_bytes == pytest.approx(2 * 10240e3)


def test_a_hybrid_resumes_only_where_a_state_is_kept(
    site: Any, profile: Callable[..., Profile]
) -> None:
    """Case 9: half of a long prompt is no prefix for a model with recurrent state."""
    long, half = tuple(range(20)), tuple(range(10))
    rows = [
        Request(0, 0.0, 20 * 512, 1, long),
        Request(1, 60.0, 10 * 512, 1, half),
        Request(2, 90.0, 20 * 512 + 50, 1, (*long, 77)),
    ]
    assert site.run(rows).rows[1].uncached_tokens == 0
    site.profile = profile(model={"state_bytes": 512_000})
    hybrid = site.run(rows)
    assert hybrid.rows[1].uncached_tokens == 10 * 512 - 1
    assert hybrid.rows[2].uncached_tokens == 49


def test_decode_slots_make_answers_wait(site: Any, profile: Callable[..., Profile]) -> None:
    site.profile = profile(decode={"max_batch": 1})
    result = site.run([Request(i, 0.0, 11, 100) for i in range(2)])
    # the second is prefilled 10 ms after the first and waits for its 100 steps
    assert ttft(result) == pytest.approx([0.01 + STEP, 0.01 + 100 * STEP + STEP])
    assert result.rows[1].decode_s == pytest.approx(100 * STEP + STEP - 0.01)


def test_kv_memory_makes_answers_wait(site: Any) -> None:
    site.local["kv_tokens"] = 150
    result = site.run([Request(i, 0.0, 11, 100) for i in range(2)])
    assert ttft(result)[1] == pytest.approx(0.01 + 100 * STEP + STEP)


def test_a_step_takes_longer_with_more_sequences(
    site: Any, profile: Callable[..., Profile]
) -> None:
    site.profile = profile(decode={"step_s": 0.01, "sequence_s": 0.01})
    result = site.run([Request(0, 0.0, 2, 1000), Request(1, 1.0, 2, 1)])
    assert ttft(result) == pytest.approx([0.001 + 0.02, 0.001 + 0.03])


def test_full_staging_keeps_requests_at_d(site: Any) -> None:
    site.local["staging_gb"] = 0.015
    result = site.run([Request(i, 0.0, 10 * MB + 1, 5) for i in range(2)], "always_remote")
    assert [row.fallback for row in result.rows] == ["", "no_space"]
    assert result.peak_staging_bytes == pytest.approx(10e6)


def test_retention_holds_back_what_could_not_be_kept(site: Any) -> None:
    """Two instances and room for the KV of one session: the second waits for the first."""
    site.peer = {"instances": 2, "retention_gb": 0.015 / 2}
    result = site.run([Request(i, 0.0, 10 * MB + 1, 5) for i in range(2)], "always_remote")
    assert ttft(result) == pytest.approx([10.0, 20.0], rel=0.01)


def test_a_peer_that_dies_is_made_up_for_at_d(site: Any) -> None:
    site.rest["faults"] = [{"kind": "peer_down", "at_s": 5.0, "for_s": 10.0}]
    rows = [Request(0, 0.0, 10 * MB + 1, 5), Request(1, 7.0, 1001, 5), Request(2, 30.0, 1001, 5)]
    result = site.run(rows, "always_remote")
    assert [row.fallback for row in result.rows] == ["peer_down", "no_peer", ""]
    assert [row.remote for row in result.rows] == [False, False, True]
    assert ttft(result)[0] == pytest.approx(5.0 + 10.0 + STEP)


def test_what_came_before_a_peer_died_is_kept_in_whole_chunks(
    site: Any, profile: Callable[..., Profile]
) -> None:
    """Case 14: half of the chunks are there after 5 s of 10."""
    site.profile = profile(prefill={"chunk_tokens": 1000})
    site.rest["faults"] = [{"kind": "peer_down", "at_s": 5.0, "for_s": 10.0}]
    result = site.run([Request(0, 0.0, 10 * MB + 1, 5)], "always_remote")
    assert 5.0 + 5.0 < ttft(result)[0] <= 5.0 + 6.0 + 2 * STEP


def test_a_link_that_is_dead_for_too_long_sends_requests_home(site: Any) -> None:
    site.rest["faults"] = [{"kind": "link_down", "at_s": 9.0, "for_s": 100.0}]
    result = site.run([Request(0, 0.0, 10 * MB + 1, 5)], "always_remote")
    assert result.rows[0].fallback == "stalled"
    # sealed at 10 s, nothing moved since 9 s, given up 5 s after that, 10 s at D
    assert 24.0 <= ttft(result)[0] <= 30.1


def test_a_short_outage_of_the_link_is_waited_for(site: Any) -> None:
    site.rest["faults"] = [{"kind": "link_down", "at_s": 9.0, "for_s": 3.0}]
    result = site.run([Request(0, 0.0, 10 * MB + 1, 5)], "always_remote")
    assert result.rows[0].fallback == ""
    assert ttft(result)[0] == pytest.approx(12.002 + STEP, abs=0.001)


def test_lost_telemetry_is_unknown_and_not_idle(site: Any) -> None:
    """Case 12: nothing is offloaded while the peer is not heard, and then it is again."""
    site.rest["faults"] = [{"kind": "telemetry_lost", "at_s": 10.0, "for_s": 100.0}]
    site.rest["telemetry"] = {"interval_s": 0.5}
    rows = [Request(i, 5.0 * i, 501, 1) for i in range(40)]
    result = site.run(rows, "always_remote")
    remote = [row.arrival_s for row in result.rows if row.remote]
    assert not [t for t in remote if 12.6 < t < 110]
    assert [t for t in remote if t > 112]
    assert result.summary().fallbacks == {"stale": len(rows) - len(remote)}


def test_a_slow_peer_is_slow_and_then_is_not(site: Any) -> None:
    site.rest["faults"] = [{"kind": "peer_slow", "at_s": 0.5, "for_s": 100.0, "factor": 3.0}]
    rows = [Request(0, 1.0, 1001, 1), Request(1, 200.0, 1001, 1)]
    assert ttft(site.run(rows, "always_remote")) == pytest.approx([3.0, 1.0], abs=0.02)


def test_shortest_first_serves_the_short_ones_and_ages_the_long(site: Any) -> None:
    rows = [Request(0, 0.0, 3001, 1), Request(1, 0.1, 2001, 1), Request(2, 0.2, 101, 1)]
    fcfs = site.run(rows)
    site.rest["queue_order"] = {"name": "srpt", "ageing": 0.5}
    srpt = site.run(rows)
    assert ttft(fcfs)[2] > 4.8 > 3.0 > ttft(srpt)[2]
    assert ttft(srpt)[1] == pytest.approx(ttft(fcfs)[1] + 0.1)
    # one that came three seconds of its work later is not let before it any more
    late = site.run([rows[0], rows[1], Request(2, 1.5, 101, 1)])
    assert ttft(late)[2] > ttft(late)[1] - 1.4


def test_an_interrupted_prompt_goes_on_where_it_was(
    site: Any, profile: Callable[..., Profile]
) -> None:
    site.profile = profile(prefill={"chunk_tokens": 500})
    site.rest["queue_order"] = {"name": "srpt", "ageing": 1.0}
    rows = [Request(0, 0.0, 3001, 1), Request(1, 0.1, 101, 1)]
    result = site.run(rows)
    # at the next chunk's end the short one goes first; nothing is computed twice
    assert ttft(result) == pytest.approx([3.1 + STEP, 0.5 - 0.1 + 0.1 + STEP])
    remote = site.run(rows, "always_remote")
    assert ttft(remote) == pytest.approx([3.1 + STEP, 0.5 + STEP], abs=0.002)
    assert remote.egress_bytes == pytest.approx(3100e3)


def test_deadline_slack_serves_the_most_urgent(site: Any) -> None:
    site.rest["queue_order"] = {"name": "slack", "deadline_s": 4.0, "deadline_per_s": 0.0}
    rows = [Request(0, 0.0, 1001, 1), Request(1, 0.1, 101, 1), Request(2, 0.2, 3001, 1)]
    assert ttft(site.run(rows))[1] == pytest.approx(1.0 + 3.0 + 0.1 - 0.1 + STEP)


def test_a_colocated_node_steps_between_chunks(site: Any, profile: Callable[..., Profile]) -> None:
    """A prompt of ten chunks beside a running answer: ten steps more, and one of its own."""
    site.profile = profile(prefill={"chunk_tokens": 100})
    site.local = {"instances": 1, "colocated": True}
    site.peer = None
    alone = site.run([Request(0, 0.0, 1001, 1)])
    assert ttft(alone) == pytest.approx([1.0 + STEP])
    both = site.run([Request(0, 0.0, 2, 10_000), Request(1, 1.0, 1001, 1)])
    assert ttft(both)[1] == pytest.approx(1.0 + 10 * STEP, abs=STEP)
    # and the answer is slowed to a token in 110 ms meanwhile
    assert both.utilisation["local_prefill"] > 0


def test_kv_that_arrives_at_a_colocated_node_waits_for_the_chunk_to_end(
    site: Any, profile: Callable[..., Profile]
) -> None:
    site.profile = profile(prefill={"chunk_tokens": 1000})
    site.local = {"instances": 1, "colocated": True}
    # the first is short of the threshold and keeps D busy with chunks of a second
    rows = [Request(0, 0.0, 5001, 1), Request(1, 0.0, 6001, 1)]
    result = site.run(rows, "length_threshold", threshold_tokens=5500)
    assert [row.remote for row in result.rows] == [False, True]
    assert ttft(result)[0] == pytest.approx(5.0 + STEP)
    rows[1] = Request(1, 0.0, 5701, 1)
    rows[0] = Request(0, 0.0, 5401, 1)
    late = site.run([Request(2, 0.0, 1501, 1), *rows], "length_threshold", threshold_tokens=5500)
    # D comes to asking for it after the chunk under way, a second later, and it arrives in another
    asked, took = 1.0, 5.7
    waited = late.rows[2].ttft_s - asked - took
    assert 0.0 < waited <= 1.0 + 3 * STEP


@pytest.mark.parametrize("policy", ["always_local", "always_remote", "least_ttft"])
@pytest.mark.parametrize("colocated", [False, True])
def test_every_request_ends_and_its_parts_add_up(site: Any, policy: str, colocated: bool) -> None:
    site.link.update(gbit_per_s=0.02, rtt_ms=30.0, dips={"every_s": 60.0, "for_s": 20.0})
    site.local.update(cache_tokens=8000, kv_tokens=20_000, staging_gb=0.02, import_gb_per_s=0.5)
    if colocated:
        site.local = {**site.local, "colocated": True, "prefill_instances": None}
    site.peer = {"instances": 2, "cache_tokens": 8000}
    site.rest.update(
        telemetry={"interval_s": 0.5, "delay_s": 0.2},
        faults=[
            {"kind": "peer_down", "at_s": 100.0, "for_s": 20.0},
            {"kind": "link_down", "at_s": 200.0, "for_s": 20.0},
        ],
    )
    requests = random_requests()
    result = site.run(requests, policy)
    assert [row.number for row in result.rows] == [r.number for r in requests]
    for row in result.rows:
        parts = (row.queue_s, row.prefill_s, row.transfer_s, row.decode_s)
        assert sum(parts) == pytest.approx(row.ttft_s)
        assert row.ttft_s > 0
        assert min(parts) > -1e-6, row
    assert all(0 <= share <= 1 + 1e-9 for share in result.utilisation.values())


@pytest.mark.parametrize("policy", ["always_remote", "least_ttft", "length_threshold"])
def test_the_same_inputs_give_the_same_result_to_the_byte(site: Any, policy: str) -> None:
    requests = random_requests()
    one, other = site.run(requests, policy), site.run(iter(requests), policy)
    assert one.digest() == other.digest()
    assert site.run(random_requests(seed=2), policy).digest() != one.digest()


def test_eight_requests_within_one_report_are_spread(site: Any) -> None:
    """Case 42: what the gateway itself has sent is added to what was reported."""
    site.peer = {"instances": 4, "central_queue": False}
    site.rest["telemetry"] = {"interval_s": 0.5}
    rows = [Request(i, 0.01 * (i + 1), 1001, 1) for i in range(8)]
    result = site.run(rows, "always_remote")
    assert max(ttft(result)) == pytest.approx(2.0, abs=0.1)


def shown(site: Any, policy: str, rows: list[Request]) -> list[tuple[int, int]]:
    """Tokens queued and sent at the place that the policy always takes, as each request saw it."""
    seen = []

    class Looks:
        name, move_gain_s = "looks", None

        def __init__(self) -> None:
            self._policy = make_policy(PolicySettings(name=policy))

        def __getattr__(self, name: str) -> Any:
            return getattr(self._policy, name)

        def decide(self, facts: Any, snapshot: Any, state: Any) -> Any:
            at = snapshot.local if policy == "always_local" else snapshot.remotes[0]
            seen.append((at.load.queue_tokens, at.load.sent_tokens))
            return self._policy.decide(facts, snapshot, state)

    simulate(*site.scenario(), rows, Looks())  # type: ignore[arg-type]
    return seen


def test_what_is_on_its_way_to_a_peer_counts_until_a_report_shows_it(site: Any) -> None:
    """A report taken while a request travels knows nothing of it."""
    site.link.update(rtt_ms=400.0)
    site.rest["telemetry"] = {"interval_s": 0.5}
    rows = [Request(0, 0.4, 3001, 1), Request(1, 0.55, 11, 1), Request(2, 1.05, 11, 1)]
    seen = [sum(load) for load in shown(site, "always_remote", rows)]
    assert seen[:2] == [0, 3000]  # it reaches the peer at 0.6
    assert seen[2] == pytest.approx(2600 + 10, abs=1)


def test_what_was_sent_to_d_counts_besides_until_a_report_is_younger(site: Any) -> None:
    site.peer = None
    site.rest["telemetry"] = {"interval_s": 0.25, "settle_s": 0.25}
    rows = [Request(0, 0.1, 3001, 1), Request(1, 0.3, 11, 1), Request(2, 0.6, 11, 1)]
    seen = shown(site, "always_local", rows)
    assert seen[1] == (pytest.approx(2850, abs=1), 3000)
    assert seen[2] == (pytest.approx(2600 + 10, abs=1), 10)


def test_what_was_sent_to_d_counts_until_its_first_token_comes(site: Any) -> None:
    """The gateway relays it, so it need not wait for a report."""
    site.peer = None
    site.rest["telemetry"] = {"interval_s": 100.0, "settle_s": 0.25}
    rows = [Request(0, 0.1, 301, 1), Request(1, 0.3, 101, 1), Request(2, 0.6, 11, 1)]
    assert shown(site, "always_local", rows) == [(0, 0), (0, 300), (0, 0)]


def test_offloads_stop_soon_after_the_link_drops_and_come_back(site: Any) -> None:
    """Case 10: 1 Gbit/s to 50 Mbit/s for 20 s."""
    site.profile = site.profile.model_copy(
        update={"model": site.profile.model.model_copy(update={"head_dim": 2500})}
    )  # 100 KB a token
    site.link["gbit_per_s"] = 1.0
    site.link["changes"] = [
        {"at_s": 60.0, "gbit_per_s": 0.05},
        {"at_s": 80.0, "gbit_per_s": 1.0},
    ]
    site.peer = {"instances": 4}
    site.rest["telemetry"] = {"interval_s": 0.5}
    rng, now, rows = random.Random(1), 0.0, []
    for number in range(100):
        now += rng.expovariate(0.8)
        rows.append(Request(number, now, 1001, 1))
    result = site.run(rows, "least_ttft")
    remote = [row.arrival_s for row in result.rows if row.remote]
    assert [t for t in remote if 40 < t < 60]
    assert not [t for t in remote if 62 < t < 80]
    assert [t for t in remote if 82 < t < 110]


@pytest.mark.parametrize("policy", ["always_local", "always_remote"])
@pytest.mark.parametrize("colocated", [False, True])
def test_late_times_leave_no_sliver_that_never_ends(
    site: Any, policy: str, colocated: bool
) -> None:
    """At 1e9 s the clock has a grain of a tenth of a microsecond."""
    if colocated:
        site.local = {"instances": 1, "colocated": True}
    site.link["gbit_per_s"] = 100.0
    rows = [
        Request(r.number, 1e9 + r.arrival_s, r.prompt_tokens, r.output_tokens)
        for r in random_requests(200, 0.5)
    ]
    result = site.run(rows, policy)
    assert all(0 < row.ttft_s < 1000 for row in result.rows)


def test_short_prompts_at_half_load_leave_only_where_d_has_a_queue(site: Any) -> None:
    """1K prompts, 30 ms away, D's four nodes half busy: few leave, and TTFT is not worse."""
    site.link.update(gbit_per_s=1.0, rtt_ms=30.0)
    site.local.update(instances=8, prefill_instances=4)
    rng, now, rows = random.Random(5), 0.0, []
    for number in range(2000):
        now += rng.expovariate(2.0)
        rows.append(Request(number, now, 1000, 10))
    ours, local = site.run(rows, "least_ttft"), site.run(rows)
    assert ours.summary().offload_share < 0.1
    for row, alone in zip(ours.rows, local.rows, strict=True):
        if row.remote:
            assert alone.queue_s > 0
    assert ours.summary().ttft_p99_s <= local.summary().ttft_p99_s * 1.001


def test_prompts_longer_than_a_profile_covers_are_refused() -> None:
    from policies.registry import make_policy
    from policies.simulator.run import simulate
    from prfaas.settings import PolicySettings

    scenario, profiles = load_scenario("homogeneous")
    local = scenario.local.model_copy(update={"prefill_instances": 9})
    scenario = scenario.model_copy(update={"local": local})
    policy = make_policy(PolicySettings(name="always_local"))
    with pytest.raises(ConfigError, match=r"request 7: profile paper-h20 covers.*200000 are asked"):
        simulate(scenario, profiles, [Request(7, 0.0, 200_000, 1)], policy)
    with pytest.raises(ConfigError, match="no requests"):
        simulate(scenario, profiles, [], policy)


def test_a_split_left_open_is_answered_with_how_to_find_it(site: Any) -> None:
    site.local = {"instances": 4}
    with pytest.raises(ConfigError, match="prfaas plan"):
        site.run([Request(0, 0.0, 10, 1)])


def test_a_summary_may_leave_the_warm_up_out(site: Any) -> None:
    result = site.run(list(Generator(requests=50, output_tokens=1).stream()))
    last = result.rows[-1].arrival_s
    assert result.summary().requests == 50
    assert 0 < result.summary(last / 2).requests < 50
    with pytest.raises(ValueError, match="no request arrives"):
        result.summary(last + 1)


def test_policies_see_how_many_nodes_serve_a_queue(site: Any) -> None:
    """Without, a solved threshold would take D for one node, and send away what it can serve."""
    seen: list[tuple[int, int]] = []

    class Looks(AlwaysLocal):
        def decide(self, request: RequestFacts, snapshot: Snapshot, state: None) -> Decision:
            seen.append((snapshot.local.instances, snapshot.remotes[0].instances))
            return super().decide(request, snapshot, state)

    site.local = {"instances": 5, "prefill_instances": 3}
    site.peer = {"instances": 2}
    simulate(*site.scenario(), [Request(0, 0.0, 100, 1)], Looks(PolicySettings()))
    assert seen == [(3, 2)]


def test_between_reports_a_place_shows_its_share_of_what_was_sent(site: Any) -> None:
    """All that was sent, beside a queue that is one node's share, looks like a queue so many times
    as long: in a burst everything would leave."""
    seen: list[tuple[int, int]] = []

    class Looks(AlwaysLocal):
        def decide(self, request: RequestFacts, snapshot: Snapshot, state: None) -> Decision:
            load = snapshot.local.load
            seen.append((load.queue_tokens + load.sent_tokens, load.waiting + load.sent_requests))
            return super().decide(request, snapshot, state)

    site.local = {"instances": 5, "prefill_instances": 4}
    site.rest["telemetry"] = {"interval_s": 10.0}
    burst = [Request(i, 0.0, 1001, 1) for i in range(10)]
    simulate(*site.scenario(), burst, Looks(PolicySettings()))
    assert seen[:4] == [(0, 0)] * 4, "as long as a node is free"
    assert seen[4:] == [(i * 1000 // 4, round(i / 4)) for i in range(4, 10)]


@pytest.mark.parametrize(("here", "there"), [(1, 1), (8, 1), (1, 8), (8, 4)])
@pytest.mark.parametrize("policy", ["least_ttft", "priced"])
def test_a_burst_within_one_report_is_split_as_with_reports_at_once(
    site: Any, policy: str, here: int, there: int
) -> None:
    site.local = {"instances": here + 1, "prefill_instances": here}
    site.peer = {"instances": there}
    burst = [Request(i, 0.0, 1001, 1) for i in range(16 * (here + there))]
    always = site.run(burst, policy)
    site.rest["telemetry"] = {"interval_s": 10.0}
    seldom = site.run(burst, policy)
    assert max(ttft(seldom)) <= 1.2 * max(ttft(always))
