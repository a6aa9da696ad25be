"""Estimates against sums done by hand, and each part against the input it stands for."""

from dataclasses import replace

import pytest

from policies.estimate import local_estimate, queue_seconds, remote_estimate, wire_bytes
from prfaas.snapshot import (
    UNKNOWN_CURVE,
    EngineLoad,
    Estimate,
    LinkState,
    PrefillCurve,
    RequestFacts,
    Snapshot,
)
from prfaas.testing.contracts import UNKNOWN_INPUTS, busy_snapshot, with_local, with_remote

CURVE = PrefillCurve(base_s=0.01, token_s=0.001, token_context_s=0.0, chunk_tokens=100)


def quiet(**link: float) -> Snapshot:
    """Nothing queued anywhere; 1000 B a token on the wire, 1 MB/s, 50 ms round trip."""
    snapshot = busy_snapshot()
    snapshot = with_local(
        snapshot, load=EngineLoad(decode_step_s=0.02), curve=CURVE, matched_tokens=0
    )
    state = LinkState(goodput_bytes_per_s=1e6, rtt_s=0.05, wire_ratio=2.0)
    snapshot = with_remote(
        snapshot, load=EngineLoad(), curve=CURVE, link=replace(state, **link), matched_tokens=0
    )
    return replace(snapshot, token_bytes=2000)


def facts(prompt_tokens: int = 1001) -> RequestFacts:
    return RequestFacts("r", prompt_tokens)


def remote_of(snapshot: Snapshot, request: RequestFacts | None = None) -> Estimate:
    estimate = remote_estimate(request or facts(), snapshot, snapshot.remotes[0], 0.0)
    assert estimate is not None
    return estimate


def local_of(snapshot: Snapshot, request: RequestFacts | None = None) -> Estimate:
    estimate = local_estimate(request or facts(), snapshot)
    assert estimate is not None
    return estimate


def parts(estimate: Estimate) -> float:
    return (
        estimate.queue_s
        + estimate.prefill_s
        + estimate.transfer_s
        + estimate.rtt_s
        + estimate.decode_s
    )


def test_local_is_prefill_and_one_decode_step() -> None:
    estimate = local_of(quiet())
    # 1000 tokens at 1 ms, ten chunks at 10 ms, one step.
    assert estimate.ttft_s == pytest.approx(1.0 + 0.1 + 0.02)
    assert estimate.where == "local"


def test_a_running_batch_puts_a_decode_step_between_chunks() -> None:
    snapshot = with_local(quiet(), load=EngineLoad(running=4, decode_step_s=0.02))
    assert local_of(snapshot).prefill_s == pytest.approx(1.1 + 10 * 0.02)


def test_the_queue_ahead_counts_with_its_own_decode_steps() -> None:
    load = EngineLoad(queue_tokens=300, sent_tokens=200, running=1, decode_step_s=0.02)
    assert queue_seconds(load, CURVE) == pytest.approx(0.5 + 5 * 0.01 + 5 * 0.02)
    assert local_of(with_local(quiet(), load=load)).queue_s == pytest.approx(0.65)


def test_a_queue_of_short_prompts_costs_less_attention_than_one_long_prompt() -> None:
    curve = replace(CURVE, token_context_s=1e-6)
    one = queue_seconds(EngineLoad(queue_tokens=4000, waiting=1), curve)
    forty = queue_seconds(EngineLoad(queue_tokens=4000, waiting=30, sent_requests=10), curve)
    assert one - forty == pytest.approx(1e-6 * 4000 * (4000 - 100) / 2)


def test_cached_tokens_are_not_computed_but_are_attended_to() -> None:
    curve = replace(CURVE, token_context_s=1e-6)
    snapshot = with_local(quiet(), curve=curve, matched_tokens=800)
    assert local_of(snapshot).prefill_s == pytest.approx(0.2 + 0.02 + 1e-6 * 200 * 900)
    assert local_of(snapshot).uncached_tokens == 200


def test_remote_bound_by_the_wire_hides_the_computation() -> None:
    estimate = remote_of(quiet(goodput_bytes_per_s=0.5e6))
    # 1000 tokens * 1000 B at 0.5 MB/s = 2 s, longer than 1.1 s of prefill.
    assert estimate.ttft_s == pytest.approx(0.05 + 2.0 + 0.02)
    assert estimate.prefill_s == pytest.approx(1.1)
    assert estimate.transfer_s == pytest.approx(0.9)


