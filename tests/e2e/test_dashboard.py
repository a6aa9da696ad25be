"""The dashboard in a real browser, with real traffic, also while things break."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from prfaas.testing.browser import Page, find_chromium, open_page
from prfaas.testing.redis_server import WHY_SKIPPED, RedisServer, found
from prfaas.testing.small_fleet import MODEL, small_fleet
from prfaas.up.fleet import FleetPlan
from prfaas.up.fleet_file import Fleet, FleetFault, FleetLink
from prfaas.up.fleet_processes import FleetProcesses

CHROMIUM = find_chromium()

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium here: apt-get install chromium"
)

ROWS = "Object.fromEntries([...document.querySelectorAll('{table} tbody tr')].map(r => [{key}]))"
STATES = ROWS.format(
    table="#engines",
    key="r.cells[0].textContent, r.cells[1].querySelector('.state').textContent",
)
LINKS = ROWS.format(
    table="#links", key="r.cells[0].textContent, [...r.cells].map(c => c.innerText)"
)


def fleet(redis_url: str) -> Fleet:
    gateway = {"shadow": {"name": "always_local"}, "state": {"redis": redis_url}}
    return Fleet.model_validate(small_fleet(gateway=gateway))


async def traffic(url: str, stop: asyncio.Event) -> None:
    """Streams, one after another, until told; an engine that dies may break some."""
    # The gateway closes after an answer that breaks, and a connection that is kept may meet that.
    once = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(connector=once, timeout=aiohttp.ClientTimeout(60)) as session:
        for at in itertools.count():
            if stop.is_set():
                return
            body = {"model": MODEL, "prompt": f"{at} " * 350, "max_tokens": 6, "stream": True}
            async with session.post(f"{url}/v1/completions", json=body) as response:
                await response.read()


@asynccontextmanager
async def asking(url: str, clients: int = 3) -> AsyncIterator[None]:
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(clients):
            tasks.create_task(traffic(url, stop))
        try:
            yield
        finally:
            stop.set()


@asynccontextmanager
async def dashboard(url: str) -> AsyncIterator[Page]:
    assert CHROMIUM is not None
    async with open_page(CHROMIUM) as page:
        await page.look(1280, 900)
        await page.go(f"{url}/dashboard")
        await page.until("document.body && !document.body.classList.contains('waiting')", 60)
        yield page


@pytest.mark.timeout(300)
@pytest.mark.skipif(not found(), reason=WHY_SKIPPED)
async def test_it_shows_real_traffic_while_redis_goes_an_engine_dies_and_a_link_degrades(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "redis"
    folder.mkdir()
    redis = RedisServer(folder)
    plan = FleetPlan.create(fleet(redis.url()), tmp_path / "fleet", tmp_path)
    processes = FleetProcesses(plan, print)
    try:
        await redis.start()
        await processes.start()
        (url,) = processes.plan.gateway_urls
        async with dashboard(url) as page, asking(url):
            await shows_traffic(page)
            await shows_that_redis_goes_and_comes_back(page, redis)
            await shows_a_degraded_link(page, processes)
            await shows_a_dead_engine(page, processes)
            assert await page.violations() == []
            assert page.errors == []
    finally:
        await processes.stop()
        await redis.stop()


async def shows_traffic(page: Page) -> None:
    await page.until("document.querySelectorAll('#decisions tbody tr.remote').length > 5")
    await page.until("document.querySelector('.dots.remote').getAttribute('d')?.length > 100")
    await page.until("/KV came/.test(document.querySelector('#decisions tbody').textContent)")
    estimates = await page.texts("#decisions tbody tr.remote .estimates")
    assert all(each.count(" ") >= 2 and "–" not in each for each in estimates), estimates
    assert "remote is faster" in await page.texts("#reasons tbody th")
    await page.until(f"Object.values({STATES}).every(state => state === 'up')")
    assert await page.texts("#policy h3") == ["active", "shadow"]
    await page.until(
        "/ 0\\.\\d+ s|ms/.test(document.querySelector('#latency tr.remote').innerText)"
    )
    await page.until("/B\\/s/.test(document.querySelector('#links tbody').textContent)")
    await page.until("document.querySelectorAll('#topology .flow').length > 0")
    picture = "document.querySelector('#topology svg').getAttribute('aria-label')"
    await page.until(f"/2 of 2 decode engines up/.test({picture})")


async def shows_that_redis_goes_and_comes_back(page: Page, redis: RedisServer) -> None:
    pill = "document.querySelector('#together')"
    newest = "document.querySelector('#decisions tbody tr').innerText"
    await page.until(f"{pill}.textContent === 'alone'")
    await redis.stop()
    await page.until(f"/shared state lost/.test({pill}.textContent)", 60)
    await page.until(
        "/shared by gateways is lost/.test(document.querySelector('#live').textContent)"
    )
    before = await page.value(newest)
    await page.until(f"{newest} !== {json.dumps(before)}")
    await page.until("/done|KV came/.test(document.querySelector('#decisions tbody').innerText)")
    await redis.start()
    await page.until(f"{pill}.textContent === 'alone'", 60)


async def shows_a_dead_engine(page: Page, processes: FleetProcesses) -> None:
    await processes.carry_out(FleetFault(at_s=0, do="kill", what="d-0-engine"))
    await page.until(f"({STATES})['d-0'] === 'down'")
    await page.until("/d-0 is down/.test(document.querySelector('#live').textContent)")
    await page.until("document.querySelectorAll('#topology .node.down').length === 1")
    await page.until(
        "[...document.querySelectorAll('#decisions tbody tr')].slice(0, 3)"
        ".every(r => /KV came|answering|prefilling|done/.test(r.innerText))"
    )


async def shows_a_degraded_link(page: Page, processes: FleetProcesses) -> None:
    slow = FleetLink(mbit_s=200, rtt_ms=300)
    await processes.carry_out(FleetFault(at_s=0, do="link", what="fra", link=slow))
    seen = "(text => parseFloat(text) * (/ ms/.test(text) ? 0.001 : 1))"
    await page.until(f"Object.values({LINKS}).some(cells => {seen}(cells[4]) > 0.2)", 60)
