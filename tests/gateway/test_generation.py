"""One request from end to end on real sockets: decided, signed, relayed, recorded."""

import asyncio
import json
import logging
from typing import Any

import pytest

from prfaas.hashing import block_chain, cache_salt
from prfaas.snapshot import Outcome
from prfaas.testing.gateway_setup import (
    BLOCK_TOKENS,
    ENGINE,
    INSTANCE,
    KEY,
    MODEL,
    PEER,
    PLACE,
    ByteTokenizer,
    completion,
    link,
    until,
)
from prfaas.testing.scripted_engine import Script
from prfaas.transfer import PlanStep, TransferParams, parse, sign, verify

SHORT = {"model": MODEL, "prompt": "hi", "max_tokens": 4}
DECISIONS = "prfaas_gateway_decisions_total"


def sent_params(cluster: Any, at: int = -1) -> TransferParams | None:
    found = cluster.engine.seen[at].body.get("kv_transfer_params")
    return parse(found) if found is not None else None


def outcome_of(cluster: Any, status: str = "staged", **fields: Any) -> Outcome:
    params = sent_params(cluster)
    assert params is not None
    return Outcome(params.transfer_id, status, peer=PEER, instance=INSTANCE, **fields)


async def swamp_d(cluster: Any) -> None:
    """A queue at D so long that several prompts in a row go to P."""
    cluster.d.change(queue_tokens=20_000, waiting=10)
    load = cluster.gateway.view.feeds["d-0"]
    await until(lambda: load.engine.waiting == 10, "the change")


# --- decided and signed -----------------------------------------------------------------------


async def test_a_long_prompt_leaves_a_busy_d_under_a_signed_plan(cluster: Any) -> None:
    status, text, response = await cluster.post(completion(stream=True, temperature=0.5))
    assert status == 200
    assert text.endswith("data: [DONE]\n\n")
    assert response.headers["x-prfaas-target"] == "remote"
    params = sent_params(cluster)
    verify(params, [KEY.encode()], 0)
    assert params.plan == (PlanStep(PEER, INSTANCE),)
    assert (params.on_failure, params.quality, params.salt) == ("local", "exact", "")
    body = dict(cluster.engine.seen[0].body)
    del body["kv_transfer_params"]
    assert body == completion(stream=True, temperature=0.5)
    record = await cluster.record(response.headers["x-request-id"])
    assert record["decision"]["reason"] == "remote_faster"
    assert record["decision"]["plan"] == [[PEER, INSTANCE]]
    assert [e["where"] for e in record["decision"]["estimates"]] == ["local", PLACE]
    assert (record["status"], record["target"]) == ("200", "remote")
    assert record["ttft_s"] > 0
    assert record["e2e_s"] >= record["ttft_s"]
    assert await cluster.metric(DECISIONS, target="remote", reason="remote_faster") == 1
    assert await cluster.metric("prfaas_gateway_offloaded_tokens_total") == 1999
    assert await cluster.metric("prfaas_gateway_ttft_seconds_count", target="remote") == 1


async def test_a_chat_is_offloaded_too(cluster: Any) -> None:
    messages = [{"role": "user", "content": "x" * 2000}]
    status, answer, response = await cluster.post({"model": MODEL, "messages": messages}, "chat")
    assert status == 200
    assert answer["choices"][0]["message"]["content"] == "Hello, world."
    assert response.headers["x-prfaas-target"] == "remote"
    assert sent_params(cluster) is not None


async def test_a_short_body_stays_local_without_being_tokenised(make_cluster: Any) -> None:
    class Never(ByteTokenizer):
        def encode(self, text: str, add_special: bool = False) -> list[int]:
            if text != "hi":  # the check at start has a sample of its own
                return super().encode(text)
            raise AssertionError("tokenised")

    async with make_cluster(tokenizer=Never()) as cluster:
        status, _, response = await cluster.post(SHORT)
        assert status == 200
        assert response.headers["x-prfaas-target"] == "local"
        assert sent_params(cluster) is None
        assert cluster.engine.seen[0].raw_body == json.dumps(SHORT).encode()
        record = await cluster.record(response.headers["x-request-id"])
        assert record["decision"]["reason"] == "too_short"
        assert len(record["decision"]["estimates"]) == 2


