"""The vLLM beside an agent: load, index and calibration, and what happens when it is not there."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from aiohttp import web

from prfaas.clock import SYSTEM_CLOCK
from prfaas.errors import ConfigError
from prfaas.hashing import block_chain
from prfaas.settings import PrefillSettings, VllmSettings
from prfaas.testing.waiting import eventually
from prfaas_connect.port.messages import Hello, KvEvents, Stats
from remote_prefill.vllm_api import EXPORT_PARAM
from remote_prefill.vllm_engine import VllmEngine, check_vllm

METRICS = """
vllm:num_requests_running{engine="0"} 1.0
vllm:num_requests_waiting{engine="0"} 0.0
vllm:kv_cache_usage_perc{engine="0"} 0.5
vllm:cache_config_info{num_gpu_blocks="10"} 1.0
"""
HELLO = Hello(
    version=1, engine="vllm 0.32.0", roles=["prefill"], model="m", layout={}, chunk_tokens=64,
    block_tokens=32, max_tokens=2048, vocab_size=500, model_identity="", config_digest="",
    tokenizer_digest="", ranks=[[0, 1]], epoch="e1",
)  # fmt: skip
TOKENS = list(range(64))


class Site:
    """A scripted vLLM (HTTP and a publisher) and the engine that watches it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.up = True
        self.prompts: list[int] = []
        self.stats: list[Stats | None] = []
        self.events: list[KvEvents] = []
        self.context = zmq.asyncio.Context()
        self.pub = self.context.socket(zmq.PUB)
        self.endpoint = f"ipc://{directory}/events"
        self.pub.bind(self.endpoint)
        self.number = 0
        app = web.Application()
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_get("/metrics", self._metrics)
        self.runner = web.AppRunner(app)

    async def start(self, kv_events: str | None = None) -> VllmEngine:
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        settings = VllmSettings(
            url=f"http://127.0.0.1:{self.runner.addresses[0][1]}",
            kv_events=self.endpoint if kv_events is None else kv_events,
            poll_s=0.01,
        )
        self.engine = VllmEngine(
            settings, HELLO, on_stats=self.stats.append, on_events=self.events.append,
            clock=SYSTEM_CLOCK,
        )  # fmt: skip
        self.engine.start()
        return self.engine

    async def close(self) -> None:
        await self.engine.close()
        await self.runner.cleanup()
        self.context.destroy(linger=0)

    async def publish(self, *events: dict[str, Any]) -> None:
        payload = msgspec.msgpack.encode([0.0, list(events), 0])
        await self.pub.send_multipart((b"", self.number.to_bytes(8, "big"), payload))
        self.number += 1

    async def _complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.prompts.append(len(body["prompt"]))
        await asyncio.sleep(0.01 + 0.0001 * len(body["prompt"]))
        known = {EXPORT_PARAM: {"known": True}}
        return web.Response(text=json.dumps({"kv_transfer_params": known}))

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.up else 500, text=METRICS)


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    made = Site(tmp_path)
    yield made
    await made.close()


def stored(first: int, tokens: list[int]) -> dict[str, Any]:
    return {
        "type": "BlockStored", "block_hashes": [first, first + 1], "parent_block_hash": None,
        "token_ids": tokens, "block_size": 32, "extra_keys": [None, None], "medium": "GPU",
    }  # fmt: skip


async def test_the_load_comes_with_a_curve_that_was_measured(site: Site) -> None:
    await site.start()
    await eventually(lambda: site.stats)
    stats = site.stats[0]
    assert stats is not None
    assert (stats.running, stats.total_blocks, stats.free_blocks) == (1, 10, 5)
    assert sorted(site.prompts) == [64, 64, 512, 512]
    assert stats.prefill_token_s == pytest.approx(0.0001, rel=1.0)
    assert stats.prefill_base_s > 0


async def test_a_load_that_is_not_told_any_more_is_unknown_and_comes_back(site: Site) -> None:
    await site.start()
    await eventually(lambda: site.stats)
    site.up = False
    await eventually(lambda: site.stats[-1] is None)
    site.up = True
    await eventually(lambda: site.stats[-1] is not None)
    assert len(site.prompts) == 4


async def test_the_index_begins_empty_and_follows_the_events(site: Site) -> None:
    await site.start()
    await eventually(lambda: site.events)
    assert (site.events[0].cleared, site.events[0].stored, site.events[0].seq) == (True, [], 1)

    async def told() -> bool:
        await site.publish(stored(1, TOKENS))
        return len(site.events) > 1

    await eventually(told)
    chain = [name.hex() for name in block_chain(TOKENS, 32)]
    assert [event.seq for event in site.events] == list(range(1, len(site.events) + 1))
    assert [name for event in site.events for name in event.stored] == chain
    await site.publish({"type": "BlockRemoved", "block_hashes": [2]})
    await eventually(lambda: site.events[-1].removed == [chain[1]])
    assert {event.epoch for event in site.events} == {"e1"}


async def test_without_events_the_log_says_what_follows(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        await site.start(kv_events="")
    assert "nothing is offloaded" in caplog.text
    await eventually(lambda: site.stats)
    assert site.events == []


def test_settings_that_cannot_work_are_refused_at_start() -> None:
    check_vllm(PrefillSettings(vllm=VllmSettings(kv_events="nonsense")))
    with pytest.raises(ConfigError, match=r"vllm\.kv_events"):
        check_vllm(PrefillSettings(engine="vllm", vllm=VllmSettings(kv_events="nonsense")))
