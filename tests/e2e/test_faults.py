"""P, the link or D's own processes fail at any moment: every answer stays exact, nothing leaks."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

from prfaas.testing.asking import Asker, make_prompt
from prfaas.testing.link import Way
from prfaas.testing.slowstack import (
    BUDGET_TOKENS,
    CHUNK,
    FIRST_FRAME_S,
    LEASE_S,
    MANY_TOKENS,
    PROGRESS_S,
    TOKENS,
    fast_link,
    is_recovered,
)
from prfaas.testing.stack import RunningStack, wait_until


def kept_whole_chunks(outcome: dict[str, Any]) -> bool:
    """Something came, and it ends where a chunk ends."""
    end = outcome["have_tokens"] + outcome["received_tokens"]
    return outcome["received_tokens"] > 0 and end % CHUNK == 0


Bend = Callable[[RunningStack, bool], object]
BENDS: dict[str, Bend] = {
    "stalled": lambda stack, on: stack.bend(lambda link: link.stall(on)),
    "blackholed": lambda stack, on: stack.bend(lambda link: link.blackhole(on)),
    "blackholed down": lambda stack, on: stack.bend(lambda link: link.blackhole(on, Way.DOWN)),
    "p-agent stopped": lambda stack, on: stack.signal(
        "p-agent", signal.SIGSTOP if on else signal.SIGCONT
    ),
    "p-engine stopped": lambda stack, on: stack.signal(
        "p-engine", signal.SIGSTOP if on else signal.SIGCONT
    ),
}


@pytest.mark.parametrize("fault", BENDS)
def test_whole_chunks_are_kept_when_the_transfer_breaks(slow: RunningStack, fault: str) -> None:
    """Silence ends with its phase's deadline, a cut at once; D prefills the rest itself."""
    # What an agent that stands still has given to its kernel arrives, so there has to be more; and
    # an engine is much faster than the slow link.
    prompt = make_prompt(MANY_TOKENS if fault.startswith("p-") else TOKENS, fault)
    link = fast_link(slow) if fault == "p-engine stopped" else nullcontext()
    with Asker(slow) as asker, link:
        asking = asker.start(prompt)
        # Lanes share the line: a chunk is whole when each has sent its part of it.
        asker.wait_moving(500_000)
        began = time.monotonic()
        BENDS[fault](slow, True)
        try:
            record = asker.check(prompt, asking.result(30))
            took_s = time.monotonic() - began
        finally:
            BENDS[fault](slow, False)
        outcome = record["outcome"]
        assert (outcome["status"], outcome["reason"]) == ("partial", "prefill_timeout_progress")
        assert kept_whole_chunks(outcome), outcome
        assert took_s < PROGRESS_S + 6.0
        is_recovered(slow, asker, fault)


def test_a_transfer_that_is_cut_goes_on_and_little_is_sent_twice(slow: RunningStack) -> None:
    """All connections are reset in the middle, twice: lanes and control come back each time, well
    within the progress deadline, and the answer is exact.
    """
    prompt = make_prompt(TOKENS, "cut")
    counters = (
        'prfaas_agent_wasted_bytes_total{instance="p-0",peer="p"}',
        'prfaas_agent_resumes_total{instance="p-0",peer="p"}',
    )
    with Asker(slow) as asker:
        before = [slow.metrics("d-agent").get(name, 0.0) for name in counters]
        asking = asker.start(prompt)
        for _ in range(2):
            asker.wait_moving(150_000)
            slow.bend(lambda link: link.drop_connections())
        outcome = asker.check(prompt, asking.result(30))["outcome"]
        assert (outcome["status"], outcome["reason"]) == ("staged", "")
        wasted, resumes = (
            slow.metrics("d-agent")[name] - old for name, old in zip(counters, before, strict=True)
        )
        assert resumes >= 2
        assert wasted < 0.05 * outcome["wire_bytes"]
        is_recovered(slow, asker, "cut")


