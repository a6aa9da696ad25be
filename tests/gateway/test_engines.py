"""What the engines of a gateway know of each other's work, without any of them running."""

from __future__ import annotations

import sys
from typing import cast

from gateway.cluster_view import ClusterView
from gateway.engine_room import KEPT_S
from gateway.engines import Engines
from gateway.upstream import Upstream
from prfaas.settings import Settings
from prfaas.testing.clock import ManualClock
from prfaas.testing.gateway_setup import gateway_settings

NOBODY = cast(Upstream, None)
CHAIN = {64: [bytes([at]) * 16 for at in range(30)]}
TOKENS = 30 * 64 + 5


def engines_of(*names: str) -> tuple[Engines, ManualClock]:
    """All of them answer; each may have four requests."""
    urls = tuple({"name": name, "url": "http://127.0.0.1:1"} for name in names)
    settings: Settings = gateway_settings(engines=urls, limits={"engine_active_requests": 4})
    clock = ManualClock()
    view = ClusterView(settings.gateway, settings.limits, clock)
    engines = Engines(dict.fromkeys(names, NOBODY), view, settings.limits, clock, lambda _: None)
    for engine in engines:
        engine.probe.reachable = True
    return engines, clock


def test_who_is_chosen_comes_with_what_it_was_sent_shortly_before() -> None:
    engines, _ = engines_of("d-0", "d-1")
    chosen = engines.choose(CHAIN, TOKENS, "key")
    assert chosen is not None
    assert chosen[1] == 0
    engines.sent(chosen[0], CHAIN)
    assert engines.choose(CHAIN, TOKENS, "another key") == (chosen[0], 30 * 64)
    (other,) = {"d-0", "d-1"} - {chosen[0].name}
    assert engines.choose(CHAIN, TOKENS, "key", [chosen[0].name]) == (engines[other], 0)
    assert engines.choose(CHAIN, TOKENS, "key", ["d-0", "d-1"]) is None


def test_of_a_single_engine_nothing_is_remembered() -> None:
    engines, _ = engines_of("d-0")
    engines.sent(engines["d-0"], CHAIN)
    assert engines.choose(CHAIN, TOKENS, "key") == (engines["d-0"], 0)
    assert engines.recent.blocks("d-0") == 0


def test_the_room_of_all_is_found_anew_after_a_moment_and_when_one_comes_or_goes() -> None:
    engines, clock = engines_of("d-0", "d-1")
    assert engines.room == 8
    engines["d-1"].probe.reachable = False
    assert engines.room == 8
    clock.advance(KEPT_S)
    assert engines.room == 4
    engines.join("d-2", NOBODY).probe.reachable = True
    assert engines.room == 8
    engines.leave(engines["d-2"])
    assert engines.room == 4
    engines.leave(engines["d-0"])
    assert engines.room == sys.maxsize, "to hear what is wrong"
