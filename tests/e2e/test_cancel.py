"""Clients leave at any moment, plans are forged, staging is short: nothing leaks, all is exact."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from prfaas.settings import load_settings
from prfaas.testing.asking import Asker, Caller, make_prompt
from prfaas.testing.footprint import growth, sizes, wait_nothing_held
from prfaas.testing.link import LinkShape
from prfaas.testing.slowstack import ENGINE, LINK, MANY_TOKENS, TOKENS, is_recovered
from prfaas.testing.stack import RunningStack, running_stack
from prfaas.transfer import PARAMS_VERSION, PlanStep, TransferParams, sign

STOPPED_WITHIN_S = 2.0
"""A second to stop, and what the feeds take to say so."""


def body_of(prompt: list[int], **fields: Any) -> dict[str, Any]:
    return {
        "model": "test-model",
        "prompt": prompt,
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        **fields,
    }


# --- clients that leave ---


def at_once(stack: RunningStack, asker: Asker) -> Caller:
    """The gateway has just got the request."""
    return Caller(stack.stack.gateway_url, body_of(make_prompt(TOKENS, "at once")))


def while_p_computes(stack: RunningStack, asker: Asker) -> Caller:
    """P has taken the session, and its engine says nothing yet."""
    stack.signal("p-engine", signal.SIGSTOP)
    caller = Caller(stack.stack.gateway_url, body_of(make_prompt(TOKENS, "computes")))
    time.sleep(0.3)
    return caller


def while_kv_arrives(stack: RunningStack, asker: Asker) -> Caller:
    """A part of the KV is at D."""
    caller = Caller(stack.stack.gateway_url, body_of(make_prompt(MANY_TOKENS, "arrives")))
    asker.wait_moving(150_000)
    return caller


def while_d_decodes(stack: RunningStack, asker: Asker) -> Caller:
    """Tokens are coming."""
    body = body_of(make_prompt(200, "decodes"), max_tokens=3000, stream=True)
    caller = Caller(stack.stack.gateway_url, body)
    assert caller.read_some().startswith(b"HTTP/1.1 200")
    return caller


def while_d_decodes_for_nobody_to_read(stack: RunningStack, asker: Asker) -> Caller:
    """Tokens are coming and are not taken."""
    body = body_of(make_prompt(200, "unread"), max_tokens=3000, stream=True)
    caller = Caller(stack.stack.gateway_url, body)
    time.sleep(1.0)
    return caller


PHASES: tuple[Callable[[RunningStack, Asker], Caller], ...] = (
    at_once,
    while_p_computes,
    while_kv_arrives,
    while_d_decodes,
    while_d_decodes_for_nobody_to_read,
)


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.__name__)
@pytest.mark.parametrize("reset", [False, True], ids=["closes", "resets"])
def test_a_client_that_leaves_stops_the_work_on_both_sides(
    slow: RunningStack, phase: Callable[[RunningStack, Asker], Caller], reset: bool
) -> None:
    with Asker(slow) as asker:
        with phase(slow, asker) as caller:
            caller.leave(reset=reset)
        if phase is while_p_computes:
            p_sessions = "prfaas_prefill_open_sessions"
            deadline = time.monotonic() + STOPPED_WITHIN_S
            while slow.metrics("p-agent")[p_sessions]:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            slow.signal("p-engine", signal.SIGCONT)
        wait_nothing_held(slow, STOPPED_WITHIN_S)
        is_recovered(slow, asker, f"{phase.__name__}/{reset}")


def test_counts_are_back_after_hundreds_of_clients_that_left(slow: RunningStack) -> None:
    """Whole bodies and halves, streams and none, at random moments; eight at a time."""

    def leave(seed: int) -> None:
        rng = random.Random(seed)
        prompt = make_prompt(rng.choice((2, 70, 400, TOKENS)), rng.randrange(40))
        body = body_of(prompt, stream=rng.random() < 0.5, max_tokens=rng.choice((1, 8, 500)))
        try:
            with Caller(slow.stack.gateway_url, body) as caller:
                time.sleep(rng.choice((0, 0.01, 0.05, 0.2, 0.5)))
                if rng.random() < 0.2:
                    caller.read_some()
                caller.leave(reset=rng.random() < 0.5)
        except ConnectionError:
            return  # it was the faster one

    with Asker(slow) as asker, ThreadPoolExecutor(8) as pool:
        list(pool.map(leave, range(60)))  # whatever is made once and kept is made now
        wait_nothing_held(slow)
        before = sizes(slow)
        list(pool.map(leave, range(1000, 1200)))
        wait_nothing_held(slow)
        assert growth(before, sizes(slow)) == []
        is_recovered(slow, asker, "hundreds")


def test_late_bytes_of_an_aborted_request_never_reach_the_next(slow: RunningStack) -> None:
    """The next request gets the same staging while bytes of the one before are on their way."""
    slow.bend(lambda link: link.set_shape(LinkShape(LINK.rate_bits_per_s * 4, 0.2)))
    try:
        with Asker(slow) as asker:
            for attempt in range(6):
                prompt = make_prompt(600, f"next/{attempt}")
                asker.right(prompt)
                late = make_prompt(MANY_TOKENS, f"late/{attempt}")
                with Caller(slow.stack.gateway_url, body_of(late)) as caller:
                    asker.wait_moving(100_000 * (attempt + 1))
                    caller.leave(reset=True)
                outcome = asker.outcome(prompt)
                assert (outcome["status"], outcome["reason"]) == ("staged", "")
            wait_nothing_held(slow)
    finally:
        slow.bend(lambda link: link.set_shape(LINK))


# --- short staging ---


def test_a_hundred_offloads_with_staging_for_three(tmp_path: Path, tiny_model_dir: Path) -> None:
    """At most three sessions are open at once; the others wait their turn or go local."""
    tokens, token_bytes = 300, 1024
    limits = {"staging_timeout_s": 1.0, "fallback_budget_tokens": 100 * tokens}
    most = 0
    done = threading.Event()
    with running_stack(
        tmp_path / "stack",
        tiny_model_dir,
        base=load_settings(overrides={"limits": limits}),
        gateway={"policy": {"name": "always_remote"}, "short_body_bytes": 0},
        agent={"staging_bytes": 3 * tokens * token_bytes, "verify_import": True},
        d_engine=ENGINE,
        p_engine=ENGINE,
    ) as stack:

        def watch() -> None:
            nonlocal most
            while not done.wait(0.005):
                metrics = stack.metrics("p-agent")
                most = max(most, int(metrics["prfaas_prefill_open_sessions"]))

        with Asker(stack, max_tokens=2) as asker, ThreadPoolExecutor(100) as pool:
            prompts = [make_prompt(tokens, f"hundred/{i}") for i in range(100)]
            for prompt in prompts:
                asker.right(prompt)
            watcher = threading.Thread(target=watch)
            watcher.start()
            answers = list(pool.map(asker.ask, prompts))
            done.set()
            watcher.join()
            ends = set()
            for prompt, answer in zip(prompts, answers, strict=True):
                outcome = asker.check(prompt, answer)["outcome"]
                ends.add((outcome["status"], outcome["reason"]))
            assert 1 <= most <= 3
            assert ("staged", "") in ends
            assert ends <= {("staged", ""), ("local", "staging_full")}
            wait_nothing_held(stack)


# --- plans that no gateway made ---


def test_a_plan_that_is_not_the_gateways_dials_nobody(slow: RunningStack) -> None:
    """Forged, changed, expired, used before, or with an address in it: served here, or refused."""
    key = slow.stack.transfer_key.encode()
    good = TransferParams(
        version=PARAMS_VERSION,
        transfer_id="plan-1",
        plan=(PlanStep("p", "p-0"),),
        on_failure="local",
        quality="exact",
        deadline_s=20.0,
        salt="",
        expires=time.time() + 60,
    )

    def changed(**fields: Any) -> TransferParams:
        return msgspec.structs.replace(good, **fields)

    def signed(**fields: Any) -> dict[str, Any]:
        return sign(changed(**fields), key).to_dict()

    address = {"peer": "p", "instance": "p-0", "address": "127.0.0.1:1"}
    plans: dict[str, tuple[object, str, str]] = {
        "forged": (sign(changed(transfer_id="f"), b"x").to_dict(), "unauthorized", "local"),
        "unsigned": (changed(transfer_id="u").to_dict(), "unauthorized", "local"),
        "not ASCII": (signed(transfer_id="a") | {"mac": "é"}, "unauthorized", "local"),
        "changed": (signed(transfer_id="c") | {"salt": "other"}, "unauthorized", "local"),
        "expired": (signed(transfer_id="e", expires=time.time() - 1), "expired", "local"),
        "expired, not granted": (
            signed(transfer_id="er", expires=time.time() - 1, on_failure="reject"),
            "expired",
            "refused",
        ),
        "used before": (signed(), "replayed", "local"),
        "an address": (signed(transfer_id="ad") | {"plan": [address]}, "invalid_request", "local"),
        "address on top": (
            signed(transfer_id="at") | {"address": "127.0.0.1:1"},
            "invalid_request",
            "local",
        ),
        "nobody we know": (
            signed(transfer_id="n", plan=(PlanStep("q", "q-0"),)),
            "unknown_peer",
            "local",
        ),
        "no plan": (signed(transfer_id="np", plan=()), "no_plan", "local"),
        "of another kind": ({"do_remote_prefill": True}, "invalid_request", "local"),
        "another version": (signed(transfer_id="v", version=9), "invalid_request", "local"),
    }
    url = slow.stack.d_engine_url
    with Asker(slow) as asker:

        def ask(prompt: list[int], params: object) -> Any:
            return asker.ask(prompt, url=url, kv_transfer_params=params)

        def dialled() -> float:
            return sum(
                value
                for name, value in slow.metrics("p-agent").items()
                if name.startswith("prfaas_prefill_sessions_total")
            )

        prompt = make_prompt(300, "good plan")
        before = dialled()
        assert ask(prompt, signed()).token_ids == asker.right(prompt)
        wait_nothing_held(slow)
        assert dialled() == before + 1
        sockets = {name: size.sockets for name, size in sizes(slow).items()}
        for name, (params, reason, status) in plans.items():
            counter = f'prfaas_agent_fetches_total{{reason="{reason}",status="{status}"}}'
            counted = slow.metrics("d-agent").get(counter, 0)
            prompt = make_prompt(300, name)
            answer = ask(prompt, params)
            if status == "refused":
                assert answer.status == 503, name
                assert answer.body["error"]["type"] == "prefill_unavailable"
                assert answer.retry_after is not None
            else:
                assert answer.status == 200, (name, answer.body)
                assert answer.token_ids == asker.right(prompt), name
            assert slow.metrics("d-agent")[counter] == counted + 1, name
        assert dialled() == before + 1
        agents = ("d-agent", "p-agent")
        assert {n: sizes(slow)[n].sockets for n in agents} == {n: sockets[n] for n in agents}
        wait_nothing_held(slow)
