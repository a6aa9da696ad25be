"""The whole stack under mutual TLS: exact answers, attackers at both ports, keys that change."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from prfaas.certs import make_certs
from prfaas.errors import Forbidden, Unauthorized
from prfaas.rpc.convert import error_from_bytes
from prfaas.rpc.status import DETAIL_KEY
from prfaas.rpc.v1 import prefill_pb2 as pb
from prfaas.settings import AuthorisedClient, TlsSettings
from prfaas.testing.pki import Pki
from prfaas.testing.stack import Answer, RunningStack, running_stack, wait_until
from prfaas.up.stack import CERTS, free_ports

ENGINE = {
    "chunk_tokens": 64,
    "kv_memory_bytes": 16 << 20,
    "max_context": 4096,
    "kv_dtype": "float32",
}
POLICY = {"policy": {"name": "always_remote"}, "short_body_bytes": 0}
WATCH = "/prfaas.rpc.v1.Telemetry/Watch"
CANCEL = "/prfaas.rpc.v1.Prefill/Cancel"


@contextmanager
def tls_stack(directory: Path, model: Path, **prefill: Any) -> Iterator[RunningStack]:
    with running_stack(
        directory,
        model,
        gateway=POLICY,
        d_engine=ENGINE,
        p_engine=ENGINE,
        prefill=prefill,
        tls=True,
    ) as stack:
        yield stack


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Iterator[RunningStack]:
    """One stack for the tests that leave its processes alone."""
    with tls_stack(tmp_path_factory.mktemp("tls") / "stack", tiny_model_dir) as stack:
        yield stack


def prompt_of(length: int, seed: object) -> list[int]:
    return random.Random(f"{length}/{seed}").choices(range(10, 600), k=length)


def ask(stack: RunningStack, prompt: list[int], **fields: Any) -> Answer:
    answer = stack.complete(prompt, max_tokens=4, cache_salt="tls", **fields)
    assert answer.status == 200, answer.body
    return answer


def outcome(stack: RunningStack, answer: Answer, url: str | None = None) -> tuple[str, str]:
    found = stack.record(answer.request_id, url=url)["outcome"]
    return found["status"], found["reason"]


@contextmanager
def asking(stack: RunningStack, *urls: str) -> Iterator[list[Answer]]:
    """Ask all the time, two at once, the gateways in turn; on leaving, all answers were good."""
    gateways = urls or (stack.stack.gateway_url,)
    stop = threading.Event()
    answers: list[Answer] = []

    def loop(worker: int) -> None:
        count = 0
        while not stop.is_set():
            url = gateways[count % len(gateways)]
            answers.append(ask(stack, prompt_of(400, f"{worker}/{count}/{id(stop)}"), url=url))
            count += 1
            stop.wait(0.15)

    with ThreadPoolExecutor(2) as pool:
        workers = [pool.submit(loop, worker) for worker in range(2)]
        try:
            yield answers
        finally:
            stop.set()
        for worker in workers:
            worker.result()


def certs(stack: RunningStack) -> Path:
    return stack.stack.directory / CERTS


def tls_of(stack: RunningStack, name: str) -> TlsSettings:
    make_certs(certs(stack), (name,), days=1)
    pair = certs(stack) / name
    return TlsSettings(cert=pair / "cert.pem", key=pair / "key.pem", ca=certs(stack) / "ca.pem")


def refusal(port: int, method: str, request: bytes, tls: TlsSettings | None) -> Exception | None:
    """What a client of gRPC's own gets for one RPC; None: an answer."""
    where = f"127.0.0.1:{port}"
    if tls is None:
        channel = grpc.insecure_channel(where)
    else:
        credentials = grpc.ssl_channel_credentials(
            tls.ca.read_bytes(), tls.key.read_bytes(), tls.cert.read_bytes()
        )
        channel = grpc.secure_channel(where, credentials)
    with channel:
        try:
            next(channel.unary_stream(method)(request, timeout=5))
        except grpc.RpcError as exc:
            for key, value in exc.trailing_metadata() or ():
                if key == DETAIL_KEY:
                    return error_from_bytes(value)
            return exc
    return None


def test_answers_are_those_of_a_local_run(stack: RunningStack) -> None:
    for length in (65, 700, 1500):
        prompt = prompt_of(length, "exact")
        local = stack.complete(
            prompt, url=stack.stack.d_engine_url, max_tokens=4, cache_salt="oracle"
        )
        got = ask(stack, prompt)
        assert got.token_ids == local.token_ids
        assert outcome(stack, got) == ("staged", "")


