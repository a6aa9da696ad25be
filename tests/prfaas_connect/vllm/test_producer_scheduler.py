"""Exports in vLLM's scheduler: announced, joined by a request, planned step by step, ended once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from prfaas_connect.port.layout import GroupKind, KvLayout, LayerGroup
from prfaas_connect.port.messages import (
    PortMessage,
    PrefillCancel,
    PrefillEnd,
    PrefillStart,
    Welcome,
)
from prfaas_connect.vllm.layouts import HeadRange
from prfaas_connect.vllm.producer_plan import ExportOpen, ExportStep, PrefillPlan
from prfaas_connect.vllm.producer_scheduler import EXPORT_PARAM, START_WAIT_S, ProducerScheduler

LAYERS, CHUNK, BLOCK = 3, 64, 32
LAYOUT = KvLayout((LayerGroup(GroupKind.FULL, tuple(range(LAYERS)), 4, 8, "float32"),))


class Port:
    """An engine's port that remembers what is said on it."""

    def __init__(self) -> None:
        self.ring_bytes = 1 << 20
        self.sent: list[PortMessage] = []

    def send(self, message: PortMessage, blob: bytes | memoryview = b"") -> bool:
        self.sent.append(message)
        return True

    def ends(self) -> list[PrefillEnd]:
        sent, self.sent = self.sent, []
        assert all(isinstance(message, PrefillEnd) for message in sent)
        return [message for message in sent if isinstance(message, PrefillEnd)]


class Site:
    """The scheduler's half with a clock, and requests as vLLM shows them."""

    def __init__(self, ranks: int = 1, **options: Any) -> None:
        self.now = 100.0
        self.known = False
        """What the answer of the last request that ended says."""
        self.port = Port()
        self.producer = ProducerScheduler(
            self.port,
            LAYOUT,
            chunk_tokens=CHUNK,
            vocab_size=1000,
            max_tokens=4096,
            ranks=[HeadRange.of_rank(rank, ranks, 4) for rank in range(ranks)],
            clock=lambda: self.now,
            **options,
        )
        self.producer.connected(Welcome(1, "agent", 1, 1, connection="c1"))

    def announce(self, session: str, count: int, send_from: int = 0, **fields: Any) -> None:
        start = PrefillStart(session, 1, send_from, **fields)
        self.producer.handle(start, tokens(count).astype("<i4").tobytes())

    def request(self, session: str, count: int, name: str = "") -> Any:
        return SimpleNamespace(
            request_id=name or f"req-{session}",
            kv_transfer_params={EXPORT_PARAM: {"session": session, "epoch": 1}},
            prompt_token_ids=tokens(count).tolist(),
            num_computed_tokens=0,
            status=SimpleNamespace(name="RUNNING"),
        )

    def joined(self, session: str, count: int, send_from: int = 0) -> Any:
        self.announce(session, count, send_from)
        request = self.request(session, count)
        assert self.producer.matched_tokens(request) == (0, False)
        return request

    def step(self, new: Any = (), cached: Any = (), resumed: Any = ()) -> PrefillPlan:
        """`new`: (id, blocks, computed, tokens); `cached`: (id, new blocks or None, ...)."""
        scheduled = {entry[0]: entry[3] for entry in (*new, *cached)}
        output = SimpleNamespace(
            total_num_scheduled_tokens=sum(scheduled.values()),
            num_scheduled_tokens=scheduled,
            scheduled_new_reqs=[
                SimpleNamespace(req_id=name, block_ids=(blocks,), num_computed_tokens=computed)
                for name, blocks, computed, _ in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[entry[0] for entry in cached],
                new_block_ids=[(entry[1],) if entry[1] is not None else None for entry in cached],
                num_computed_tokens=[entry[2] for entry in cached],
                resumed_req_ids=set(resumed),
            ),
        )
        return self.producer.plan(output)

    def finish(self, request: Any, computed: int, status: str = "FINISHED_LENGTH_CAPPED") -> bool:
        request.num_computed_tokens = computed
        request.status = SimpleNamespace(name=status)
        keeps, answer = self.producer.finished(request)
        self.known = answer[EXPORT_PARAM]["known"]
        return keeps


def tokens(count: int) -> np.ndarray:
    return np.arange(count) * 7 % 1000


@pytest.fixture
def site() -> Site:
    return Site()


