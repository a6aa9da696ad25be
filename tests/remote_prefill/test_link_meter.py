"""Goodput follows what the link carries, and is not fooled by a sender that has nothing to send."""

from __future__ import annotations

import pytest

from prfaas.telemetry import LinkLimit
from prfaas.testing.clock import ManualClock
from remote_prefill.link_meter import NEVER_S, LinkMeter
from remote_prefill.link_sampler import LoopLoad


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def meter(clock: ManualClock) -> LinkMeter:
    return LinkMeter(clock, LoopLoad(clock, cpu_s=lambda: 0.0))


def transfer(
    meter: LinkMeter,
    clock: ManualClock,
    *,
    rate: float,
    seconds: float,
    message: int = 100_000,
    app_limited: bool = False,
) -> None:
    """Messages that arrive at `rate`; the first one is always application-limited."""
    meter.message(message, app_limited=True)
    end = clock.now() + seconds
    while clock.now() < end:
        clock.advance(message / rate)
        meter.message(message, app_limited=app_limited)


def test_nothing_is_known_at_first(meter: LinkMeter) -> None:
    assert (meter.goodput_bytes_per_s, meter.rtt_s, meter.wire_ratio) == (0.0, 0.0, 1.0)
    assert (meter.age_s, meter.goodput_age_s) == (NEVER_S, NEVER_S)
    assert meter.local_time(5.0) is None


@pytest.mark.parametrize("rate", [1e5, 1.25e6, 1.25e8, 1e9])
@pytest.mark.parametrize("message", [10_000, 1_000_000])
def test_a_backlogged_sender_shows_the_links_rate(
    meter: LinkMeter, clock: ManualClock, rate: float, message: int
) -> None:
    transfer(meter, clock, rate=rate, seconds=max(2.0, 5 * message / rate), message=message)
    assert meter.goodput_bytes_per_s == pytest.approx(rate, rel=0.01)


def test_a_drop_of_the_rate_is_seen_within_a_second_and_so_is_its_return(
    meter: LinkMeter, clock: ManualClock
) -> None:
    transfer(meter, clock, rate=1.25e8, seconds=2)
    transfer(meter, clock, rate=6.25e6, seconds=1)
    assert meter.goodput_bytes_per_s < 2 * 6.25e6
    transfer(meter, clock, rate=1.25e8, seconds=1)
    assert meter.goodput_bytes_per_s > 1e8


def test_a_slow_sender_does_not_lower_the_estimate_and_a_fast_one_raises_it(
    meter: LinkMeter, clock: ManualClock
) -> None:
    transfer(meter, clock, rate=1e6, seconds=2)
    transfer(meter, clock, rate=1e4, seconds=3, message=1000, app_limited=True)
    assert meter.goodput_bytes_per_s == pytest.approx(1e6, rel=0.01)
    transfer(meter, clock, rate=5e6, seconds=2, app_limited=True)
    assert meter.goodput_bytes_per_s == pytest.approx(5e6, rel=0.05)


def test_idle_time_between_sessions_does_not_count(meter: LinkMeter, clock: ManualClock) -> None:
    for _ in range(5):
        transfer(meter, clock, rate=1e6, seconds=0.5)
        clock.advance(30)
    assert meter.goodput_bytes_per_s == pytest.approx(1e6, rel=0.01)
    assert meter.goodput_age_s == pytest.approx(30, abs=0.3)
    assert meter.age_s == pytest.approx(30)


def test_two_messages_read_at_the_same_moment_do_not_make_a_rate(
    meter: LinkMeter, clock: ManualClock
) -> None:
    for _ in range(50):
        transfer(meter, clock, rate=1e6, seconds=0.1)
        meter.message(100_000, app_limited=False)
        clock.advance(0.1)
        meter.message(1, app_limited=False)
    assert meter.goodput_bytes_per_s < 2e6


def test_a_burst_measures_where_it_is_past_slow_start(meter: LinkMeter, clock: ManualClock) -> None:
    sent = clock.now()
    clock.advance(0.04)
    meter.ping(sent, 7.0)
    meter.burst(1 << 20, 1 << 19, 0.5)  # 1 MB/s: 42 KB under way
    assert meter.goodput_bytes_per_s == pytest.approx((1 << 19) / 0.5)
    meter.burst(1 << 20, 1 << 19, 1.0)
    assert meter.goodput_bytes_per_s < (1 << 19) / 0.5


def test_a_burst_within_slow_start_only_raises(meter: LinkMeter, clock: ManualClock) -> None:
    sent = clock.now()
    clock.advance(0.08)
    meter.ping(sent, 7.0)
    fast = (1 << 19) / 0.05  # 10 MB/s: 839 KB under way, most of the burst
    meter.burst(1 << 20, 1 << 19, 0.05)
    assert meter.goodput_bytes_per_s == pytest.approx(fast)
    clock.advance(9)
    meter.burst(1 << 20, 1 << 19, 0.1)
    assert meter.goodput_bytes_per_s == pytest.approx(fast)
    assert meter.goodput_age_s == 0
    meter.burst(1 << 20, 1 << 19, 0.0)
    assert meter.goodput_bytes_per_s == pytest.approx(fast)


