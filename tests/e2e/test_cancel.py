"""Clients leave at any moment, plans are forged, staging is short: nothing leaks, all is exact."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from prfaas.settings import load_settings
from prfaas.testing.asking import Asker, Caller, make_prompt
from prfaas.testing.footprint import growth, sizes, wait_nothing_held
from prfaas.testing.link import LinkShape
from prfaas.testing.slowstack import BATCH, ENGINE, LINK, MANY_TOKENS, TOKENS, is_recovered
from prfaas.testing.stack import RunningStack, running_stack, wait_until
from prfaas.transfer import PARAMS_VERSION, PlanStep, TransferParams, sign

STOPPED_WITHIN_S = 2.0
"""A second to stop, and what the feeds take to say so."""
D_SESSIONS, P_SESSIONS = "prfaas_agent_open_sessions", "prfaas_prefill_open_sessions"


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


def start(asker: Asker, length: int, **fields: Any) -> Caller:
    """A request of its asker's own salt: nothing of it is cached at D or P."""
    body = body_of(make_prompt(length, "leaves"), cache_salt=asker.salt, **fields)
    return Caller(asker.stack.stack.gateway_url, body)


@contextmanager
def stopped(stack: RunningStack, name: str) -> Iterator[None]:
    """A process stands still meanwhile."""
    stack.signal(name, signal.SIGSTOP)
    try:
        yield
    finally:
        stack.signal(name, signal.SIGCONT)


def wait_metric(stack: RunningStack, process: str, metric: str, value: float) -> None:
    wait_until(
        lambda: stack.metrics(process)[metric] == value, STOPPED_WITHIN_S, f"{metric} {value:g}"
    )


@contextmanager
def at_once(stack: RunningStack, asker: Asker) -> Iterator[Caller]:
    """The gateway has just got the request."""
    with start(asker, TOKENS) as caller:
        yield caller


@contextmanager
def while_p_says_nothing(stack: RunningStack, asker: Asker) -> Iterator[Caller]:
    """OPEN is on its way, and there is no ACCEPT; D is free at once, P when it hears of it."""
    with stopped(stack, "p-agent"), start(asker, TOKENS) as caller:
        wait_metric(stack, "d-agent", D_SESSIONS, 1)
        yield caller
        wait_metric(stack, "d-agent", D_SESSIONS, 0)


@contextmanager
def while_p_computes(stack: RunningStack, asker: Asker) -> Iterator[Caller]:
    """P has taken the session, and its engine says nothing yet."""
    with stopped(stack, "p-engine"), start(asker, TOKENS) as caller:
        wait_metric(stack, "p-agent", P_SESSIONS, 1)
        yield caller
        wait_metric(stack, "p-agent", P_SESSIONS, 0)


@contextmanager
def while_kv_arrives(stack: RunningStack, asker: Asker) -> Iterator[Caller]:
    """A part of the KV is at D, P still computes the rest."""
    with start(asker, MANY_TOKENS) as caller:
        asker.wait_moving(150_000)
        yield caller


@contextmanager
def while_sealed_kv_arrives(stack: RunningStack, asker: Asker) -> Iterator[Caller]:
    """P has computed everything and holds what is still to come."""
    with start(asker, MANY_TOKENS) as caller:
        asker.wait_moving(150_000)
        url = stack.stack.p_engine_url
        wait_until(lambda: stack.integrity(url)["exporting"] == 0, 20, "P to have computed all")
        assert stack.metrics("p-agent")[P_SESSIONS] == 1
        yield caller


@contextmanager
def while_kv_is_staged(stack: RunningStack, asker: Asker) -> Iterator[Caller]:
    """All KV lies in staging for D's engine, which has not taken it yet."""
    with start(asker, TOKENS) as caller:
        asker.wait_moving(60_000)  # what had come before one could look does not count
        with stopped(stack, "d-engine"):
            wait_until(
                lambda: not stack.metrics("p-agent")[P_SESSIONS], 10, "everything to be at D"
            )
            assert stack.metrics("d-agent")["prfaas_agent_staging_used_bytes"] > 0
            yield caller