async def test_four_ways_to_stay_local_are_counted_apart(make_cluster: Any) -> None:
    """Case 1."""
    async with make_cluster(offload=False) as cluster:
        await cluster.post(completion())
        assert await cluster.metric(DECISIONS, target="local", reason="offload_off") == 1
        assert sent_params(cluster) is None
    async with make_cluster() as cluster:
        await cluster.post(SHORT)
        cluster.d.stored(*block_chain([120] * 2000, BLOCK_TOKENS))
        await until(lambda: cluster.gateway.view.index.blocks("d-0"), "the cache events")
        await cluster.post(completion())
        cluster.d.publishes_cache_events = False
        cluster.d.end_streams()
        await until(lambda: cluster.d.streams == 2, "a new stream")
        await until(lambda: cluster.gateway.view.feeds["d-0"].connected, "its full event")
        await cluster.post(completion())
        for reason in ("too_short", "mostly_cached", "no_cache_info"):
            assert await cluster.metric(DECISIONS, target="local", reason=reason) == 1
        assert await cluster.metric("prfaas_gateway_cache_events", engine="d-0") == 0


async def test_a_cached_prefix_at_d_is_not_sent_for(cluster: Any) -> None:
    cluster.d.stored(*block_chain([120] * 1600, BLOCK_TOKENS))
    await until(lambda: cluster.gateway.view.index.blocks("d-0"), "the cache events")
    _, _, response = await cluster.post(completion())
    record = await cluster.record(response.headers["x-request-id"])
    assert record["snapshot"]["local"]["matched_tokens"] == 1600
    assert record["decision"]["uncached_tokens"] == 399


@pytest.mark.parametrize(
    "fields",
    [{"echo": True}, {"n": 2}, {"prompt_logprobs": 1}, {"prompt": ["x" * 900, "y" * 900]}],
)
async def test_what_cannot_be_offloaded_stays_with_reason_feature(
    cluster: Any, fields: dict[str, Any]
) -> None:
    _, _, response = await cluster.post(completion(**fields))
    record = await cluster.record(response.headers["x-request-id"])
    assert (record["target"], record["decision"]["reason"]) == ("local", "feature")
    assert record["facts"]["features"]
    assert sent_params(cluster) is None


async def test_any_openai_server_without_our_connector_is_served_locally(
    make_cluster: Any,
) -> None:
    async with make_cluster(agents=False) as cluster:
        status, _, response = await cluster.post(completion())
        assert status == 200
        record = await cluster.record(response.headers["x-request-id"])
        assert (record["target"], record["decision"]["reason"]) == ("local", "feature")


async def test_old_telemetry_counts_as_unknown(cluster: Any) -> None:
    """Case 12."""
    cluster.p.silent = True
    cluster.gateway.view.feeds[PLACE].heard_at -= 10
    _, _, response = await cluster.post(completion())
    record = await cluster.record(response.headers["x-request-id"])
    assert (record["target"], record["decision"]["reason"]) == ("local", "stale")


async def test_a_burst_sees_what_was_just_sent(cluster: Any) -> None:
    """Case 42: the feeds stand still, the estimates do not."""
    await swamp_d(cluster)
    cluster.engine.script = Script(first_delay_s=0.3)
    tasks = [asyncio.create_task(cluster.post(completion())) for _ in range(3)]
    results = await asyncio.gather(*tasks)
    records = [await cluster.record(r.headers["x-request-id"]) for _, _, r in results]
    sent = sorted(r["snapshot"]["remotes"][0]["load"]["sent_tokens"] for r in records)
    assert sent == [0, 1999, 3998]


# --- nowhere to go, and the fallback budget ---------------------------------------------------


async def test_always_remote_without_an_instance_rejects_or_serves_as_told(
    make_cluster: Any,
) -> None:
    """Case 2: never silently."""
    policy = {"name": "always_remote"}
    async with make_cluster(policy=policy, on_failure="reject") as cluster:
        cluster.d.change_link(ready=False)
        await until(
            lambda: not cluster.gateway.view.snapshot(ENGINE, {}).remotes[0].ready, "the change"
        )
        status, answer, response = await cluster.post(completion())
        assert status == 503
        assert response.headers["retry-after"] == "1"
        assert answer["error"]["type"] == "prefill_unavailable"
        assert "no_peer" in answer["error"]["message"]
        assert not cluster.engine.seen
    async with make_cluster(policy=policy, on_failure="local") as cluster:
        cluster.d.change_link(ready=False)
        await until(
            lambda: not cluster.gateway.view.snapshot(ENGINE, {}).remotes[0].ready, "the change"
        )
        status, _, response = await cluster.post(completion())
        assert status == 200
        assert response.headers["x-prfaas-target"] == "local"
        assert await cluster.metric("prfaas_gateway_fallbacks_total", reason="no_peer") == 1