def test_an_export_of_several_chunks_collects_its_blocks_and_ends_when_sent(site: Site) -> None:
    request = site.joined("x1", 150)
    site.now += 1
    plan = site.step(new=[("req-x1", [4, 9], 0, 64)])
    assert plan.connection == "c1"
    assert plan.opens == [ExportOpen("req-x1", "x1", 1, 0, 150, 0)]
    assert plan.steps == [ExportStep("req-x1", [4, 9], 64)]
    plan = site.step(cached=[("req-x1", [2, 7], 64, 64)])
    assert (plan.opens, plan.steps) == ([], [ExportStep("req-x1", [2, 7], 128)])
    plan = site.step(cached=[("req-x1", [8], 128, 22)])
    assert plan.steps == [ExportStep("req-x1", [8], 150)]
    site.now += 2
    assert site.finish(request, 150)
    assert site.known
    assert site.port.ends() == []
    assert site.step().kept == ["req-x1"]
    assert site.step().kept == []
    site.producer.sent(["other", "req-x1"])
    (end,) = site.port.ends()
    assert (end.session, end.status, end.records) == ("x1", "done", 3 * LAYERS)
    assert (end.cached_tokens, end.computed_tokens) == (0, 150)
    assert (end.queue_s, end.compute_s) == (1, 2)
    site.producer.sent(["req-x1"])
    assert site.port.ends() == []
    assert not site.step()


def test_ranks_count_their_records_and_copies_of_heads_do_not() -> None:
    for ranks, exporting in ((2, 2), (8, 4)):
        site = Site(ranks=ranks)
        request = site.joined("x1", 65)
        site.step(new=[("req-x1", [1, 2, 3], 0, 65)])
        assert site.finish(request, 65)
        site.producer.sent(["req-x1"])
        assert site.port.ends()[0].records == 2 * LAYERS * exporting


def test_what_the_prefix_cache_had_is_told(site: Site) -> None:
    site.joined("x1", 150, send_from=64)
    plan = site.step(new=[("req-x1", [1, 2, 3, 4, 5], 96, 54)])
    assert plan.opens == [ExportOpen("req-x1", "x1", 1, 64, 150, 96)]
    assert plan.steps == [ExportStep("req-x1", [1, 2, 3, 4, 5], 150)]


def test_a_request_before_its_announcement_waits_a_little(site: Site) -> None:
    request = site.request("x1", 40)
    assert site.producer.owns(request)
    assert site.producer.matched_tokens(request) == (None, False)
    site.announce("x1", 40)
    assert site.producer.matched_tokens(request) == (0, False)
    stranger = site.request("x2", 40)
    assert site.producer.matched_tokens(stranger) == (None, False)
    site.now += START_WAIT_S
    assert site.producer.matched_tokens(stranger) == (0, False)
    assert not site.step(new=[("req-x2", [1, 2], 0, 40)])
    assert not site.finish(stranger, 40)
    assert not site.known
    assert site.port.ends() == []


def test_where_vllm_lets_nobody_wait_a_stranger_goes_on_at_once() -> None:
    site = Site(may_wait=False)
    assert site.producer.matched_tokens(site.request("x1", 40)) == (0, False)


def test_other_requests_are_none_of_ours(site: Site) -> None:
    for params in (None, {}, {"version": 1}, "text"):
        assert not site.producer.owns(SimpleNamespace(kv_transfer_params=params))


@pytest.mark.parametrize("named", [None, "x1", {}, {"session": "x1", "epoch": 2}, {"session": 1}])
def test_a_request_that_names_no_export_of_ours_exports_nothing(site: Site, named: Any) -> None:
    site.announce("x1", 40)
    request = site.request("x1", 40)
    request.kv_transfer_params = {EXPORT_PARAM: named}
    site.now += START_WAIT_S
    site.producer.matched_tokens(request)
    site.now += START_WAIT_S
    assert site.producer.matched_tokens(request) == (0, False)
    assert not site.step(new=[("req-x1", [1, 2], 0, 40)])


def test_an_export_is_taken_by_one_request_only(site: Site) -> None:
    site.joined("x1", 40)
    thief = site.request("x1", 40, name="thief")
    assert site.producer.matched_tokens(thief) == (None, False)


def test_other_tokens_under_an_export_s_name_end_it(site: Site) -> None:
    site.announce("x1", 40)
    request = site.request("x1", 41)
    site.producer.matched_tokens(request)
    (end,) = site.port.ends()
    assert (end.status, end.reason.split(":")[0]) == ("failed", "invalid_request")


def test_cancel_before_while_and_after_computing_ends_once_and_drops(site: Site) -> None:
    site.announce("x0", 40)
    site.producer.handle(PrefillCancel("x0", 1), b"")
    site.producer.handle(PrefillCancel("x0", 1), b"")
    assert not site.step()
    assert [end.status for end in site.port.ends()] == ["cancelled"]

    request = site.joined("x1", 150)
    site.step(new=[("req-x1", [1, 2], 0, 64)])
    site.producer.handle(PrefillCancel("x1", 1), b"")
    plan = site.step(cached=[("req-x1", [3], 64, 20)])
    assert (plan.drops, plan.steps) == (["req-x1"], [])
    assert [end.status for end in site.port.ends()] == ["cancelled"]
    assert not site.finish(request, 84, "FINISHED_ABORTED")
    assert site.port.ends() == []

    request = site.joined("x2", 64)
    site.step(new=[("req-x2", [1, 2], 0, 64)])
    assert site.finish(request, 64)
    site.producer.handle(PrefillCancel("x2", 1), b"")
    plan = site.step()
    # vLLM keeps the blocks all the same until the workers name the request.
    assert (plan.drops, plan.kept) == (["req-x2"], ["req-x2"])
    site.producer.sent(["req-x2"])
    assert [end.status for end in site.port.ends()] == ["cancelled"]