def test_pings_give_round_trip_and_the_other_sides_clock(
    meter: LinkMeter, clock: ManualClock
) -> None:
    offset = 5000.0
    for rtt, up in ((0.2, 0.15), (0.04, 0.02), (0.3, 0.05)):
        sent = clock.now()
        clock.advance(rtt)
        meter.ping(sent, sent + up + offset)
    assert meter.local_time(clock.now() + offset) == pytest.approx(clock.now(), abs=1e-6)
    assert 0.04 < meter.rtt_s < 0.3
    assert meter.age_s == 0
    meter.reset_clock()
    assert meter.local_time(1.0) is None


def test_the_wire_ratio_follows_the_sessions(meter: LinkMeter) -> None:
    meter.session(0, 0)
    assert meter.wire_ratio == 1.0
    meter.session(150, 100)
    assert meter.wire_ratio == 1.5
    meter.session(190, 100)
    assert meter.wire_ratio == pytest.approx(1.6)


def second(
    meter: LinkMeter,
    clock: ManualClock,
    *,
    message: int = 0,
    app_limited: bool = False,
    sessions: int = 1,
    draining: bool = False,
    backlog: bool = False,
    held_bytes: int = 0,
    seconds: float = 1.0,
) -> None:
    """Looks every 50 ms, with a message before each."""
    for _ in range(round(seconds / 0.05)):
        clock.advance(0.05)
        if message:
            meter.message(message, app_limited=app_limited)
        meter.look(sessions=sessions, draining=draining, backlog=backlog, held_bytes=held_bytes)


def test_each_slow_part_shows_at_the_receiver(meter: LinkMeter, clock: ManualClock) -> None:
    second(meter, clock, sessions=0)
    assert meter.limit is LinkLimit.IDLE
    second(meter, clock)  # prefill has begun, nothing has come
    assert meter.limit is LinkLimit.SENDER
    second(meter, clock, message=1000, app_limited=True)
    assert meter.limit is LinkLimit.SENDER
    second(meter, clock, message=1000)
    assert meter.limit is LinkLimit.LINK
    assert meter.rate_bytes_per_s == pytest.approx(20_000)
    second(meter, clock, message=1000, backlog=True, held_bytes=5)
    assert meter.limit is LinkLimit.RECEIVER
    # The sender has spent its credit: its lanes idle, because frames wait here.
    second(meter, clock, message=1000, app_limited=True, backlog=True)
    assert meter.limit is LinkLimit.RECEIVER
    second(meter, clock, message=1000, app_limited=True, draining=True)
    assert meter.limit is LinkLimit.LINK
    second(meter, clock, sessions=0)
    assert meter.limit is LinkLimit.IDLE
    assert meter.rate_bytes_per_s == 0.0


def test_a_thread_with_no_time_to_spare_is_a_slow_receiver(clock: ManualClock) -> None:
    load = LoopLoad(clock, cpu_s=clock.now)
    meter = LinkMeter(clock, load)
    for _ in range(20):
        load.look()
        second(meter, clock, message=1000, seconds=0.05)
    assert meter.busy_share == pytest.approx(1.0)
    assert meter.limit is LinkLimit.RECEIVER


def test_a_link_that_stops_in_the_middle_stalls_and_a_sender_that_computes_does_not(
    meter: LinkMeter, clock: ManualClock
) -> None:
    second(meter, clock, message=1000, app_limited=True)
    second(meter, clock, seconds=5)
    assert (meter.stalls, meter.stalled_s) == (0, 0.0)
    second(meter, clock, message=1000)
    second(meter, clock, seconds=3)
    assert meter.stalls == 1
    assert meter.stalled_s == pytest.approx(3.0, abs=0.11)
    assert meter.limit is LinkLimit.LINK
    second(meter, clock, message=1000, draining=True)
    assert meter.stalled_s == 0.0
    second(meter, clock, draining=True, seconds=2)
    assert meter.stalls == 2
    second(meter, clock, sessions=0)
    assert (meter.stalls, meter.stalled_s) == (2, 0.0)


def test_queueing_is_what_the_round_trip_has_over_the_shortest_of_the_last_minutes(
    meter: LinkMeter, clock: ManualClock
) -> None:
    def ping(rtt_s: float, count: int = 30, every_s: float = 0.5) -> None:
        for _ in range(count):
            sent = clock.now()
            clock.advance(rtt_s)
            meter.ping(sent, 0.0)
            clock.advance(every_s)

    assert meter.queueing_s == 0.0
    ping(0.04)
    assert meter.queueing_s == pytest.approx(0.0, abs=1e-6)
    ping(0.14)
    assert meter.queueing_s == pytest.approx(0.1, abs=0.001)
    ping(0.04)
    assert meter.queueing_s == pytest.approx(0.0, abs=0.001)
    ping(0.09, count=700)  # the route is another one now
    assert meter.queueing_s == pytest.approx(0.0, abs=0.001)


def test_the_report_for_acks_says_how_this_end_stands(meter: LinkMeter, clock: ManualClock) -> None:
    assert meter.report(5).goodput_age_s == NEVER_S
    transfer(meter, clock, rate=1e6, seconds=1)
    second(meter, clock, backlog=True, held_bytes=77, seconds=0.5)
    second(meter, clock, held_bytes=33, seconds=0.5)
    report = meter.report(1234)
    assert (report.held_bytes, report.free_staging_bytes) == (33, 1234)
    assert report.busy_share == pytest.approx(0.5, abs=0.05)
    assert report.goodput_age_s == pytest.approx(1.0, abs=0.45)