async def test_fallback_to_d_is_granted_only_within_the_budget(make_cluster: Any) -> None:
    """Case 18."""
    async with make_cluster(limits={"fallback_budget_tokens": 3000}) as cluster:
        await swamp_d(cluster)
        cluster.engine.script = Script(first_delay_s=0.3)
        tasks = [asyncio.create_task(cluster.post(completion())) for _ in range(2)]
        await until(lambda: len(cluster.engine.seen) == 2, "both at the engine")
        granted = sorted(sent_params(cluster, at).on_failure for at in range(2))
        assert granted == ["local", "reject"]
        assert cluster.gateway.budget.granted_tokens == 1999
        await asyncio.gather(*tasks)
        await cluster.post(completion())
        assert sent_params(cluster).on_failure == "local"


async def test_an_outcome_frees_the_budget_before_the_answer_ends(cluster: Any) -> None:
    cluster.engine.script = Script(first_delay_s=0.5)
    task = asyncio.create_task(cluster.post(completion()))
    await until(lambda: cluster.engine.seen, "the request at the engine")
    assert cluster.gateway.budget.granted_tokens == 1999
    cluster.d.outcome(outcome_of(cluster))
    await until(lambda: cluster.gateway.budget.granted_tokens == 0, "the grant to end")
    assert not task.done()
    await task


# --- outcomes and the record --------------------------------------------------------------------


async def test_the_outcome_reaches_record_metrics_and_policy(cluster: Any) -> None:
    _, _, response = await cluster.post(completion())
    phases = {"total": 1.0, "import": 0.5}
    cluster.d.outcome(
        outcome_of(cluster, raw_bytes=1000, wire_bytes=800, received_tokens=9, phases=phases)
    )
    record_id = response.headers["x-request-id"]
    record = cluster.gateway.records.get(record_id)
    await until(lambda: record.outcome, "the outcome")
    shown = (await cluster.record(record_id))["outcome"]
    assert (shown["status"], shown["wire_bytes"], shown["phases"]) == ("staged", 800, phases)
    assert await cluster.metric("prfaas_gateway_kv_raw_bytes_total") == 1000
    assert await cluster.metric("prfaas_gateway_kv_wire_bytes_total") == 800
    assert await cluster.metric("prfaas_gateway_outcomes_total", status="staged") == 1
    _, _, response = await cluster.post(completion())
    later = await cluster.record(response.headers["x-request-id"])
    assert later["policy_state"] == {"seconds": 0.5, "raw_bytes": 1000.0}


@pytest.mark.parametrize("status", ["local", "partial", "refused", "failed"])
async def test_a_fallback_is_counted_with_its_reason(cluster: Any, status: str) -> None:
    """Case 13."""
    await cluster.post(completion())
    cluster.d.outcome(outcome_of(cluster, status, reason="peer_unavailable"))
    value, labels = cluster.gateway.metrics.registry.get_sample_value, {"status": status}
    await until(lambda: value("prfaas_gateway_outcomes_total", labels), "the outcome")
    name = "prfaas_gateway_fallbacks_total"
    assert await cluster.metric(name, reason="peer_unavailable") == 1


async def test_outcomes_of_other_gateways_are_not_ours(cluster: Any) -> None:
    cluster.d.outcome(Outcome("somebody else's", "failed", reason="x", raw_bytes=5))
    cluster.d.change(queue_tokens=1)
    await until(
        lambda: cluster.gateway.view.snapshot(ENGINE, {}).local.load.queue_tokens == 1, "the feed"
    )
    assert await cluster.metric("prfaas_gateway_kv_raw_bytes_total") == 0


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [json.loads(r.message) for r in caplog.records if r.name == "gateway.request"]


