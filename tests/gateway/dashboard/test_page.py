"""The dashboard's page in a real browser: phones, both schemes, the keyboard, screen readers."""

from __future__ import annotations

import re
from typing import Any

import pytest

from gateway.app import Gateway
from gateway.state.memory import MemoryStore
from policies.registry import make_policy
from prfaas.clock import SYSTEM_CLOCK
from prfaas.cluster_state import Report, Shared
from prfaas.errors import StateUnavailable
from prfaas.testing.browser import Page, find_chromium, open_page
from prfaas.testing.gateway_setup import ByteTokenizer, completion, gateway_settings

CHROMIUM = find_chromium()

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium here: apt-get install chromium"
)

CONTRAST = """(() => {
  const channel = c => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const parse = text => text.match(/[\\d.]+/g).map(Number);
  const ground = element => {
    for (let e = element; e; e = e.parentElement) {
      const colour = parse(getComputedStyle(e).backgroundColor);
      if (colour.length < 4 || colour[3] === 1) return colour;
    }
  };
  const poor = [];
  for (const element of document.querySelectorAll('h1,h2,h3,p,th,td,dt,dd,button,span,small')) {
    if (!element.textContent.trim() || !element.checkVisibility()) continue;
    const ink = element.closest('svg') ? null : parse(getComputedStyle(element).color);
    if (!ink) continue;
    const [a, b] = [light(ink), light(ground(element))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) poor.push([element.textContent.trim().slice(0, 30), a, b]);
  }
  return poor;
})()"""


async def test_it_is_for_phones_keyboards_both_schemes_and_readers(make_cluster: Any) -> None:
    async with make_cluster() as cluster:
        for _ in range(4):
            await cluster.post(completion())
        assert CHROMIUM is not None
        async with open_page(CHROMIUM) as page:
            await page.look(1280, 900)
            await page.go(f"http://127.0.0.1:{cluster.gateway.port}/dashboard")
            await page.until("document.querySelectorAll('#decisions tbody tr').length === 4")
            for width, scheme in ((1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")):
                await page.look(width, 844, scheme=scheme)
                assert await page.value("document.documentElement.scrollWidth") <= width
                assert await page.value(CONTRAST) == [], (width, scheme)
                assert await page.violations() == [], (width, scheme)
            await keyboard(page)
            await readers(page)
            await pausing(page, cluster)
            assert page.errors == []
            cluster.gateway.dashboard.close()
            await page.until("/Not live/.test(document.querySelector('#banner').textContent)")


class FlakyStore(MemoryStore):
    """Where gateways meet, while it is there."""

    gone = False

    async def exchange(self, report: Report) -> Shared:
        if self.gone:
            raise StateUnavailable("Redis: gone")
        return await super().exchange(report)


async def test_it_says_when_the_shared_state_goes_and_comes_back() -> None:
    store = FlakyStore(SYSTEM_CLOCK)
    settings = gateway_settings(peers=(), d_watch=None)
    policy = make_policy(settings.gateway.policy)
    gateway = Gateway(settings, policy, ByteTokenizer(), make_policy=make_policy, store=store)
    assert CHROMIUM is not None
    async with gateway.running(), open_page(CHROMIUM) as page:
        await page.go(f"http://127.0.0.1:{gateway.port}/dashboard")
        pill = "document.querySelector('#together')?.textContent"
        await page.until(f"{pill} === 'alone'")
        store.gone = True
        await page.until(f"/^shared state lost/.test({pill})")
        await page.until("/is lost/.test(document.querySelector('#live').textContent)")
        assert await page.violations() == []
        store.gone = False
        await page.until(f"{pill} === 'alone'")
        assert page.errors == []


async def keyboard(page: Page) -> None:
    """Everything is reached by Tab, in order, and Enter opens what it is on."""
    reached = []
    for _ in range(4):
        await page.press("Tab", 9)
        reached.append(
            await page.value("document.activeElement.className || document.activeElement.id")
        )
    assert reached[:3] == ["skip", "pause", "scroll"]
    await page.value("document.querySelector('.more').focus()")
    await page.press("Enter", 13)
    await page.until("document.querySelector('.details dl')")
    assert await page.value("document.querySelector('.more').ariaExpanded") == "true"
    assert any("Local would take" in each for each in await page.texts(".details dt"))
    await page.press("Enter", 13)
    await page.until("!document.querySelector('.details')")


async def readers(page: Page) -> None:
    """What stands in pictures stands in words, and only changes of state are spoken."""
    nameless = "[...document.querySelectorAll('svg:not([aria-hidden]), button, [role=region]')]"
    named = ".filter(e => !(e.ariaLabel || e.getAttribute('aria-label') || e.textContent.trim()))"
    assert await page.value(f"{nameless}{named}.length") == 0
    assert await page.value(
        "[...document.querySelectorAll('table')].every(t => t.caption && t.tHead)"
    )
    (spoken,) = await page.texts("#live")
    assert re.fullmatch(r"([^.]+ is [^.]+\.\s*)*", spoken), spoken
    assert await page.value("document.querySelectorAll('[aria-live]').length") == 1


async def pausing(page: Page, cluster: Any) -> None:
    shown = "document.querySelectorAll('#decisions tbody tr').length"
    await page.value("document.querySelector('#pause').click()")
    await cluster.post(completion())
    await cluster.post(completion(max_tokens=5))
    assert await page.value(shown) == 4
    await page.value("document.querySelector('#pause').click()")
    await page.until(f"{shown} === 6")