def test_nobody_else_gets_in_anywhere(stack: RunningStack, tmp_path: Path) -> None:
    stranger = Pki(tmp_path / "stranger")
    ours, theirs = tls_of(stack, "gateway"), stranger.settings("gateway")
    expired = Pki(tmp_path / "expired")
    expired.authority = expired.authority.load(certs(stack))
    old = expired.issue("gateway", begins_s=-2000, ends_s=-1000)
    ports = stack.stack.ports
    for port in (ports.d_agent, ports.p_agent):
        assert refusal(port, WATCH, b"", ours) is None
        for tls in (
            None,
            theirs,
            theirs.model_copy(update={"ca": ours.ca}),
            old.model_copy(update={"ca": ours.ca}),
        ):
            error = refusal(port, WATCH, b"", tls)
            assert isinstance(error, grpc.RpcError)
            assert error.code() is grpc.StatusCode.UNAVAILABLE
        error = refusal(port, WATCH, b"", tls_of(stack, "nobody"))
        assert isinstance(error, Unauthorized)
        assert "nobody is not among the peers" in error.message
        assert isinstance(refusal(port, "/grpc.health.v1.Health/Check", b"", None), grpc.RpcError)
    cancel = pb.CancelRequest(sessions=[1]).SerializeToString()
    error = refusal(ports.p_agent, CANCEL, cancel, ours)
    assert isinstance(error, Forbidden)
    assert "gateway may not prefill here" in error.message
    assert outcome(stack, ask(stack, prompt_of(300, "after"))) == ("staged", "")


def test_every_certificate_changes_while_requests_run_and_none_is_lost(
    stack: RunningStack,
) -> None:
    renewed = stack.log("d-agent").count("connected anew with the certificates")
    watched = stack.log("gateway").count("watching ")
    lost = stack.log("gateway").count("lost the feed")
    with asking(stack) as answers:
        for name in ("p-agent", "d-agent", "gateway"):
            make_certs(certs(stack), (), days=1, rotate=(name,))
        wait_until(
            lambda: (
                stack.log("d-agent").count("connected anew with the certificates") > renewed
                and stack.log("gateway").count("watching ") >= watched + 2
            ),
            20,
            "new channels",
        )
        before = len(answers)
        wait_until(lambda: len(answers) > before + 4, 20, "answers over them")
    assert len(answers) > 4
    assert {outcome(stack, answer) for answer in answers} == {("staged", "")}
    assert stack.log("gateway").count("lost the feed") == lost


def test_rights_and_keys_change_while_requests_run_and_none_is_lost(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    rights = AuthorisedClient(identity="d-agent", tenants=("acme",))
    with tls_stack(tmp_path / "stack", tiny_model_dir, authorised=(rights,)) as stack:
        assert_refused_and_served_at_d(stack)
        stack.stack.prefill_side(engine=ENGINE)
        with asking(stack) as answers:
            stack.terminate("p-agent")
            stack.restart("p-agent")
            stack.wait_link_ready()
        assert answers
        assert outcome(stack, ask(stack, prompt_of(500, "granted"))) == ("staged", "")
        change_the_transfer_key(stack)


def assert_refused_and_served_at_d(stack: RunningStack) -> None:
    """P knows the client but not for this tenant; who may not pair at all is in test_access."""
    prompt = prompt_of(500, "refused")
    local = stack.complete(prompt, url=stack.stack.d_engine_url, max_tokens=4, cache_salt="oracle")
    got = ask(stack, prompt)
    assert got.token_ids == local.token_ids
    assert outcome(stack, got) == ("local", "permission_error")
    assert "d-agent may not act for tenant ''" in stack.log("d-agent")


def change_the_transfer_key(stack: RunningStack) -> None:
    """Old key, both, new key, as docs/operations.md has it; one of two gateways always serves."""
    old, new = stack.stack.transfer_key, "the new key"
    (port,) = free_ports(1)
    first, second = stack.stack.gateway_url, f"http://127.0.0.1:{port}"

    def agent_takes(*keys: str) -> None:
        stack.stack.decode_side(agent={"transfer_keys": keys}, engine=ENGINE)
        stack.terminate("d-agent")
        stack.restart("d-agent")

    def last(url: str) -> tuple[str, str]:
        stack.wait_link_ready(url=url)
        answer = ask(stack, prompt_of(300, random.random()), url=url)
        return outcome(stack, answer, url)

    with asking(stack, first) as answers:
        agent_takes(old, new)
        assert last(first) == ("staged", "")
    assert answers
    settings = {**POLICY, "transfer_key": new}
    stack.add(stack.stack.gateway(name="gateway-2", port=port, settings=settings))
    stack.wait_link_ready(url=second)
    with asking(stack, first, second) as answers:
        wait_until(lambda: len(answers) >= 4, 20, "answers of both gateways")
        assert last(first) == last(second) == ("staged", "")
    with asking(stack, second) as answers:
        agent_takes(new)
        assert last(second) == ("staged", "")
    assert answers
    stack.wait_link_ready()
    ask(stack, prompt_of(300, "old"), url=first)
    assert "fetch turned down reason=unauthorized" in stack.log("d-agent")