async def test_one_log_line_for_each_request_waits_for_its_outcome(
    cluster: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "gateway.request"):
        await cluster.post(completion("secret words " * 200))
        assert lines(caplog) == []
        cluster.d.outcome(outcome_of(cluster))
        await until(lambda: lines(caplog), "the line")
        await cluster.post(SHORT)
        await until(lambda: len(lines(caplog)) == 2, "the other line")
    offloaded, local = lines(caplog)
    assert offloaded["outcome"]["status"] == "staged"
    assert offloaded["decision"]["reason"] == "remote_faster"
    assert (local["decision"]["reason"], local["outcome"]) == ("too_short", None)
    assert "secret" not in caplog.text


async def test_a_log_line_does_not_wait_for_ever(
    make_cluster: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "gateway.request"):
        async with make_cluster(limits={"watch_stale_s": 0.2}) as cluster:
            await cluster.post(completion())
            await until(lambda: lines(caplog), "the line", timeout_s=2)
            assert await cluster.metric("prfaas_gateway_outcomes_total", status="unknown") == 1
            await cluster.post(completion())
    assert [line["outcome"] for line in lines(caplog)] == [None, None]  # the last one at close


# --- what clients may not do ---------------------------------------------------------------------


async def test_transfer_fields_of_clients_are_stripped(cluster: Any) -> None:
    """Case 4."""
    theirs = {"remote_host": "10.0.0.1", "transfer_id": "x"}
    await cluster.post(
        {**SHORT, "kv_transfer_params": theirs},
        x_prfaas_target="remote",
        x_prfaas_peer="evil",
        x_data_parallel_rank="3",
        authorization="Bearer k",
    )
    seen = cluster.engine.seen[0]
    assert "kv_transfer_params" not in seen.body
    names = {name.lower() for name in seen.headers}
    assert not names & {"x-prfaas-target", "x-prfaas-peer", "x-data-parallel-rank"}
    assert seen.headers["authorization"] == "Bearer k"
    name = "prfaas_gateway_stripped_fields_total"
    assert await cluster.metric(name, field="kv_transfer_params") == 1


def signed_elsewhere() -> dict[str, Any]:
    params = TransferParams(
        version=1, transfer_id="theirs", plan=(PlanStep(PEER, INSTANCE),), on_failure="local",
        quality="exact", deadline_s=9.0, salt="", expires=2e9,
    )  # fmt: skip
    return sign(params, b"k").to_dict()


async def test_transfer_fields_of_a_trusted_client_pass_untouched(make_cluster: Any) -> None:
    async with make_cluster(trust_client_transfer_params=True) as cluster:
        body = json.dumps({**SHORT, "kv_transfer_params": signed_elsewhere()}).encode()
        status, _, response = await cluster.post(body)
        assert status == 200
        assert cluster.engine.seen[0].raw_body == body
        record = await cluster.record(response.headers["x-request-id"])
        assert record["transfer_id"] == "theirs"
        assert record["decision"]["reason"] == "forced_remote"
        address = {**signed_elsewhere(), "address": "10.0.0.1:1"}
        status, answer, _ = await cluster.post({**SHORT, "kv_transfer_params": address})
        assert status == 400
        assert answer["error"]["param"] == "kv_transfer_params"


async def test_salts_are_hashed_and_the_same_for_index_engine_and_peer(cluster: Any) -> None:
    """Case 7: from the body or from the header."""
    salt = cache_salt(b"salt secret", "", "mine")
    await cluster.post(completion(cache_salt="mine"))
    await cluster.post(completion(), x_cache_salt="mine")
    await cluster.post(completion(cache_salt="theirs"))
    await cluster.post(completion())
    seen = cluster.engine.seen
    salts = [request.body.get("cache_salt") for request in seen]
    assert salts[:2] == [salt, salt]
    assert salts[2] not in (salt, "theirs")
    assert salts[3] is None
    assert [sent_params(cluster, at).salt for at in range(4)] == [salt, salt, salts[2], ""]


async def test_a_salted_prompt_gets_no_credit_for_another_salts_blocks(cluster: Any) -> None:
    salt = cache_salt(b"salt secret", "", "mine")
    cluster.d.stored(*block_chain([120] * 1600, BLOCK_TOKENS, salt))
    await until(lambda: cluster.gateway.view.index.blocks("d-0"), "the cache events")
    matched = []
    for fields in ({"cache_salt": "mine"}, {"cache_salt": "theirs"}, {}):
        _, _, response = await cluster.post(completion(**fields))
        record = await cluster.record(response.headers["x-request-id"])
        matched.append(record["snapshot"]["local"]["matched_tokens"])
    assert matched == [1600, 0, 0]