def test_one_lane_that_is_cut_costs_only_what_was_on_it(slow: RunningStack) -> None:
    prompt = make_prompt(TOKENS, "lane")
    counters = {
        name: f'prfaas_agent_{name}_total{{instance="p-0",peer="p"}}'
        for name in ("wasted_bytes", "resumes", "lanes_opened")
    }
    with Asker(slow) as asker:
        before = slow.metrics("d-agent")
        asking = asker.start(prompt)
        asker.wait_moving(300_000)
        slow.bend(lambda link: link.drop_busiest())
        outcome = asker.check(prompt, asking.result(30))["outcome"]
        assert (outcome["status"], outcome["reason"]) == ("staged", "")
        wait_until(
            lambda: (
                slow.metrics("d-agent")[counters["lanes_opened"]]
                >= before[counters["lanes_opened"]] + 1
            ),
            5,
            "the lane to come back",
        )
        after = slow.metrics("d-agent")
        assert after[counters["resumes"]] == before.get(counters["resumes"], 0.0)
        wasted = after[counters["wasted_bytes"]] - before.get(counters["wasted_bytes"], 0.0)
        assert wasted < 0.05 * outcome["wire_bytes"]
        is_recovered(slow, asker, "lane")


def test_cuts_at_any_byte_of_a_transfer_leave_it_whole(slow: RunningStack) -> None:
    with Asker(slow) as asker:
        for nbytes in (1, 700, 40_000, 300_000, 900_000):
            prompt = make_prompt(TOKENS, f"cut after {nbytes}")
            asker.right(prompt)
            slow.bend(lambda link, nbytes=nbytes: link.cut_after(nbytes))
            outcome = asker.outcome(prompt)
            assert outcome is None or outcome["status"] in ("staged", "partial", "local")
            slow.bend(lambda link: link.cut_after(0))
            is_recovered(slow, asker, f"cut after {nbytes}")


def test_acks_that_are_lost_leave_an_exact_answer_and_p_frees_by_its_lease(
    slow: RunningStack,
) -> None:
    """Only the way up loses everything: KV goes on for as long as the credit is enough."""
    prompt = make_prompt(TOKENS, "acks")
    with Asker(slow) as asker:
        asking = asker.start(prompt)
        asker.wait_moving(300_000)
        slow.bend(lambda link: link.blackhole(True, Way.UP))
        try:
            outcome = asker.check(prompt, asking.result(30))["outcome"]
            assert outcome["status"] in ("staged", "partial")
            wait_until(
                lambda: slow.metrics("p-agent")["prfaas_prefill_open_sessions"] == 0,
                LEASE_S + 2,
                "P to free the session",
            )
        finally:
            slow.bend(lambda link: link.blackhole(False))
        is_recovered(slow, asker, "acks")


def test_connections_that_a_nat_forgot_are_replaced(slow: RunningStack) -> None:
    """Idle lanes are silently gone: the next transfer runs into it, and the one after does not."""
    with Asker(slow) as asker:
        slow.bend(lambda link: link.forget_idle(1.0))  # under the keep-alive
        time.sleep(2.0)
        asker.outcome(make_prompt(300, "forgotten"))
        slow.bend(lambda link: link.forget_idle(0.0))
        is_recovered(slow, asker, "forgotten")


@pytest.mark.parametrize("victim", ["p-agent", "p-engine"])
def test_silence_before_the_first_frame_ends_with_its_phase(
    slow: RunningStack, victim: str
) -> None:
    prompt = make_prompt(300, victim)
    with Asker(slow) as asker:
        asker.right(prompt)
        slow.signal(victim, signal.SIGSTOP)
        began = time.monotonic()
        try:
            outcome = asker.outcome(prompt)
            took_s = time.monotonic() - began
        finally:
            slow.signal(victim, signal.SIGCONT)
        phase = {"p-agent": "connect", "p-engine": "first_frame"}[victim]
        assert (outcome["status"], outcome["reason"]) == ("local", f"prefill_timeout_{phase}")
        assert took_s < FIRST_FRAME_S + 3.0
        is_recovered(slow, asker, victim)


