"""The parts of the gateway benchmark: engine, proxy and gateway under its load, and its rows."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import urllib.request
from pathlib import Path

import pytest

from bench import gateway, gateway_routers
from bench.gateway_load import Driver, Load, LoadError
from bench.gateway_routers import VERSIONS, Router
from bench.harness import Report, Samples
from prfaas.testing.raw_http import HELLO, OK, answering, raw_server

LOADS = tuple(
    Load(load.name, load.body_bytes, 2, 4, load.stream, load.paced, load.remote, load.routers)
    for load in gateway.loads(True)
)


@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.name)
def test_bodies_have_their_size_and_differ_at_the_end(load: Load) -> None:
    one, other = load.body(1), load.body(22)
    assert len(one) == len(other) == load.body_bytes
    assert one != other
    assert one[:-20] == other[:-20]


async def test_every_load_passes_through_the_gateway_and_the_plain_proxy(tmp_path: Path) -> None:
    said: list[str] = []
    engine = [sys.executable, "-m", "bench.gateway_engine"]
    async with gateway_routers.process(engine, tmp_path / "e.log", 0, reads_line=True) as (_, line):
        port, _, d, p = line.split()
        url = f"http://127.0.0.1:{port}"
        commands = {
            "ours": lambda port: gateway_routers.ours(tmp_path, port, url),
            "offloading": lambda port: gateway_routers.ours_offloading(tmp_path, port, url, d, p),
            "placing": lambda port: gateway_routers.ours_placing(tmp_path, port, (url, url)),
            "aiohttp": lambda port: gateway_routers.plain_proxy(port, url),
        }
        async with gateway_routers.running(commands, tmp_path, 0, said.append) as routers:
            assert list(routers) == ["ours", "offloading", "placing", "aiohttp"], said
            for router in routers.values():
                driver = Driver(router.url)
                before = router.cpu_s()
                for load in LOADS:
                    assert len(await driver.run(load)) == load.requests
                assert 0 < router.cpu_s() - before < 30
                assert router.rss_bytes() > 1 << 20
                await driver.close()
            page = f"{routers['offloading'].url}/prfaas/requests?limit=1000"
            found = json.loads(await asyncio.to_thread(_page, page))["requests"]
            remote = [each for each in found if each["target"] == "remote"]
            assert len(remote) >= 4
            assert {each["outcome"]["status"] for each in remote[4:]} <= {"staged"}


def _page(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return bytes(answer.read())


@pytest.mark.parametrize("stream", [False, True])
async def test_a_wrong_answer_ends_the_load(stream: bool) -> None:
    wrong = OK + b"content-length: 5\r\n\r\nother"
    async with raw_server(answering(wrong)) as server:
        driver = Driver(server.url)
        with pytest.raises(LoadError, match="other"):
            await driver.run(Load("x", 200, clients=1, requests=1, stream=stream))
        await driver.close()
    async with raw_server(answering(HELLO)) as server:
        driver = Driver(server.url)
        assert len(await driver.run(Load("x", 200, clients=1, requests=1))) == 1
        await driver.close()


async def test_a_router_that_does_not_come_up_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_routers, "_READY_TIMEOUT_S", 0.5)
    said: list[str] = []
    commands = {"dead": lambda port: [sys.executable, "-c", "raise SystemExit('no such thing')"]}
    async with gateway_routers.running(commands, tmp_path, 0, said.append) as routers:
        assert routers == {}
    assert "no such thing" in said[-1]


def test_a_row_whose_baseline_did_not_run_is_not_written(tmp_path: Path) -> None:
    ran = ("ours", "aiohttp", "vllm-rr", "ours-offloading", "vllm-cache2", "ours-placing")
    found = {
        f"{load.name} {name}": Samples((10.0 * at, 10.0 * at))
        for load in gateway.loads(True)
        for at, name in enumerate(ran, 1)
    }
    found |= {"c1 direct": Samples((100.0,)), "c1 ours": Samples((200.0,))}
    report = Report("gateway", quick=True)
    gateway._write(report, found)
    rows = {row.name: row for row in report._rows}
    assert rows["cpu_200B_over_vllm"].value == pytest.approx(1 / 3)
    assert VERSIONS["vllm"] in rows["cpu_200B_over_vllm"].note
    assert rows["cpu_64KB_over_aiohttp"].value == 0.5
    assert rows["cpu_64KB_prefix_over_vllm_cache"].value == pytest.approx(6 / 5)
    assert not [name for name in rows if "sglang" in name or "exact_tokens" in name]
    assert "added_p50_over_vllm.c1" not in rows
    found["c1 vllm-rr"] = Samples((500.0,))
    gateway._write(report, found)
    added = next(row for row in report._rows if row.name == "added_p50_over_vllm.c1")
    assert added.value == 0.25


def test_cpu_is_that_of_the_process_itself() -> None:
    router = Router("self", "", os.getpid())
    before = router.cpu_s()
    sum(range(2_000_000))
    assert 0 < router.cpu_s() - before < 20


def test_each_load_goes_to_the_routers_it_is_for() -> None:
    names = ["ours", "aiohttp", "sglang-rr", "vllm-cache", *sorted(gateway.SPECIAL)]
    got = {
        load.name: {name for name in names if gateway._runs(load, name)}
        for load in gateway.loads(True)
    }
    assert got["200B"] == {"ours", "aiohttp", "sglang-rr", "vllm-cache"}
    assert got["paced"] == {"ours", "aiohttp", "vllm-cache"}
    assert got["remote"] == {"ours-offloading", "vllm-pd"}
    assert got["64KB-prefix"] == {"ours-placing", "sglang-cache2", "vllm-cache2"}
    assert got["64KB-exact"] == {"ours-exact", "sglang-cache2"}
