"""Processes of P and D die or are told to stop: answers stay exact, the others live on and free."""

from __future__ import annotations

import signal
import time

from prfaas.testing.asking import Asker, Caller, make_prompt
from prfaas.testing.footprint import wait_nothing_held
from prfaas.testing.slowstack import CHUNK, LEASE_S, MANY_TOKENS, TOKENS, is_recovered
from prfaas.testing.stack import RunningStack, wait_until

P_SESSIONS = "prfaas_prefill_open_sessions"


def wait_p_free(stack: RunningStack, within_s: float) -> None:
    """P's agent and engine hold nothing of anybody."""

    def free() -> bool:
        counts = stack.integrity(stack.stack.p_engine_url)
        owned = counts["total_blocks"] - counts["free_blocks"]
        metrics = stack.metrics("p-agent")
        held = metrics[P_SESSIONS], metrics["prfaas_prefill_retention_used_bytes"]
        return not any((owned, counts["exporting"], *held))

    wait_until(free, within_s, "P to be free")


def test_p_dies_midway_and_is_not_there_when_d_starts(slow: RunningStack) -> None:
    with Asker(slow) as asker:
        prompt = make_prompt(MANY_TOKENS, "midway")
        asking = asker.start(prompt)
        asker.wait_moving(200_000)
        slow.kill("p-agent")
        slow.kill("p-engine")
        outcome = asker.check(prompt, asking.result(30))["outcome"]
        assert (outcome["status"], outcome["reason"]) == ("partial", "peer_unavailable")
        assert outcome["received_tokens"] % CHUNK == 0
        # D's whole side starts anew and never hears of P.
        for name in ("gateway", "d-engine", "d-agent"):
            assert slow.terminate(name) == 0
        for name in ("d-agent", "d-engine", "gateway"):
            slow.restart(name)
        for attempt in range(3):
            prompt = make_prompt(400, f"alone/{attempt}")
            record = asker.check(prompt, asker.ask(prompt))
            assert record["outcome"] is None
            assert record["decision"]["reason"] in ("no_peer", "stale", "no_cache_info")
        slow.restart("p-engine")
        slow.restart("p-agent")
        is_recovered(slow, asker, "p")


def test_ps_agent_starts_anew_midway(slow: RunningStack) -> None:
    """The new process knows nothing of the session: what is whole at D is kept, the rest asked for
    again or computed at D.
    """
    with Asker(slow) as asker:
        prompt = make_prompt(TOKENS, "anew")
        asking = asker.start(prompt)
        asker.wait_moving(600_000)
        slow.kill("p-agent")
        slow.restart("p-agent")
        outcome = asker.check(prompt, asking.result(30))["outcome"]
        assert (outcome["status"], outcome["reason"]) in (
            ("staged", ""),
            ("partial", "peer_unavailable"),
            ("partial", "session_lost"),
        )
        assert outcome["received_tokens"] > 0
        is_recovered(slow, asker, "anew")


def test_ds_agent_starts_anew_midway(slow: RunningStack) -> None:
    """D's engine goes on alone, P frees what was for the old process, and the new one pairs."""
    with Asker(slow) as asker:
        prompt = make_prompt(TOKENS, "d-agent anew")
        asking = asker.start(prompt)
        asker.wait_moving(300_000)
        slow.kill("d-agent")
        slow.restart("d-agent")
        answer = asking.result(30)
        assert answer.status == 200
        assert answer.token_ids == asker.right(prompt)
        wait_p_free(slow, LEASE_S + 1)
        is_recovered(slow, asker, "d-agent anew")


def test_ds_agent_dies_midway_and_p_frees_what_was_for_it(slow: RunningStack) -> None:
    with Asker(slow) as asker:
        prompt = make_prompt(TOKENS, "d-agent")
        asking = asker.start(prompt)
        asker.wait_moving(200_000)
        slow.kill("d-agent")
        answer = asking.result(30)
        assert answer.status == 200
        assert answer.token_ids == asker.right(prompt)
        wait_p_free(slow, LEASE_S + 1)
        slow.restart("d-agent")
        is_recovered(slow, asker, "d-agent")