def test_a_peer_that_is_refused_or_gone_is_not_asked_and_is_counted(slow: RunningStack) -> None:
    with Asker(slow) as asker:
        slow.bend(lambda link: link.refuse(True))
        try:
            slow.bend(lambda link: link.drop_connections())
            wait_until(lambda: not peer_ready(slow), 10, "the gateway to see the peer gone")
            for attempt in range(3):
                prompt = make_prompt(300, f"refused/{attempt}")
                record = asker.check(prompt, asker.ask(prompt))
                assert record["decision"]["reason"] in ("no_peer", "stale")
                assert record["outcome"] is None
        finally:
            slow.bend(lambda link: link.refuse(False))
        assert sum(fallbacks(slow).values()) >= 3
        is_recovered(slow, asker, "refused")


def test_a_prompt_that_is_at_d_by_then_is_told_as_such_and_is_no_fallback(
    slow: RunningStack,
) -> None:
    """The second of two that come together waits for the first one's KV, and needs nothing more."""
    prompt = make_prompt(20 * CHUNK + 1, "twins")
    with Asker(slow) as asker:
        asker.right(prompt)
        before = fallbacks(slow)
        asking = [asker.start(prompt) for _ in range(2)]
        outcomes = [asker.check(prompt, each.result(30))["outcome"] for each in asking]
        ends = {(outcome["status"], outcome["reason"]): outcome for outcome in outcomes}
        assert set(ends) == {("staged", ""), ("local", "prefix_at_d")}
        had = ends["local", "prefix_at_d"]
        assert had["have_tokens"] == had["want_tokens"] == 20 * CHUNK
        assert fallbacks(slow) == before


def fallbacks(stack: RunningStack) -> dict[str, float]:
    metrics = stack.metrics("gateway")
    return {k: v for k, v in metrics.items() if k.startswith("prfaas_gateway_fallbacks_total")}


def test_flipped_bits_on_the_wire_are_found_and_never_seen(slow: RunningStack) -> None:
    """A frame with a wrong bit is fetched again; one in HTTP/2's own bytes, or in another stream,
    breaks that connection. Whatever is hit, the transfer goes on and the answer is exact."""
    name = 'prfaas_agent_dropped_frames_total{why="corrupt"}'
    found = slow.metrics("d-agent").get(name, 0.0)
    with Asker(slow) as asker:
        for turn in range(8):
            prompt = make_prompt(TOKENS, f"flip/{turn}")
            asking = asker.start(prompt)
            asker.wait_moving(100_000)
            slow.bend(lambda link: link.corrupt_down(1))
            outcome = asker.check(prompt, asking.result(30))["outcome"]
            assert outcome is None or outcome["status"] in ("staged", "partial", "local")
            if outcome is not None and outcome["status"] != "staged":
                assert outcome["reason"] in {"peer_unavailable", "protocol_error"}
            is_recovered(slow, asker, prompt)
            if slow.metrics("d-agent").get(name, 0.0) > found:
                return
    raise AssertionError("no flipped bit was found in a frame")


def test_the_fallback_budget_keeps_a_dead_peers_load_off_d(slow: RunningStack) -> None:
    """Offloads beyond the budget get 503 with Retry-After once P is silent, the others D."""
    asked = 8
    with Asker(slow) as asker:
        prompts = [make_prompt(TOKENS, f"budget/{i}") for i in range(asked)]
        for prompt in prompts:
            asker.right(prompt)
        slow.signal("p-engine", signal.SIGSTOP)
        try:
            asking = [asker.start(prompt) for prompt in prompts]
            answers = [future.result(60) for future in asking]
        finally:
            slow.signal("p-engine", signal.SIGCONT)
        served = 0
        for prompt, answer in zip(prompts, answers, strict=True):
            record = slow.record(answer.request_id)
            if answer.status == 200:
                served += 1
                assert record["on_failure"] == "local"
                asker.check(prompt, answer)
            else:
                assert answer.status == 503
                assert answer.body["error"]["type"] == "prefill_unavailable"
                assert answer.retry_after is not None
                assert record["on_failure"] == "reject"
                assert record["outcome"]["status"] == "refused"
        assert served == BUDGET_TOKENS // (TOKENS - 1)
        is_recovered(slow, asker, "budget")


def peer_ready(stack: RunningStack) -> bool:
    cluster = stack.get(f"{stack.stack.gateway_url}/prfaas/cluster")
    return all(remote["ready"] for remote in cluster["remotes"])
