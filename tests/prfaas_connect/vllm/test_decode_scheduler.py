"""Decode side in vLLM's scheduler: what is asked of the agent, and what vLLM is told when."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from prfaas_connect.port.messages import (
    PORT_VERSION,
    Abort,
    Fetch,
    FetchDone,
    PortMessage,
    Release,
    Welcome,
)
from prfaas_connect.vllm.decode_scheduler import DecodeScheduler, common_prefix

BLOCK = 4
TOKEN_BYTES = 8
WELCOME = Welcome(PORT_VERSION, "agent", 1024, 100_000, True, "c1")


@dataclass
class Port:
    """Keeps what was sent."""

    up: bool = True
    sent: list[PortMessage] = field(default_factory=list)

    def send(self, message: PortMessage, blob: bytes | memoryview = b"") -> bool:
        if not self.up:
            return False
        self.sent.append(message)
        return True


@dataclass
class Request:
    request_id: str
    prompt_token_ids: list[int]
    kv_transfer_params: dict[str, Any] | None


def request(name: str = "r", tokens: int = 22, salt: str = "", first: int = 0) -> Request:
    params = {"transfer_id": f"t-{name}", "salt": salt}
    return Request(name, list(range(first, first + tokens)), params)


class Bench:
    """A DecodeScheduler with its port, driven as vLLM would."""

    def __init__(self, cached: int | None = None) -> None:
        self.port = Port()
        self.scheduler = DecodeScheduler(
            self.port,
            epoch="e",
            block_tokens=BLOCK,
            session_bytes=lambda start, end: TOKEN_BYTES * (end - start),
            cached_tokens=None if cached is None else (lambda _: cached),
            idle_wait_s=0.0,
        )
        self.scheduler.connected(WELCOME)

    def add(self, one: Request, computed: int = 0) -> None:
        """A request comes, vLLM asks for it once and plans a step."""
        self.scheduler.new_request(one)
        self.scheduler.matched_tokens(one, computed)
        self.scheduler.plan(0)

    def answer(self, status: str, number: int = 1, **fields: Any) -> None:
        places: dict[str, Any] = {"staging_offset": 64, "chunk_tokens": 8}
        self.scheduler.answered(
            FetchDone(f"e-{number}", status, fields.pop("reason", ""), **(places | fields))
        )

    def claim(self, one: Request, computed: int = 0) -> int:
        """What vLLM does once there is an answer; the tokens it was told."""
        tokens, later = self.scheduler.matched_tokens(one, computed)
        assert tokens
        assert later
        blocks = list(range(10, 10 + -(-(computed + tokens) // BLOCK)))
        self.scheduler.allocated(one, blocks, tokens)
        return tokens

    def sent(self, kind: type[PortMessage]) -> list[Any]:
        return [message for message in self.port.sent if isinstance(message, kind)]


def test_a_request_waits_until_its_kv_is_staged_and_is_loaded_once() -> None:
    bench, one = Bench(), request()
    bench.scheduler.new_request(one)
    assert bench.sent(Fetch) == []
    assert bench.scheduler.matched_tokens(one, 0) == (None, False)
    bench.scheduler.plan(0)
    assert bench.sent(Fetch) == [Fetch("e-1", one.kv_transfer_params or {}, 0, 21, 21)]
    for _ in range(3):
        assert bench.scheduler.matched_tokens(one, 0) == (None, False)
        assert not bench.scheduler.plan(0)

    bench.answer("staged")
    for _ in range(3):  # vLLM may ask again, when there are no blocks
        assert bench.scheduler.matched_tokens(one, 0) == (21, True)
    assert bench.claim(one) == 21
    plan = bench.scheduler.plan(0)
    (load,) = plan.loads
    assert (load.request_id, load.start, load.end) == ("r", 0, 21)
    assert (load.have, load.staged_end, load.offset, load.chunk_tokens) == (0, 21, 64, 8)
    assert load.block_ids == [10, 11, 12, 13, 14, 15]
    assert (load.connection, plan.connection, plan.verify) == ("c1", "c1", True)
    assert bench.sent(Release) == []

    bench.scheduler.loaded({"r"}, set(), {"e-1": "digest"})
    assert bench.sent(Release) == [Release("e-1", "imported", 21, "digest")]
    # vLLM allocates once more, for the last token, and preempts and asks again later.
    bench.scheduler.allocated(one, [], 0)
    assert bench.scheduler.matched_tokens(one, 0) == (0, False)
    bench.scheduler.finished(one)
    assert bench.sent(Release) == [Release("e-1", "imported", 21, "digest")]
    assert bench.sent(Abort) == []
    assert len(bench.scheduler) == 0


def test_where_the_prefix_cache_is_shown_the_transfer_starts_with_the_request() -> None:
    bench, one = Bench(cached=8), request()
    bench.scheduler.new_request(one)
    (fetch,) = bench.sent(Fetch)
    assert (fetch.have, fetch.want, fetch.uncached) == (8, 21, 13)


def test_requests_without_a_plan_are_none_of_ours() -> None:
    bench = Bench()
    for params in (None, {}, {"do_remote_prefill": True}):
        one = Request("r", [1, 2, 3], params)
        bench.add(one)
        assert bench.scheduler.matched_tokens(one, 0) == (0, False)
    short = Request("s", [1], {"transfer_id": "t"})
    bench.add(short)
    assert bench.scheduler.matched_tokens(short, 0) == (0, False)
    assert bench.port.sent == []


def test_what_came_in_part_is_used_up_to_a_whole_block() -> None:
    bench, one = Bench(), request()
    bench.add(one)
    bench.answer("partial", token_end=15)
    assert bench.scheduler.matched_tokens(one, 0) == (12, True)
    bench.claim(one)
    (load,) = bench.scheduler.plan(0).loads
    assert (load.start, load.end, load.staged_end) == (0, 12, 15)
    bench.scheduler.loaded({"r"}, set(), {})
    assert bench.sent(Release) == [Release("e-1", "imported", 12, "")]


def test_only_what_the_prefix_cache_lacks_by_now_is_loaded() -> None:
    bench, one = Bench(), request()
    bench.add(one, computed=4)
    assert bench.sent(Fetch)[0].have == 4
    bench.answer("staged")
    assert bench.scheduler.matched_tokens(one, 12) == (9, True)
    bench.claim(one, computed=12)
    (load,) = bench.scheduler.plan(0).loads
    assert (load.have, load.start, load.end, load.first_block) == (4, 12, 21, 3)


def test_nothing_is_loaded_over_a_gap_that_eviction_left() -> None:
    bench, one = Bench(), request()
    bench.add(one, computed=8)
    bench.answer("staged")
    assert bench.scheduler.matched_tokens(one, 4) == (0, False)
    bench.scheduler.allocated(one, [1, 2], 0)
    assert bench.sent(Release) == [Release("e-1", "aborted", 0, "")]


def test_a_request_whose_prompt_is_cached_by_now_goes_on_and_frees_staging() -> None:
    bench, one = Bench(), request(tokens=21)
    bench.add(one)
    bench.answer("staged")
    assert bench.scheduler.matched_tokens(one, 20) == (0, False)
    bench.scheduler.allocated(one, [1, 2], 0)
    assert bench.sent(Release) == [Release("e-1", "imported", 0, "")]


def test_a_request_that_has_everything_only_tells_its_agent() -> None:
    bench, one = Bench(), request(tokens=21)
    bench.add(one, computed=20)
    assert [(f.have, f.want) for f in bench.sent(Fetch)] == [(20, 20)]
    assert bench.scheduler.matched_tokens(one, 20) == (0, False)
    bench.answer("local", reason="prefix_at_d")
    bench.scheduler.finished(one)
    assert len(bench.port.sent) == 1


@pytest.mark.parametrize("status", ["local", "unheard of"])
def test_what_the_agent_leaves_to_d_goes_on_at_once(status: str) -> None:
    bench, one = Bench(), request()
    bench.add(one)
    bench.answer(status, reason="peer_unavailable")
    for _ in range(3):
        assert bench.scheduler.matched_tokens(one, 0) == (0, False)
        bench.scheduler.new_request(one)
        bench.scheduler.plan(0)
    bench.scheduler.finished(one)
    assert len(bench.port.sent) == 1


def test_a_refusal_claims_one_block_and_fails_on_it() -> None:
    bench, one = Bench(), request()
    bench.add(one)
    bench.answer("refused", reason="overloaded", message="P is full")
    assert bench.claim(one, computed=8) == 1
    plan = bench.scheduler.plan(0)
    assert plan.failures == {"r": [12]}
    assert plan.loads == []
    # vLLM under the policy "fail": the request ends first, then the report is read.
    bench.scheduler.finished(one)
    bench.scheduler.loaded({"r"}, {12}, {})
    assert len(bench.port.sent) == 1
    assert len(bench.scheduler) == 0


def test_a_failed_load_is_remembered_and_its_staging_freed() -> None:
    bench, one = Bench(), request()
    bench.add(one)
    bench.answer("staged")
    bench.claim(one)
    bench.scheduler.plan(0)
    bench.scheduler.loaded((), {11}, {})
    assert bench.sent(Release) == []
    bench.scheduler.loaded({"r"}, set(), {})
    assert bench.sent(Release) == [Release("e-1", "failed", 0, "")]
    # Under another policy vLLM would ask for it again, for ever.
    assert bench.scheduler.matched_tokens(one, 0) == (0, False)


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"staging_offset": -1}, "staged"),
        ({"staging_offset": 100_000 - 8}, "staged"),
        ({"chunk_tokens": 0}, "staged"),
        ({"token_end": 22}, "partial"),
        ({"token_end": 0}, "partial"),
    ],
)
def test_an_answer_that_contradicts_itself_is_not_believed(
    fields: dict[str, Any], status: str
) -> None:
    bench, one = Bench(), request()
    bench.add(one)
    bench.answer(status, **fields)
    assert bench.scheduler.matched_tokens(one, 0) == (0, False)
    assert bench.sent(Release) == [Release("e-1", "failed", 0, "")]


def test_a_client_that_leaves_while_its_kv_is_fetched_aborts_the_session() -> None:
    bench, one = Bench(), request()
    bench.add(one)
    bench.scheduler.finished(one)
    assert bench.sent(Abort) == [Abort("e-1")]
    bench.answer("staged")
    bench.scheduler.plan(0)
    assert bench.sent(Release) == []
    assert len(bench.scheduler) == 0


def test_a_client_that_leaves_before_anything_was_asked_leaves_nothing() -> None:
    bench, one = Bench(), request()
    bench.scheduler.new_request(one)
    bench.scheduler.finished(one)
    assert not bench.scheduler.plan(0)
    assert bench.port.sent == []


def test_a_client_that_leaves_when_its_kv_is_staged_frees_staging() -> None:
    bench, one = Bench(), request()
    bench.add(one)
    bench.answer("staged")
    bench.scheduler.matched_tokens(one, 0)
    bench.scheduler.finished(one)
    assert bench.sent(Release) == [Release("e-1", "aborted", 0, "")]


def test_a_client_that_leaves_while_loading_frees_staging_once_the_worker_has_stopped() -> None:
    bench, one = Bench(), request()
    bench.add(one)
    bench.answer("staged")
    bench.claim(one)
    bench.scheduler.plan(0)
    bench.scheduler.finished(one)
    assert bench.sent(Release) == []
    assert bench.scheduler.plan(0).cancels == ["r"]
    assert bench.scheduler.plan(0).cancels == []
    bench.scheduler.loaded({"r"}, set(), {})
    assert bench.sent(Release) == [Release("e-1", "aborted", 0, "")]


def test_when_the_agent_goes_those_who_wait_go_on_alone_and_loads_run_on() -> None:
    bench = Bench()
    waits, staged, loads, refused = (
        request(name, first=1000 * index) for index, name in enumerate(["w", "s", "l", "x"])
    )
    for one in (waits, staged, loads, refused):
        bench.add(one)
    bench.answer("staged", 2)
    bench.answer("staged", 3)
    bench.answer("refused", 4)
    bench.claim(loads)
    bench.scheduler.plan(0)
    bench.port.up = False
    bench.scheduler.disconnected("killed")
    assert bench.scheduler.matched_tokens(waits, 0) == (0, False)
    assert bench.scheduler.matched_tokens(staged, 0) == (0, False)
    assert bench.scheduler.matched_tokens(refused, 0) == (1, True)
    bench.scheduler.loaded({"l"}, set(), {})
    assert bench.sent(Release) == []
    bench.scheduler.finished(refused)
    assert len(bench.scheduler) == 0


def test_a_load_names_the_memory_it_is_in_whatever_the_port_has_by_then() -> None:
    bench, one = Bench(), request()
    bench.add(one)
    bench.answer("staged")
    bench.claim(one)
    bench.scheduler.disconnected("killed")
    bench.scheduler.connected(Welcome(PORT_VERSION, "agent", 1024, 100_000, True, "c2"))
    plan = bench.scheduler.plan(0)
    assert (plan.loads[0].connection, plan.connection) == ("c1", "c2")


def test_without_an_agent_requests_are_served_alone() -> None:
    bench, one = Bench(), request()
    bench.port.up = False
    bench.add(one)
    assert bench.scheduler.matched_tokens(one, 0) == (0, False)


def test_another_connector_may_bring_the_kv_instead() -> None:
    bench, one = Bench(), request()
    bench.add(one)
    bench.answer("staged")
    assert bench.scheduler.matched_tokens(one, 0) == (21, True)
    bench.scheduler.allocated(one, [], 0)
    assert bench.sent(Release) == [Release("e-1", "aborted", 0, "")]
    assert bench.scheduler.matched_tokens(one, 0) == (0, False)


def test_a_prefix_that_is_on_its_way_is_not_fetched_twice() -> None:
    bench, first, second = Bench(), request("a"), request("b")
    second.prompt_token_ids[20] = 99
    bench.add(first)
    bench.add(second)
    assert len(bench.sent(Fetch)) == 1
    bench.answer("staged")
    bench.claim(first)
    bench.scheduler.plan(0)
    assert bench.scheduler.matched_tokens(second, 0) == (None, False)
    bench.scheduler.loaded({"a"}, set(), {})
    # What vLLM said of the prefix cache is out of date: it is asked first.
    bench.scheduler.plan(0)
    assert len(bench.sent(Fetch)) == 1
    assert bench.scheduler.matched_tokens(second, 20) == (None, False)
    bench.scheduler.plan(0)
    assert [f.have for f in bench.sent(Fetch)] == [0, 20]


def test_another_salt_shares_no_prefix() -> None:
    bench = Bench()
    bench.add(request("a", salt="x"))
    bench.add(request("b", salt="y"))
    assert len(bench.sent(Fetch)) == 2


@pytest.mark.parametrize("end", ["aborted", "refused", "local"])
def test_who_waits_for_anothers_prefix_fetches_it_when_that_one_fails(end: str) -> None:
    bench, first, second = Bench(), request("a"), request("b")
    bench.add(first)
    bench.add(second)
    if end == "aborted":
        bench.scheduler.finished(first)
    else:
        bench.answer(end)
    assert bench.scheduler.matched_tokens(second, 0) == (None, False)
    bench.scheduler.plan(0)
    assert [f.session for f in bench.sent(Fetch)] == ["e-1", "e-2"]


def test_blocks_that_cannot_hold_the_tokens_fail_the_load() -> None:
    bench, one = Bench(), request()
    bench.add(one)
    bench.answer("staged")
    bench.scheduler.matched_tokens(one, 0)
    bench.scheduler.allocated(one, [10, 11], 21)
    plan = bench.scheduler.plan(0)
    assert plan.failures == {"r": [10, 11]}
    bench.scheduler.loaded({"r"}, {10, 11}, {})
    assert bench.sent(Release) == [Release("e-1", "failed", 0, "")]


def test_common_prefix_counts_tokens() -> None:
    one, other = np.array([1, 2, 3, 4]), np.array([1, 2, 9])
    assert common_prefix(one, other) == 2
    assert common_prefix(one, one[:3]) == 3
    assert common_prefix(one, other[:0]) == 0
