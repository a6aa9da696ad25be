"""A gateway with tenants, on real sockets: who is let in, with what, and what nobody sees."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from gateway.app import Gateway
from policies.registry import make_policy
from prfaas.errors import ConfigError, Overloaded
from prfaas.testing.gateway_setup import KEY, completion, gateway_settings, until
from prfaas.testing.scripted_engine import Script
from prfaas.testing.span_collector import SpanCollector, span_collector
from prfaas.testing.tenant_files import TenantFixture
from prfaas.transfer import parse

Make = Callable[..., AbstractAsyncContextManager[Any]]

SHORT = {"model": "tiny", "prompt": "hello", "max_tokens": 4}


@pytest.fixture
def file(tmp_path: Path) -> TenantFixture:
    found = TenantFixture(tmp_path / "tenants.yaml")
    found.put("acme")
    found.put("zeta")
    found.put("boss", admin=True)
    return found


@pytest.fixture
def make(make_cluster: Callable[..., Any], file: TenantFixture, tmp_path: Path) -> Make:
    def with_tenants(**fields: Any) -> Any:
        tenants = {
            "file": file.path,
            "audit_log": tmp_path / "audit.log",
            **fields.pop("tenants", {}),
        }
        return make_cluster(tenants=tenants, **fields)

    return with_tenants


def audited(tmp_path: Path) -> list[Any]:
    return [json.loads(line) for line in (tmp_path / "audit.log").read_text().splitlines()]


async def reload(cluster: Any) -> None:
    await cluster.gateway.tenancy.directory.look()


async def test_only_good_keys_are_let_in(make: Make, file: TenantFixture, tmp_path: Path) -> None:
    async with make() as cluster:
        for headers in ({}, {"authorization": "Bearer nonsense"}):
            for extra in ({}, {"accept-encoding": "identity", "expect": ""}):
                status, body, response = await cluster.post(SHORT, **headers, **extra)
                assert status == 401
                assert body["error"]["type"] == "authentication_error"
                assert response.headers["www-authenticate"] == "Bearer"
        assert not cluster.engine.seen
        status, _, _ = await cluster.post(SHORT, **file.bearer("acme"))
        assert status == 200
        assert "authorization" not in cluster.engine.seen[0].headers
        label = {"tenant": "_none", "result": "unauthorised"}
        assert await cluster.metric("prfaas_gateway_tenant_requests_total", **label) == 4
    found = audited(tmp_path)
    assert [each["status"] for each in found] == ["401"] * 4 + ["200"]
    assert {each["tenant"] for each in found[:4]} == {""}
    assert (found[4]["tenant"], found[4]["completion_tokens"]) == ("acme", 4)


PATHS = (
    "/prfaas/cluster", "/%70rfaas/cluster", "//prfaas/cluster", "/prfaas/cluster/",
    "/health/../prfaas/cluster", "/health;/prfaas/cluster", "/prfaas/cluster?/health",
    "/dashboard", "/dashboard/../metrics", "/prfaas/requests/%0d%0a", "http://x/prfaas/cluster",
)  # fmt: skip
KEYS = {
    "": 401, "Bearer": 401, "Basic ####": 401, "Basic /zr/": 401, "Bearer \xff": 401,
    "Bearer " + "x" * 4000: 401, "Bearer {acme}": 403, "{boss}": 401,
}  # fmt: skip


async def test_no_path_and_no_rubbish_lead_round_the_keys(make: Make, file: TenantFixture) -> None:
    async def ask(port: int, path: str, key: str, status: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        field = f"authorization: {key.format(**file.keys)}\r\n" if key else ""
        head = f"GET {path} HTTP/1.1\r\nhost: x\r\n{field}connection: close\r\n\r\n"
        writer.write(head.encode("latin-1"))
        answer = (await reader.read()).decode()
        writer.close()
        assert answer.startswith(f"HTTP/1.1 {status} "), (path, key)
        assert json.loads(answer.partition("\r\n\r\n")[2])["error"]["type"]
        assert not any(secret in answer for secret in (*file.keys.values(), *file.hashes, KEY))

    async with make() as cluster:
        for path in PATHS:
            for key, status in KEYS.items():
                await ask(cluster.gateway.port, path, key, status)


async def test_no_number_in_a_request_spoils_budgets_or_the_queue(
    make: Make, file: TenantFixture
) -> None:
    file.put("acme", tokens_per_minute=1e7, tokens_per_day=1e7)
    async with make(tenants={"active_requests": 1}) as cluster:
        for number in (10**400, 1 << 63, 10**18, -(10**400)):
            status, body, _ = await cluster.post(
                {**SHORT, "max_tokens": number}, **file.bearer("acme")
            )
            assert status == 200, body
        tenancy = cluster.gateway.tenancy
        level = tenancy.quotas.level("acme", "tokens_per_day", tenancy.door.clock.now())
        assert 0.9e7 < level < 1e7
        assert tenancy.queue._clock < 1e8


async def test_who_has_no_key_takes_no_place_while_its_body_comes(
    make: Make, file: TenantFixture
) -> None:
    async with make(limits={"gateway_max_in_flight": 1}) as cluster:
        reader, writer = await asyncio.open_connection("127.0.0.1", cluster.gateway.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{")
        await until(lambda: cluster.gateway.front.open, "the head")
        assert (await cluster.post(SHORT, **file.bearer("acme")))[0] == 200
        writer.write(b"123456789")
        assert (await reader.readline()).startswith(b"HTTP/1.1 401 ")
        writer.close()


async def test_the_long_way_in_has_the_same_door(make: Make, file: TenantFixture) -> None:
    async with make() as cluster:

        async def chunked() -> AsyncIterator[bytes]:
            yield json.dumps(SHORT).encode()

        for headers, wanted in (({}, 401), (file.bearer("acme"), 200)):
            async with cluster.client.post(
                "/v1/completions", data=chunked(), headers=headers
            ) as response:
                assert response.status == wanted, await response.text()
        assert "authorization" not in cluster.engine.seen[0].headers
        assert cluster.gateway.tenancy.quotas.in_flight("acme") == 0


async def test_what_tells_of_everybody_is_for_admins(make: Make, file: TenantFixture) -> None:
    async with make() as cluster:
        told = ("/prfaas/requests", "/prfaas/cluster", "/prfaas/requests/x", "/nowhere")
        for path in (*told, "/dashboard", "/dashboard/main.js", "/prfaas/dashboard/events"):
            for headers, wanted in (({}, 401), (file.bearer("acme"), 403)):
                async with cluster.client.get(path, headers=headers) as response:
                    assert response.status == wanted, path
                    if wanted == 401:
                        assert response.headers["www-authenticate"].startswith("Basic")
        for path in ("/prfaas/cluster", "/dashboard", "/prfaas/dashboard/events"):
            async with cluster.client.get(path, headers=file.bearer("boss")) as response:
                assert response.status == 200
        for headers, wanted in (({}, 401), (file.bearer("acme"), 200)):
            async with cluster.client.get("/v1/models", headers=headers) as response:
                assert response.status == wanted
        for path in ("/health", "/ready", "/metrics"):
            async with cluster.client.get(path) as response:
                assert response.status == 200


async def test_keys_change_without_a_restart(make: Make, file: TenantFixture) -> None:
    async with make() as cluster:
        old = file.bearer("acme")
        file.put("acme")
        await reload(cluster)
        assert (await cluster.post(SHORT, **old))[0] == 401
        assert (await cluster.post(SHORT, **file.bearer("acme")))[0] == 200
        file.remove("acme")
        await reload(cluster)
        assert (await cluster.post(SHORT, **file.bearer("acme")))[0] == 401
        name = "prfaas_gateway_tenant_reloads_total"
        assert await cluster.metric(name, result="loaded") == 2


async def test_rates_and_budgets_answer_429_as_clients_expect(
    make: Make, file: TenantFixture, tmp_path: Path
) -> None:
    file.put("few", requests_per_minute=2)
    file.put("small", tokens_per_minute=300)
    async with make() as cluster:
        for _ in range(2):
            assert (await cluster.post(SHORT, **file.bearer("few")))[0] == 200
        status, body, response = await cluster.post(SHORT, **file.bearer("few"))
        assert (status, body["error"]["code"]) == (429, "rate_limit_exceeded")
        assert body["error"]["param"] == "requests_per_minute"
        assert 1 <= int(response.headers["retry-after"]) <= 60
        assert (await cluster.post(SHORT, **file.bearer("acme")))[0] == 200

        seen = len(cluster.engine.seen)
        big = {**SHORT, "max_tokens": 250}
        assert (await cluster.post(big, **file.bearer("small")))[0] == 200
        # Five of prompt and four of answer were used, whatever had been taken for it.
        assert (await cluster.post(big, **file.bearer("small")))[0] == 200
        quotas, clock = cluster.gateway.tenancy.quotas, cluster.gateway.tenancy.door.clock
        tenant = cluster.gateway.tenancy.directory.tenants["small"]
        quotas.settle_tokens(tenant, 300, clock.now())
        status, body, response = await cluster.post(completion(), **file.bearer("small"))
        assert (status, body["error"]["param"]) == (429, "tokens_per_minute")
        assert len(cluster.engine.seen) == seen + 2

        name = "prfaas_gateway_tenant_requests_total"
        for labels, count in (
            ({"tenant": "few", "result": "requests_per_minute"}, 1),
            ({"tenant": "small", "result": "tokens_per_minute"}, 1),
            ({"tenant": "small", "result": "served"}, 2),
        ):
            assert await cluster.metric(name, **labels) == count
    refused = [each for each in audited(tmp_path) if each["status"] == "429"]
    assert [each["limit"] for each in refused] == ["requests_per_minute", "tokens_per_minute"]


async def test_a_request_that_no_engine_served_costs_no_tokens(
    make: Make, file: TenantFixture
) -> None:
    file.put("small", tokens_per_minute=1000)
    async with make() as cluster:
        cluster.engine.script = Script(error=Overloaded("full"))
        assert (await cluster.post(SHORT, **file.bearer("small")))[0] == 503
        assert (await cluster.post({"model": "other"}, **file.bearer("small")))[0] == 400
        quotas, door = cluster.gateway.tenancy.quotas, cluster.gateway.tenancy.door
        assert quotas.level("small", "tokens_per_minute", door.clock.now()) == 1000


async def test_requests_in_flight_are_bounded_and_given_back(
    make: Make, file: TenantFixture
) -> None:
    file.put("one", concurrent_requests=1)
    async with make() as cluster:
        cluster.engine.script = Script(first_delay_s=30)
        first = asyncio.create_task(cluster.post(SHORT, **file.bearer("one")))
        await until(lambda: cluster.engine.active, "the first request")
        status, body, _ = await cluster.post(SHORT, **file.bearer("one"))
        assert (status, body["error"]["param"]) == (429, "concurrent_requests")
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        quotas = cluster.gateway.tenancy.quotas
        await until(lambda: quotas.in_flight("one") == 0, "the place")
        cluster.engine.script = Script()
        assert (await cluster.post(SHORT, **file.bearer("one")))[0] == 200


async def test_turns_are_waited_for_and_the_more_important_go_first(
    make: Make, file: TenantFixture
) -> None:
    file.put("high", priority=5)
    async with make(tenants={"active_requests": 1}) as cluster:
        queue = cluster.gateway.tenancy.queue
        await queue.enter(cluster.gateway.tenancy.directory.tenants["acme"], 1)
        tasks = []
        for at, name in enumerate(("acme", "zeta", "high")):
            body = {**SHORT, "prompt": name}
            tasks.append(asyncio.create_task(cluster.post(body, **file.bearer(name))))
            await until(lambda at=at: queue.waiting == at + 1, f"{name} to wait")
        assert not cluster.engine.seen
        label = {"tenant": "high"}
        assert await cluster.metric("prfaas_gateway_tenant_waiting_requests", **label) == 1
        queue.leave()
        assert [status for status, _, _ in await asyncio.gather(*tasks)] == [200] * 3
        assert cluster.engine.seen[0].body["prompt"] == "high"
        assert (queue.active, queue.waiting) == (0, 0)


async def test_who_waits_too_long_is_told_so(make: Make, file: TenantFixture) -> None:
    async with make(tenants={"active_requests": 1}, limits={"tenant_wait_s": 0.05}) as cluster:
        queue = cluster.gateway.tenancy.queue
        await queue.enter(cluster.gateway.tenancy.directory.tenants["acme"], 1)
        for stream in (False, True):
            status, body, response = await cluster.post(
                {**SHORT, "stream": stream}, **file.bearer("zeta")
            )
            assert (status, body["error"]["type"]) == (503, "overloaded")
            assert response.headers["retry-after"] == "1"
        queue.leave()


async def test_caches_of_tenants_are_apart(make: Make, file: TenantFixture) -> None:
    async with make() as cluster:
        for name in ("acme", "zeta", "acme"):
            assert (await cluster.post(completion(), **file.bearer(name)))[0] == 200
        await cluster.post(completion(), x_cache_salt="s", **file.bearer("acme"))
        salts = [seen.body["cache_salt"] for seen in cluster.engine.seen]
        assert salts[0] == salts[2]
        assert len(set(salts)) == 3
        assert all(len(salt) == 32 for salt in salts)
        params = [parse(seen.body["kv_transfer_params"]) for seen in cluster.engine.seen]
        assert [each.salt for each in params] == salts
        assert [each.tenant for each in params] == ["acme", "zeta", "acme", "acme"]


async def test_prompts_go_only_to_peers_that_their_tenant_allows(
    make: Make, file: TenantFixture, tmp_path: Path
) -> None:
    file.put("home", peers=())
    file.put("far", peers=("elsewhere",))
    file.put("here", peers=("p",))
    for policy in ("least_ttft", "always_remote"):
        async with make(policy={"name": policy}) as cluster:
            for name in ("home", "far"):
                assert (await cluster.post(completion(), **file.bearer(name)))[0] == 200
            assert (await cluster.post(completion(), **file.bearer("here")))[0] == 200
            bodies = [seen.body for seen in cluster.engine.seen]
            assert ["kv_transfer_params" in body for body in bodies] == [False, False, True]
    assert [each["peers"] for each in audited(tmp_path)] == [[], [], ["p"]] * 2


async def test_a_plan_of_a_trusted_client_is_held_to_it_too(
    make: Make, file: TenantFixture
) -> None:
    file.put("home", peers=())
    async with make(trust_client_transfer_params=True, policy={"name": "always_remote"}) as cluster:
        await cluster.post(completion(), **file.bearer("acme"))
        params = cluster.engine.seen[0].body["kv_transfer_params"]
        body = completion(kv_transfer_params=params)
        status, answer, _ = await cluster.post(body, **file.bearer("home"))
        assert (status, answer["error"]["type"]) == (403, "permission_error")
        assert len(cluster.engine.seen) == 1


async def test_classes_of_kv_are_bounded_by_tenant(make: Make, file: TenantFixture) -> None:
    file.put("strict", kv_quality="exact")
    async with make(kv_quality="near") as cluster:
        status, body, _ = await cluster.post(
            completion(), x_prfaas_kv_quality="near", **file.bearer("strict")
        )
        assert (status, body["error"]["type"]) == (403, "permission_error")
        await cluster.post(completion(), **file.bearer("strict"))
        await cluster.post(completion(), **file.bearer("acme"))
        records = cluster.gateway.records
        latest = {record.tenant: record.kv_quality for record in records.latest(10)}
        assert latest == {"strict": "exact", "acme": "near"}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"cache_secret": ""}, "gateway.cache_secret"),
        ({"tenants": {"file": "/nowhere/tenants.yaml"}}, "cannot read"),
        ({"tenants": {"audit_log": "/nowhere/audit.log"}}, "need gateway.tenants.file"),
        ({"tenants": {"active_requests": 1}}, "need gateway.tenants.file"),
    ],
)
def test_a_gateway_does_not_start_half_configured(
    file: TenantFixture, fields: Any, says: str
) -> None:
    chosen = gateway_settings(**{"tenants": {"file": file.path}, **fields})
    with pytest.raises(ConfigError, match=says):
        Gateway(chosen, make_policy(chosen.gateway.policy), None)


def test_an_audit_log_that_cannot_be_written_is_found_at_the_start(file: TenantFixture) -> None:
    chosen = gateway_settings(
        tenants={"file": file.path, "audit_log": file.path / "below" / "a.log"}
    )
    with pytest.raises(ConfigError, match="audit_log: cannot write"):
        Gateway(chosen, make_policy(chosen.gateway.policy), None)


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[SpanCollector]:
    """Gets the traces of gateways that start from now on."""
    with span_collector() as collector:
        monkeypatch.setenv("PRFAAS_TRACING__ENDPOINT", collector.url)
        yield collector


async def test_secrets_are_nowhere_to_be_seen(
    make: Make,
    file: TenantFixture,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    spans: SpanCollector,
) -> None:
    caplog.set_level(logging.DEBUG)
    wrong = "sk-prfaas-00000000-" + "w" * 43
    expired = file.put("late", requests_per_minute=1)
    seen: list[str] = []
    prompt = "the prompt that nobody logs " * 100
    async with make() as cluster:
        bodies: list[Any] = [
            SHORT,
            completion(prompt),
            completion(prompt, stream=True),
            {**SHORT, "model": "other"},
            {**SHORT, "max_tokens": "x"},
            b"{",
        ]
        headers = [file.bearer(name) for name in ("acme", "boss", "late", "late")]
        headers += [{"authorization": f"Bearer {wrong}"}, {"authorization": f"Basic {wrong}"}]
        for each in headers:
            for body in bodies:
                _, answer, response = await cluster.post(body, **each)
                seen += [str(answer), str(response.headers)]
        cluster.engine.script = Script(error=Overloaded("full"))
        _, answer, _ = await cluster.post(completion(prompt), **file.bearer("acme"))
        seen.append(str(answer))
        file.path.write_text(f"tenants: {expired}")
        await reload(cluster)
        for path in (
            "/metrics", "/prfaas/requests?limit=1000", "/prfaas/cluster", "/v1/models", "/health",
            "/ready", "/nowhere",
        ):  # fmt: skip
            async with cluster.client.get(path, headers=file.bearer("boss")) as response:
                seen += [await response.text(), str(response.headers)]
        listed = cluster.gateway.records.latest(1000)
        for record in list(listed):
            async with cluster.client.get(
                f"/prfaas/requests/{record.request_id}", headers=file.bearer("boss")
            ) as response:
                seen.append(await response.text())
        to_engine = [
            str(request.headers) + request.raw_body.decode() for request in cluster.engine.seen
        ]
        shown = [repr(cluster.gateway.tenancy.directory), repr(cluster.gateway.policy)]
    assert len(spans.spans) >= 10
    outputs = {
        "spans": str(spans.spans),
        "answers": "\n".join(seen),
        "logs": caplog.text + "".join(capfd.readouterr()),
        "audit": (tmp_path / "audit.log").read_text(),
        "engine": "\n".join(to_engine),
        "repr": "\n".join(shown),
    }
    secrets = {
        **{f"key of {name}": key for name, key in file.keys.items()},
        "key that is wrong": wrong,
        "transfer key": KEY,
        "cache secret": "salt secret",
        **{f"hash {at}": value for at, value in enumerate(file.hashes)},
    }
    assert outputs["audit"].count("\n") >= 30
    assert "late" in outputs["audit"]
    found = [
        (where, what)
        for where, text in outputs.items()
        for what, secret in secrets.items()
        if secret in text
    ]
    assert found == []
    for where in ("logs", "audit", "spans"):
        assert "the prompt that nobody logs" not in outputs[where], where


async def test_labels_are_few_however_many_tenants_there_are(
    make: Make, file: TenantFixture
) -> None:
    file.fill(130)
    async with make() as cluster:
        for number in range(130):
            cluster.gateway.metrics.tenants.request(f"t{number}", "served")
        async with cluster.client.get("/metrics") as response:
            text = await response.text()
    lines = [line for line in text.splitlines() if line.startswith("prfaas_gateway_tenant_in_")]
    assert len(lines) == 101
    assert 'prfaas_gateway_tenant_requests_total{result="served",tenant="_other"} 30.0' in text


async def test_without_tenants_keys_go_on_to_the_engine(make_cluster: Callable[..., Any]) -> None:
    async with make_cluster() as cluster:
        assert (await cluster.post(SHORT, authorization="Bearer engine-key"))[0] == 200
        assert cluster.engine.seen[0].headers["authorization"] == "Bearer engine-key"
