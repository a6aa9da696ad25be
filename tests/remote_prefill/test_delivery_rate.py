"""A link's goodput is read right also where messages of several connections arrive in bursts."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest

from prfaas.testing.clock import ManualClock
from remote_prefill.delivery_rate import MOST_POINTS, DeliveryRate, Span
from remote_prefill.link_meter import LinkMeter
from remote_prefill.link_sampler import LoopLoad

RATE = 5e6
"""40 Mbit/s, in bytes per second."""
MESSAGE = 128 << 10
LANES = 4
Arrival = tuple[float, int, bool]
"""When a whole message is here, its bytes, and whether the sender had a lane to spare."""


def over_the_line(
    made: list[tuple[float, int]], rate: Callable[[float], float], lanes: int = LANES
) -> Iterator[Arrival]:
    """`made`: when the sender has how many bytes more. Its lanes share the line packet by packet,
    each with one message at a time, so that their messages end close together."""
    now, at, waiting = 0.0, 0, deque[int]()
    lane: list[list[int] | None] = [None] * lanes
    limited, waited, turn = [True] * lanes, [True] * lanes, 0
    while at < len(made) or waiting or any(lane):
        while at < len(made) and made[at][0] <= now:
            whole, rest = divmod(made[at][1], MESSAGE)
            waiting.extend([MESSAGE] * whole + [rest] * (rest > 0))
            at += 1
        for number in range(lanes):
            if lane[number] is None and waiting:
                size = waiting.popleft()
                lane[number] = [size, size]
                limited[number], waited[number] = any(waited), False
            elif lane[number] is None:
                waited[number] = True
        busy = [number for number in range(lanes) if lane[number] is not None]
        if not busy:
            now = made[at][0]
            continue
        turn += 1
        number = busy[turn % len(busy)]
        message = lane[number]
        assert message is not None
        packet = min(5000, message[1])
        now += packet / rate(now)
        message[1] -= packet
        if not message[1]:
            lane[number] = None
            yield now, message[0], limited[number]


def prompts(seconds: float, rate_per_s: float, seed: int) -> list[tuple[float, int]]:
    """KV of prompts as one instance computes it: 2 KiB a token, four layers, chunks of 256."""
    draws, at, free, made = random.Random(seed), 0.0, 0.0, []
    while at < seconds:
        at += draws.expovariate(rate_per_s)
        left, free = int(1000 * draws.lognormvariate(0, 0.7)), max(free, at)
        while left > 0:
            chunk = min(256, left)
            left -= chunk
            for _ in range(4):
                free += chunk * 5e-5
                made.append((free, chunk * 512))
    return made


def read(arrivals: Iterator[Arrival], wake_s: float = 0.0) -> list[tuple[float, float]]:
    """Time and goodput after each message; a busy thread comes to them each `wake_s`."""
    clock = ManualClock()
    meter = LinkMeter(clock, LoopLoad(clock, cpu_s=lambda: 0.0))
    began, found = clock.now(), []
    for at, nbytes, limited in arrivals:
        due = (int(at / wake_s) + 1) * wake_s if wake_s else at
        clock.advance(max(0.0, began + due - clock.now()))
        meter.message(nbytes, app_limited=limited)
        found.append((due, meter.goodput_bytes_per_s))
    return found


def middle(rates: list[float]) -> float:
    return sorted(rates)[len(rates) // 2]


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("wake_s", [0.0, 0.03])
@pytest.mark.parametrize("rate_per_s", [0.9, 1.5, 3.0])
def test_bursts_of_four_connections_do_not_make_a_link_look_faster(
    rate_per_s: float, wake_s: float, seed: int
) -> None:
    """The highest of many rates over spans that begin anywhere was up to 1.7 times the link's."""
    made = prompts(30, rate_per_s, seed)
    rates = [rate for _, rate in read(over_the_line(made, lambda _: RATE), wake_s)]
    rates = rates[len(rates) // 4 :]
    assert middle(rates) == pytest.approx(RATE, rel=0.1)
    assert max(rates) < 1.2 * RATE
    assert min(rates) > 0.6 * RATE


@pytest.mark.parametrize("lanes", [1, 4])
def test_a_smooth_link_is_read_as_it_is(lanes: int) -> None:
    made = [(0.1 * at, 1_000_000) for at in range(100)]
    rates = [rate for _, rate in read(over_the_line(made, lambda _: RATE, lanes))]
    assert middle(rates[len(rates) // 4 :]) == pytest.approx(RATE, rel=0.05)


@pytest.mark.parametrize("every_s", [0.01, 0.2, 0.4])
@pytest.mark.parametrize("share", [0.5, 0.9])
def test_a_sender_with_less_than_the_link_carries_shows_what_it_sends(
    share: float, every_s: float
) -> None:
    """A lower bound, also where it sends a megabyte at once; never more than the link carries."""
    made = [(every_s * at, int(share * RATE * every_s)) for at in range(int(30 / every_s))]
    rates = [rate for _, rate in read(over_the_line(made, lambda _: RATE))]
    assert 0.95 * share * RATE < rates[-1] < 1.1 * RATE
    assert max(rates) < 1.1 * RATE


def test_cross_traffic_shows_while_it_lasts_and_soon_no_more() -> None:
    def rate(now: float) -> float:
        return RATE / 2 if 10 <= now < 20 else RATE

    made = [(0.1 * at, 800_000) for at in range(200)]
    found = read(over_the_line(made, rate))

    def between(start: float, end: float) -> list[float]:
        return [known for at, known in found if start <= at < end]

    assert middle(between(5, 10)) == pytest.approx(RATE, rel=0.1)
    assert middle(between(12, 20)) == pytest.approx(RATE / 2, rel=0.1)
    assert middle(between(22, 30)) == pytest.approx(RATE, rel=0.1)


def test_a_span_begins_at_the_end_of_a_burst_and_ends_at_one() -> None:
    meter = DeliveryRate(Span(seconds=1.0, messages=1))
    found = []
    for burst in range(20):
        for number in range(4):
            rate = meter.add(0.4 * burst + 0.01 * number, 100_000, 0.0)
            if rate is not None:
                found.append(rate)
    assert len(found) >= 4
    assert all(rate == pytest.approx(1e6) for rate in found)


def test_a_span_is_never_shorter_than_a_round_trip() -> None:
    meter = DeliveryRate(Span(seconds=0.1, messages=1))
    full = [at for at in range(40) if meter.add(0.05 * at, 10_000, 0.5) is not None]
    assert full[0] == 10
    assert all(after - before == 10 for before, after in pairwise(full))


def test_a_slow_link_ends_its_span_by_time_and_a_flood_of_crumbs_by_number() -> None:
    meter = DeliveryRate(Span(seconds=0.1, messages=8, longest_s=0.4))
    assert meter.add(0.0, 1_000_000, 0.0) is None
    assert meter.add(10.0, 1_000_000, 0.0) == pytest.approx(1e5)
    crumbs = DeliveryRate(Span(seconds=1e9, messages=1))
    for at in range(3 * MOST_POINTS):
        assert crumbs.add(0.01 * at, 1, 0.0) is None
        assert len(crumbs._times) <= MOST_POINTS


def test_nothing_is_counted_over_a_silence() -> None:
    meter = DeliveryRate(Span(seconds=0.2, messages=1))
    meter.add(0.0, 10_000, 0.0)
    meter.add(0.1, 10_000, 0.0)
    meter.restart()
    assert [meter.add(100 + 0.1 * at, 10_000, 0.0) for at in range(4)][:2] == [None, None]