def test_a_request_that_vllm_ends_early_fails_its_export(site: Site) -> None:
    for status, computed in (("FINISHED_ABORTED", 64), ("FINISHED_ERROR", 150)):
        request = site.joined("x1", 150)
        site.step(new=[("req-x1", [1, 2], 0, 64)])
        assert not site.finish(request, computed, status)
        (end,) = site.port.ends()
        assert (end.status, end.reason.split(":")[0]) == ("failed", "engine_unavailable")
        assert site.step().drops == ["req-x1"]


def test_who_is_not_in_a_step_is_held_and_comes_back_with_other_blocks(site: Site) -> None:
    site.joined("x1", 150)
    site.step(new=[("req-x1", [1, 2], 0, 64)])
    assert site.step().held == ["req-x1"]
    plan = site.step(cached=[("req-x1", [5, 6], 0, 64)], resumed=["req-x1"])
    assert plan.held == []
    assert plan.steps == [ExportStep("req-x1", [5, 6], 64, replaces=True)]
    # As the other model runner says it: as if the request were new.
    assert site.step().held == ["req-x1"]
    plan = site.step(new=[("req-x1", [8, 9], 32, 32)])
    assert (plan.opens, plan.steps) == ([], [ExportStep("req-x1", [8, 9], 64, replaces=True)])


def test_flags_of_earlier_versions_say_who_was_preempted(site: Site) -> None:
    site.joined("x1", 150)
    site.step(new=[("req-x1", [1, 2], 0, 64)])
    output = SimpleNamespace(
        total_num_scheduled_tokens=64,
        num_scheduled_tokens={"req-x1": 64},
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=["req-x1"],
            new_block_ids=[([3, 4],)],
            num_computed_tokens=[0],
            resumed_from_preemption=[True],
        ),
    )
    assert site.producer.plan(output).steps[0].replaces


def test_a_lost_connection_voids_everything_without_a_word(site: Site) -> None:
    site.announce("x0", 10)
    running, draining = site.joined("x1", 150), site.joined("x2", 64)
    site.step(new=[("req-x1", [1, 2], 0, 64), ("req-x2", [3, 4], 0, 64)])
    assert site.finish(draining, 64)
    site.producer.disconnected("gone")
    site.producer.connected(Welcome(1, "agent", 1, 1, connection="c2"))
    plan = site.step()
    assert plan.connection == "c2"
    assert sorted(plan.drops) == ["req-x1", "req-x2"]
    assert plan.kept == ["req-x2"]
    assert not site.finish(running, 150)
    site.producer.sent(["req-x2"])
    assert (site.port.ends(), len(site.producer)) == ([], 0)


@pytest.mark.parametrize(
    ("count", "send_from", "blob", "kind"),
    [
        (0, 0, None, "invalid_request"),
        (4096, 0, None, "invalid_request"),
        (10, 11, None, "invalid_request"),
        (10, 0, b"\1\0\0", "invalid_request"),
        (10, 0, np.array([5, 1000], "<i4").tobytes(), "invalid_request"),
        (10, 0, np.array([5, -1], "<i4").tobytes(), "invalid_request"),
    ],
)
def test_impossible_announcements_are_refused(
    site: Site, count: int, send_from: int, blob: bytes | None, kind: str
) -> None:
    data = tokens(count).astype("<i4").tobytes() if blob is None else blob
    site.producer.handle(PrefillStart("x1", 1, send_from), data)
    site.step()
    (end,) = site.port.ends()
    assert (end.status, end.reason.split(":")[0]) == ("failed", kind)
    assert len(site.producer) == 0


def test_a_second_announcement_and_a_small_ring_are_refused(site: Site) -> None:
    site.announce("x1", 10)
    site.announce("x1", 10)
    site.step()
    assert [end.reason.split(":")[0] for end in site.port.ends()] == ["invalid_request"]
    site.port.ring_bytes = 100
    site.announce("x2", 10)
    site.step()
    assert [end.reason.split(":")[0] for end in site.port.ends()] == ["internal_error"]


def test_without_the_role_only_the_probe_is_answered() -> None:
    site = Site(serves=False)
    site.announce("x1", 10)
    site.announce("x2", 10, use_cache=False)
    site.step()
    assert [(end.session, end.status) for end in site.port.ends()] == [("x1", "failed")]
    assert len(site.producer) == 1