# --- errors of the engine -------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("kind", "status"),
    [("invalid_request_error", 400), ("overloaded", 503), ("prefill_unavailable", 503)],
)
async def test_errors_of_the_engine_keep_their_status(
    cluster: Any, kind: str, status: int, stream: bool
) -> None:
    from prfaas.errors import from_kind

    error = from_kind(kind, "as scripted", param="max_tokens", retry_after_s=7)
    cluster.engine.script = Script(error=error)
    got, answer, response = await cluster.post(completion(stream=stream))
    assert got == status
    assert answer["error"] == {
        "message": "as scripted", "type": kind, "param": "max_tokens", "code": kind
    }  # fmt: skip
    assert response.headers["retry-after"] == "7"
    record = await cluster.record(response.headers["x-request-id"])
    assert (record["status"], record["error"]) == (str(status), kind)


async def test_an_engine_that_dies_before_the_first_event_is_a_502(cluster: Any) -> None:
    cluster.engine.script = Script(stop_after=0, then="cut")
    status, answer, _ = await cluster.post(completion(stream=True))
    assert status == 502
    assert answer["error"]["type"] == "engine_unavailable"


async def test_an_error_event_that_comes_first_is_a_status(cluster: Any) -> None:
    cluster.engine.script = Script(stop_after=0, then="error_event")
    status, answer, _ = await cluster.post(completion(stream=True))
    assert status == 502
    assert answer["error"]["message"] == "scripted failure"


async def test_an_engine_that_dies_after_the_commit_is_said_in_the_stream(cluster: Any) -> None:
    """Case 38."""
    cluster.engine.script = Script(stop_after=2, then="cut", token_delay_s=0.01)
    status, text, response = await cluster.post(completion(stream=True))
    assert status == 200
    events = [json.loads(line[6:]) for line in text.splitlines() if line]
    assert [e["choices"][0]["text"] for e in events[:-1]] == ["Hello", ","]
    assert events[-1]["error"]["type"] == "engine_unavailable"
    record = await cluster.record(response.headers["x-request-id"])
    assert (record["status"], record["error"]) == ("200", "engine_unavailable")
    name = "prfaas_gateway_broken_streams_total"
    assert await cluster.metric(name, reason="engine_unavailable") == 1


@pytest.mark.parametrize(
    ("script", "committed"),
    [(Script(first_delay_s=60), False), (Script(stop_after=1, then="hang"), True)],
)
async def test_a_request_ends_at_its_deadline(
    make_cluster: Any, script: Script, committed: bool
) -> None:
    async with make_cluster(limits={"request_timeout_s": 0.3}) as cluster:
        cluster.engine.script = script
        status, answer, _ = await cluster.post(completion(stream=True))
        if committed:
            assert status == 200
            assert json.loads(answer.splitlines()[-2][6:])["error"]["type"] == "engine_unavailable"
        else:
            assert status == 502
            assert answer["error"]["message"] == "not finished within 0.3 s"
        await until(lambda: cluster.engine.seen[0].cancelled, "the engine to be told")


# --- clients that leave --------------------------------------------------------------------------


async def test_the_link_going_bad_keeps_requests_at_home_and_back(cluster: Any) -> None:
    """Case 10, in its simple form: the next decision after the feed says so."""
    targets = []
    for goodput in (50e6, 0.1e6, 50e6):
        cluster.d.change_link(goodput_bytes_per_s=goodput)
        await until(
            lambda g=goodput: (
                cluster.gateway.view.snapshot(ENGINE, {}).remotes[0].link.goodput_bytes_per_s == g
            ),
            "the feed",
        )
        _, _, response = await cluster.post(completion())
        targets.append(response.headers["x-prfaas-target"])
    assert targets == ["remote", "local", "remote"]
    assert link().goodput_bytes_per_s == 50e6


async def test_an_internal_error_is_a_500_and_leaves_nothing(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> None:
        raise RuntimeError("bug")

    monkeypatch.setattr(cluster.gateway.policy, "decide", broken)
    status, answer, response = await cluster.post(completion())
    assert (status, answer["error"]["message"]) == (500, "internal error")
    record = await cluster.record(response.headers["x-request-id"])
    assert record["status"] == "500"
