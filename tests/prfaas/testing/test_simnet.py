"""Streams in virtual time: order, rate, faults, and the same log for the same seed."""

from __future__ import annotations

import pytest

from prfaas.frames import Frame, FrameType
from prfaas.testing.simnet import End, SimNet, Simulation, Stream, Weather, read_frames


class Line:
    """One stream whose upper end is heard."""

    def __init__(self, weather: Weather, seed: int = 0, *, lane: bool = True) -> None:
        self.sim = Simulation(seed)
        self.net = SimNet(self.sim, weather)
        self.lane = lane
        self.heard: list[tuple[float, bytes]] = []
        self.ends_s: list[float] = []
        self.stream = self.open("s")

    def open(self, name: str) -> Stream:
        stream = self.net.open(name, lane=self.lane)
        far = stream.ends[1]
        far.on_message = lambda data: self.heard.append((self.sim.now_s, data))
        for end in stream.ends:
            end.on_end = lambda: self.ends_s.append(self.sim.now_s)
        return stream

    @property
    def near(self) -> End:
        return self.stream.ends[0]

    def run(self) -> None:
        assert self.sim.run(1e6)


def test_what_is_due_at_once_happens_in_the_order_it_was_scheduled() -> None:
    sim = Simulation(0)
    seen: list[int] = []
    for number in (1, 2, 3):
        sim.after(1.0, seen.append, number)
    sim.after(0.5, seen.append, 0)
    sim.after(0.7, seen.append, 9).cancel()
    assert not sim.run(0.6)
    assert (seen, sim.now_s) == ([0], 0.5)
    assert sim.run(2.0)
    assert (seen, sim.now_s) == ([0, 1, 2, 3], 1.0)


def test_a_message_takes_latency_and_its_share_of_the_rate() -> None:
    line = Line(Weather(latency_s=0.5, bytes_per_s=100))
    taken: list[float] = []
    line.near.on_taken = lambda: taken.append(line.sim.now_s)
    line.near.send(bytes(100))
    line.open("other").ends[0].send(bytes(100))
    line.run()
    assert [at for at, _ in line.heard] == [1.5, 2.5]
    assert taken == [1.0]


def test_a_stream_keeps_its_order_and_another_overtakes() -> None:
    line = Line(Weather(latency_s=0.1, bytes_per_s=1e9, loss=0.5, retransmit_s=5.0), seed=3)
    other = line.open("other")
    for number in range(20):
        line.near.send(b"a%02d" % number)
        other.ends[0].send(b"b%02d" % number)
    line.run()
    texts = [data for _, data in line.heard]
    assert len(texts) == 40
    assert [t for t in texts if t[:1] == b"a"] == sorted(t for t in texts if t[:1] == b"a")
    assert texts != [data for pair in zip(*[iter(sorted(texts))] * 2, strict=True) for data in pair]
    assert max(at for at, _ in line.heard) > 5.0


def test_a_cut_loses_what_is_under_way_and_both_ends_learn_of_it() -> None:
    line = Line(Weather(latency_s=1.0, bytes_per_s=1e9))
    line.near.send(b"first")
    line.sim.after(1.5, line.near.send, b"lost")
    line.sim.after(2.0, line.stream.cut)
    line.sim.after(2.0, line.stream.cut)
    line.sim.after(8.0, line.near.send, b"late")
    line.run()
    assert [data for _, data in line.heard] == [b"first"]
    assert len(line.ends_s) == 2
    assert all(2.0 <= at <= 6.0 for at in line.ends_s)
    assert line.net.cuts == 1


def test_closing_in_order_brings_everything_before() -> None:
    line = Line(Weather(latency_s=1.0, bytes_per_s=10))
    line.near.send(bytes(50))
    line.near.close()
    line.run()
    assert [at for at, _ in line.heard] == [6.0]
    assert line.ends_s == [6.0]


def test_silence_takes_everything_and_says_nothing() -> None:
    line = Line(Weather())
    line.near.send(b"under way")
    line.net.silent = True
    line.near.send(b"more")
    line.near.close()
    line.run()
    assert (line.heard, line.ends_s) == ([], [])


@pytest.mark.parametrize("lane", [True, False])
def test_lanes_may_say_it_twice_and_control_does_not(lane: bool) -> None:
    line = Line(Weather(duplicate=1.0), lane=lane)
    line.near.send(b"x")
    line.run()
    assert len(line.heard) == (2 if lane else 1)


def test_a_flipped_bit_is_one_bit_and_breaks_the_stream_that_reads_it() -> None:
    frame = Frame(FrameType.ACK, 1, payload=b"payload").serialize()
    line = Line(Weather(corrupt=1.0))
    line.near.send(frame)
    line.run()
    ((_, data),) = line.heard
    changed = int.from_bytes(data, "big") ^ int.from_bytes(frame, "big")
    assert (changed.bit_count(), line.net.flipped) == (1, 1)
    assert read_frames(line.near, data) == []
    assert line.stream.broken
    assert len(read_frames(line.near, frame)) == 1


def test_the_same_seed_gives_the_same_log() -> None:
    logs = []
    for seed in (1, 1, 2):
        line = Line(Weather(jitter_s=0.1, loss=0.2, duplicate=0.2, corrupt=0.2), seed)
        for number in range(50):
            line.near.send(b"%d" % number)
        line.run()
        logs.append(line.sim.log)
    assert logs[0] == logs[1] != logs[2]
