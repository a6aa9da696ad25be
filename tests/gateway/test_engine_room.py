"""How many requests an engine may have, by what is set and by what it says of itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gateway.cluster_view import ClusterView
from gateway.engine_room import KEPT_S, UNSAID, EngineRoom
from prfaas.limits import Limits
from prfaas.snapshot import PrefillCurve
from prfaas.telemetry import EngineInfo, KvDelta, LinkInfo, WatchUpdate
from prfaas.testing.clock import ManualClock
from prfaas.testing.gateway_setup import (
    ENGINE,
    PLACE,
    d_engine,
    gateway_settings,
    link,
    p_engine,
)

CURVE = PrefillCurve(base_s=0.0, token_s=0.001, token_context_s=0.0, chunk_tokens=256)
OWN = 40
"""What an engine that decodes 32 at once may have."""


class Site:
    """One engine with an agent, an idle peer where there is a link to it."""

    def __init__(
        self, *, offload: bool = True, max_running: int | None = None, **limits: Any
    ) -> None:
        self.clock = ManualClock()
        url = "http://127.0.0.1:1"
        engine = {"name": ENGINE, "url": url, "agent": "127.0.0.1:1", "max_running": max_running}
        settings = gateway_settings(limits=limits, offload=offload, engines=(engine,))
        self.view = ClusterView(settings.gateway, settings.limits, self.clock)
        self.room = EngineRoom(settings.limits, self.view, self.clock)

    def says(self, *links: LinkInfo, **fields: Any) -> None:
        quiet = {"queue_tokens": 0, "waiting": 0, "running": 0, "curve": CURVE, "max_running": 32}
        self._update(ENGINE, d_engine(**(quiet | fields)), *links)

    def peer_says(self, **fields: Any) -> None:
        self._update(PLACE, p_engine(**({"curve": CURVE} | fields)))

    def most(self, in_flight: int = 0) -> int:
        self.clock.advance(KEPT_S)
        return self.room.most(ENGINE, in_flight)

    def _update(self, place: str, engine: EngineInfo, *links: LinkInfo) -> None:
        kv = (KvDelta(engine.name, engine.epoch, cleared=True),)
        self.view.update(place, WatchUpdate(0, True, "agent", (engine,), kv, links))


@pytest.mark.parametrize("number", [0, 7])
def test_what_is_set_counts_whatever_the_engine_says(number: int) -> None:
    site = Site(engine_active_requests=number)
    site.says(waiting=100)
    assert site.most() == number
    assert site.room.bounds == bool(number)


def test_it_may_have_what_it_decodes_at_once_and_some_to_spare() -> None:
    site = Site()
    assert site.most() == UNSAID * 5 // 4, "nothing is known of it"
    site.says()
    assert site.most() == OWN
    assert site.most(100) == OWN
    site.says(max_running=0)
    assert site.most(UNSAID) == UNSAID * 5 // 4, "an agent of before does not say"


def test_settings_say_what_no_agent_does() -> None:
    site = Site(max_running=8)
    assert site.most() == 10
    site.says(max_running=0)
    assert site.most(UNSAID) == 10, "an agent of before does not say"
    site.says()
    assert site.most() == OWN, "the engine knows better"


def test_who_only_waits_for_kv_comes_on_top() -> None:
    site = Site()
    site.says(waiting=5, waiting_kv=5)
    site.view.sent.add_remote("t1", ENGINE, PLACE, 500, 1000, 1000)
    assert site.most(30) == OWN + 6
    site.says(waiting=90, waiting_kv=90)
    assert site.most(30) == OWN + 32, "as many at most"


def test_it_gets_no_more_while_many_wait_in_it() -> None:
    site = Site()
    site.says(running=4, waiting=10)
    assert site.most(14) == 14 + 6
    for number in range(4):  # sent, and not shown yet
        site.view.sent.add_local(f"r{number}", ENGINE, 1, site.clock.now())
    assert site.most(18) == 18 + 2
    site.says(running=4, waiting=30)
    assert site.most(34) == 34
    site.clock.advance(Limits().watch_stale_s + 0.1)
    assert site.most(34) == OWN, "what was so long ago says nothing"


def test_what_was_found_holds_for_a_moment() -> None:
    site = Site()
    site.says()
    assert site.most() == OWN
    site.says(waiting=99)
    assert site.room.most(ENGINE, 3) == OWN
    assert site.most(3) == 3
    site.says()
    assert site.room.most(ENGINE, 3) == 3
    site.room.forget(ENGINE)
    assert site.room.most(ENGINE, 3) == OWN


def test_it_gets_no_more_while_a_prompt_would_wait_too_long() -> None:
    site = Site(engine_queue_s=5.0)
    site.says(queue_tokens=5000, waiting=1)
    assert site.most(1) > 1
    site.says(queue_tokens=5001, waiting=1)
    assert site.most(1) == 1
    # The batch that decodes takes a step between two chunks.
    site.says(queue_tokens=4000, waiting=1, running=4, decode_step_s=0.1)
    assert site.most(5) == 5
    site.says(queue_tokens=0, waiting=0)
    site.view.sent.add_local("r1", ENGINE, 6000, site.clock.now())
    assert site.most(1) == 1
    site.says(queue_tokens=9000, curve=PrefillCurve(0.0, 0.0, 0.0, 0))
    assert site.most(1) > 1, "how long that takes is not known"


def test_a_peer_that_could_take_a_prompt_is_room() -> None:
    site = Site(engine_queue_s=5.0)
    site.peer_says()
    busy = {"queue_tokens": 9000, "waiting": 1}
    site.says(link(), **busy)
    assert site.most(1) > 1
    for closed in (
        link(ready=False),
        link(goodput_bytes_per_s=1e6, in_flight_bytes=6_000_000),
    ):
        site.says(closed, **busy)
        assert site.most(1) == 1
    site.says(link(), **busy)
    site.peer_says(queue_tokens=9000)
    assert site.most(1) == 1
    site.peer_says(draining=True)
    assert site.most(1) == 1
    site.peer_says()
    assert site.most(1) > 1


def test_peers_are_no_room_where_nothing_is_offloaded() -> None:
    site = Site(offload=False)
    site.peer_says()
    site.says(link(), queue_tokens=9000, waiting=1)
    assert site.most(1) == 1


def test_a_queue_of_many_short_prompts_takes_less_attention() -> None:
    site = Site(engine_queue_s=5.0)
    curve = replace(CURVE, token_s=0.0, token_context_s=1e-6)
    site.says(queue_tokens=4000, waiting=1, curve=curve)
    assert site.most(1) == 1
    site.says(queue_tokens=4000, waiting=10, curve=curve)
    assert site.most(10) > 10