def test_ds_engine_dies_midway_and_everybody_frees_what_was_for_it(slow: RunningStack) -> None:
    with Asker(slow) as asker:
        prompt = make_prompt(TOKENS, "d-engine")
        asking = asker.start(prompt)
        asker.wait_moving(200_000)
        slow.kill("d-engine")
        answer = asking.result(30)
        assert answer.status == 502
        assert answer.body["error"]["type"] == "engine_unavailable"
        wait_p_free(slow, LEASE_S + 1)
        metrics = slow.metrics("d-agent")
        assert metrics["prfaas_agent_open_sessions"] == 0
        assert metrics["prfaas_agent_engine_connected"] == 0
        record = slow.record(answer.request_id)
        assert record["outcome"]["status"] == "failed"
        slow.restart("d-engine")
        is_recovered(slow, asker, "d-engine")


def test_sigterm_finishes_what_is_under_way_and_takes_nothing_new(slow: RunningStack) -> None:
    """P's agent, then D's, then the gateway and D's engine: each in the middle of a transfer."""
    with Asker(slow) as asker:
        for name in ("p-agent", "d-agent"):
            prompt, late = make_prompt(TOKENS, name), make_prompt(300, f"late/{name}")
            asking = asker.start(prompt)
            asker.right(late)
            asker.wait_moving(150_000)
            slow.signal(name, signal.SIGTERM)
            wait_until(lambda: not takes_more(slow), 3, "the gateway to hear of it")
            record = asker.check(late, asker.ask(late))
            assert record["outcome"] is None or record["outcome"]["status"] == "local"
            outcome = asker.check(prompt, asking.result(30))["outcome"]
            assert (outcome["status"], outcome["reason"]) == ("staged", "")
            assert slow.wait_end(name) == 0
            slow.restart(name)
            is_recovered(slow, asker, name)
        for name in ("gateway", "d-engine"):
            prompt, late = make_prompt(TOKENS, name), make_prompt(300, f"late/{name}")
            url = {"gateway": slow.stack.gateway_url, "d-engine": slow.stack.d_engine_url}[name]
            asking = asker.start(prompt)
            asker.wait_moving(150_000)
            slow.signal(name, signal.SIGTERM)
            time.sleep(0.1)
            refused = slow.complete(late, url=url, max_tokens=2)
            assert (refused.status, refused.retry_after) == (503, "1")
            answer = asking.result(30)
            assert answer.status == 200
            assert answer.token_ids == asker.right(prompt)
            assert slow.wait_end(name) == 0
            slow.restart(name)
            is_recovered(slow, asker, name)


def test_a_second_signal_forces_and_answers_stay_exact(slow: RunningStack) -> None:
    with Asker(slow) as asker:
        for name in ("p-agent", "d-agent"):
            prompt = make_prompt(TOKENS, f"force/{name}")
            asking = asker.start(prompt)
            asker.wait_moving(150_000)
            slow.signal(name, signal.SIGTERM)
            time.sleep(0.1)
            began = time.monotonic()
            assert slow.terminate(name) == 0
            assert time.monotonic() - began < 3.0
            answer = asking.result(30)
            assert answer.status == 200
            assert answer.token_ids == asker.right(prompt)
            slow.restart(name)
            is_recovered(slow, asker, name)
        body = {"model": "test-model", "prompt": make_prompt(TOKENS, "cut"), "max_tokens": 2000}
        with Caller(slow.stack.gateway_url, {**body, "stream": True, "ignore_eos": True}) as client:
            assert client.read_some().startswith(b"HTTP/1.1 200")
            slow.signal("d-engine", signal.SIGTERM)
            time.sleep(0.1)
            assert slow.terminate("d-engine") == 0
            rest = client.read_all()
            assert b"[DONE]" not in rest
            assert b'"error"' in rest
        slow.restart("d-engine")
        is_recovered(slow, asker, "cut")
        wait_nothing_held(slow)


def takes_more(stack: RunningStack) -> bool:
    """Whether the gateway sees anybody who takes new transfers, at either end."""
    cluster = stack.get(f"{stack.stack.gateway_url}/prfaas/cluster")
    local, (remote,) = cluster["local"], cluster["remotes"]
    draining = local["load"]["draining"] or remote["load"]["draining"]
    connected = all(feed["connected"] for feed in cluster["feeds"])
    return connected and local["offload_ready"] and remote["ready"] and not draining