@contextmanager
def while_waiting_for_a_place_at_d(stack: RunningStack, asker: Asker) -> Iterator[Caller]:
    """D's batch is full of others."""
    with ExitStack() as others:
        for other in range(BATCH):
            body = body_of(make_prompt(20, f"other/{other}"), max_tokens=1500, stream=True)
            caller = others.enter_context(Caller(stack.stack.d_engine_url, body))
            assert caller.read_some().startswith(b"HTTP/1.1 200")
        caller = others.enter_context(start(asker, 300))
        asker.wait_moving(100_000)
        counts = wait_until(lambda: waits_at_d(stack), 10, "the request to wait at D")
        assert counts["running"] == BATCH
        yield caller
        wait_until(lambda: not waits_at_d(stack), STOPPED_WITHIN_S, "the request to be gone")


def waits_at_d(stack: RunningStack) -> dict[str, Any] | None:
    counts = stack.integrity(stack.stack.d_engine_url)
    idle = stack.metrics("p-agent")[P_SESSIONS] == 0
    return counts if idle and counts["waiting"] + counts["waiting_kv"] else None


@contextmanager
def while_d_decodes(stack: RunningStack, asker: Asker) -> Iterator[Caller]:
    """Tokens are coming."""
    with start(asker, 200, max_tokens=3000, stream=True) as caller:
        assert caller.read_some().startswith(b"HTTP/1.1 200")
        yield caller


@contextmanager
def while_d_decodes_for_nobody_to_read(stack: RunningStack, asker: Asker) -> Iterator[Caller]:
    """Tokens are coming and are not taken."""
    with start(asker, 200, max_tokens=3000, stream=True) as caller:
        time.sleep(1.0)
        yield caller


Phase = Callable[[RunningStack, Asker], AbstractContextManager[Caller]]
PHASES: tuple[Phase, ...] = (
    at_once,
    while_p_says_nothing,
    while_p_computes,
    while_kv_arrives,
    while_sealed_kv_arrives,
    while_kv_is_staged,
    while_waiting_for_a_place_at_d,
    while_d_decodes,
    while_d_decodes_for_nobody_to_read,
)


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.__name__)
@pytest.mark.parametrize("reset", [False, True], ids=["closes", "resets"])
def test_a_client_that_leaves_stops_the_work_on_both_sides(
    slow: RunningStack, phase: Phase, reset: bool
) -> None:
    # A request of the same prompt before may have left its KV at D, and then nothing would come.
    with Asker(slow, salt=f"{phase.__name__}/{reset}") as asker:
        with phase(slow, asker) as caller:
            caller.leave(reset=reset)
        wait_nothing_held(slow, STOPPED_WITHIN_S)
        is_recovered(slow, asker, f"{phase.__name__}/{reset}")


def test_a_client_that_reads_nothing_slows_nobody_and_costs_no_memory(slow: RunningStack) -> None:
    """Its tokens back up in bounded buffers, at the gateway and at D."""
    prompts = [make_prompt(150, f"beside/{i}") for i in range(12)]
    with Asker(slow) as asker, ExitStack() as readers:
        for prompt in prompts:
            asker.right(prompt)
        took_s = [seconds_of(lambda p=p: asker.check(p, asker.ask(p))) for p in prompts[:4]]
        before = sizes(slow)
        body = body_of(make_prompt(20, "reader"), max_tokens=4000, stream=True, logprobs=5)
        for _ in range(4):
            readers.enter_context(Caller(slow.stack.gateway_url, body, receive_bytes=4096))
        time.sleep(0.5)
        beside_s = [seconds_of(lambda p=p: asker.check(p, asker.ask(p))) for p in prompts[4:]]
        assert growth(before, sizes(slow), spare_fds=20) == []
        assert sorted(beside_s)[len(beside_s) // 2] < 5 * max(took_s) + 1.0
        readers.close()
        wait_nothing_held(slow, STOPPED_WITHIN_S)
        is_recovered(slow, asker, "unread")


def seconds_of(act: Callable[[], object]) -> float:
    began = time.monotonic()
    act()
    return time.monotonic() - began


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
        list(pool.map(leave, range(40)))  # whatever is made once and kept is made now
        wait_nothing_held(slow)
        before = sizes(slow)
        list(pool.map(leave, range(1000, 1160)))
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
    limits = {
        "staging_timeout_s": 1.0,
        "fallback_budget_tokens": 100 * tokens,
        "gateway_wait_s": 120.0,
    }
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
            while not done.wait(0.02):
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