def test_remote_bound_by_computation_adds_only_the_tail() -> None:
    estimate = remote_of(quiet(goodput_bytes_per_s=100e6))
    assert estimate.transfer_s == pytest.approx(100 * 1000 / 32 / 100e6)
    assert estimate.ttft_s == pytest.approx(0.05 + 1.1 + estimate.transfer_s + 0.02)


def test_bytes_on_the_link_drain_while_p_works_off_its_queue() -> None:
    snapshot = quiet(goodput_bytes_per_s=1e6, in_flight_bytes=int(3e6))
    assert remote_of(snapshot).ttft_s == pytest.approx(0.05 + 3.0 + 1.0 + 0.02)
    queued = with_remote(snapshot, load=EngineLoad(queue_tokens=4000, waiting=1))
    # 4.4 s of queue at P: the 3 MB are gone when this session starts.
    assert remote_of(queued).ttft_s == pytest.approx(0.05 + 4.4 + 1.1 + 100 / 32 / 1000 + 0.02)


def test_the_wire_carries_only_what_d_lacks_and_p_computes_only_what_it_lacks() -> None:
    snapshot = quiet(goodput_bytes_per_s=1e6)
    assert wire_bytes(snapshot, snapshot.remotes[0], 1000) == pytest.approx(1e6)
    d_has = remote_of(with_local(snapshot, matched_tokens=900))
    assert d_has.prefill_s == pytest.approx(1.1)
    assert d_has.transfer_s < 0.01
    p_has = remote_of(with_remote(snapshot, matched_tokens=900))
    assert p_has.prefill_s == pytest.approx(0.11)
    assert p_has.ttft_s == pytest.approx(0.05 + 1.0 + 0.02)


def test_import_time_grows_with_raw_bytes() -> None:
    snapshot = quiet()
    estimate = remote_estimate(facts(), snapshot, snapshot.remotes[0], 1e-8)
    assert estimate is not None
    assert estimate.ttft_s - remote_of(snapshot).ttft_s == pytest.approx(2000 * 1000 * 1e-8)


def test_what_arrives_at_a_prefilling_d_waits_half_a_chunk() -> None:
    snapshot = with_local(quiet(), load=EngineLoad(queue_tokens=5000, decode_step_s=0.02))
    assert remote_of(snapshot).decode_s == pytest.approx(0.02 + (0.01 + 0.1) / 2)
    nearly_done = with_local(quiet(), load=EngineLoad(queue_tokens=20, decode_step_s=0.02))
    assert remote_of(nearly_done).decode_s == pytest.approx(0.02 + (0.01 + 0.02) / 2)


def test_before_the_first_decode_step_the_last_token_costs_a_prefill_of_one() -> None:
    snapshot = with_local(quiet(), load=EngineLoad())
    assert local_of(snapshot).decode_s == pytest.approx(0.011)


@pytest.mark.parametrize("goodput", [1e5, 1e6, 1e9])
def test_the_parts_add_up(goodput: float) -> None:
    snapshot = with_local(
        quiet(goodput_bytes_per_s=goodput, in_flight_bytes=5_000_000),
        load=EngineLoad(queue_tokens=700, waiting=2, running=3, decode_step_s=0.03),
    )
    for estimate in (local_of(snapshot), remote_of(snapshot)):
        assert parts(estimate) == pytest.approx(estimate.ttft_s)


def test_unknown_inputs_have_no_estimate() -> None:
    snapshot = quiet()
    assert local_estimate(facts(), with_local(snapshot, curve=UNKNOWN_CURVE)) is None
    assert local_estimate(facts(), UNKNOWN_INPUTS["old load at D"]) is None
    for bad in (
        with_local(snapshot, curve=UNKNOWN_CURVE),
        with_remote(snapshot, curve=UNKNOWN_CURVE),
        quiet(goodput_bytes_per_s=0.0),
        quiet(age_s=3.0),
        UNKNOWN_INPUTS["old load at P"],
        UNKNOWN_INPUTS["old load at D"],
    ):
        assert remote_estimate(facts(), bad, bad.remotes[0], 0.0) is None
