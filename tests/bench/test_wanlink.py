"""The link as a machine in virtual time, and as root with real TCP between two namespaces."""

from __future__ import annotations

import os
import random
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.wanlink import TcpSettings, WanLink, available, namespaces, parse_rate, tcp
from bench.wanlink.direction import NEVER, Direction
from bench.wanlink.measure import ping
from bench.wanlink.packets import VNET_HEADER_BYTES, cut, wire_size
from bench.wanlink.shape import LinkChange, LinkShape, parse_share

REPOSITORY = Path(__file__).resolve().parents[2]
REASON = available()
needs_link = pytest.mark.skipif(REASON is not None, reason=REASON or "")

MSS, HEADERS, WIRE_MTU = 1448, 52, 1538


def super_frame(packets: int, last_bytes: int = MSS, flags: int = 0x18) -> bytes:
    """What a TUN device gives for so many packets of one TCP/IPv4 connection."""
    payload = random.Random(packets).randbytes((packets - 1) * MSS + last_bytes)
    addresses = bytes([198, 18, 0, 1, 198, 18, 0, 2])
    ip = struct.pack("!BBHHHBBH", 0x45, 0, HEADERS + len(payload), 0xFFFE, 0x4000, 64, 6, 0)
    head = struct.pack("!HHIIBBHHH", 5000, 80, 0xFFFFFC00, 7, 8 << 4, flags, 512, 0, 0)
    options = bytes([1, 1, 8, 10]) + bytes(8)
    gso = (1, HEADERS, MSS) if packets > 1 else (0, 0, 0)
    vnet = struct.pack("=BBHHHH", 1, *gso, 20, 16)
    return vnet + ip + addresses + head + options + payload


def folded(data: bytes) -> int:
    """Ones' complement sum: 0xFFFF over data with its right checksum in it (RFC 1071)."""
    data += bytes(len(data) % 2)
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def completed_tcp(frame: bytes) -> bytes:
    """The TCP segment after the kernel has completed the checksum (VIRTIO_NET_HDR_F_NEEDS_CSUM)."""
    tcp_at = VNET_HEADER_BYTES + 20
    segment = bytearray(frame[tcp_at:])
    struct.pack_into("!H", segment, 16, 0xFFFF ^ folded(bytes(segment)))
    return bytes(segment)


def direction(rate_bits: float = 100e6, delay_s: float = 0.01, **shape: float) -> Direction:
    queue_bytes = int(shape.pop("queue_bytes", 1 << 30))
    return Direction(LinkShape(rate_bits, delay_s, queue_bytes, **shape), seed=1)


def arrivals(way: Direction) -> list[tuple[float, bytes]]:
    """Everything that is on the way, with the times it falls due."""
    got = []
    while (due := way.next_due()) != NEVER:
        got += [(due, frame) for frame in way.take_due(due)]
    return got


def eventually(holds: Callable[[], bool], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def wait_sent(link: WanLink, wire_bytes: int) -> None:
    """Until a -> b has carried so much: starting the ends takes long on a busy machine."""
    assert eventually(lambda: link.stats().ab.wire_bytes > wire_bytes, 15)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# Frames


def test_a_super_frame_counts_as_its_packets_with_all_their_headers() -> None:
    assert wire_size(super_frame(1, 100)) == (1, 100 + HEADERS + 38)
    assert wire_size(super_frame(40, 10)) == (40, 39 * WIRE_MTU + 10 + HEADERS + 38)


def test_cut_packets_are_what_a_network_card_would_send() -> None:
    frame = super_frame(5, last_bytes=77, flags=0x19 | 0x80)  # FIN, PSH, ACK, CWR
    payload = frame[VNET_HEADER_BYTES + HEADERS :]
    for first, end in ((0, 1), (0, 3), (1, 4), (4, 5), (2, 5), (0, 5)):
        part = cut(frame, first, end)
        ip, segment = part[VNET_HEADER_BYTES:][:20], completed_tcp(part)
        part_payload = payload[first * MSS : end * MSS]
        assert part.endswith(part_payload)
        assert struct.unpack_from("!HH", ip, 2) == (
            HEADERS + len(part_payload),
            (0xFFFE + first) & 0xFFFF,
        )
        assert folded(ip) == 0xFFFF
        pseudo = ip[12:20] + struct.pack("!HH", 6, len(segment))
        assert folded(pseudo + segment) == 0xFFFF
        assert struct.unpack_from("!I", segment, 4) == ((0xFFFFFC00 + first * MSS) & 0xFFFFFFFF,)
        assert segment[13] == 0x10 | (0x09 if end == 5 else 0) | (0x80 if first == 0 else 0)
        assert wire_size(part) == (end - first, len(part_payload) + (end - first) * 90)


def test_packets_outside_a_frame_and_plain_frames_cannot_be_cut() -> None:
    for first, end in ((0, 6), (3, 3), (-1, 2)):
        with pytest.raises(ValueError, match="no packets"):
            cut(super_frame(5), first, end)
    with pytest.raises(ValueError, match="virtio type 0"):
        cut(super_frame(1), 0, 1)


# One direction, in virtual time


def test_frames_arrive_when_line_and_delay_say() -> None:
    way, line_s = direction(), WIRE_MTU * 8 / 100e6
    for _ in range(3):
        way.accept(super_frame(10), 5.0)
    assert way.take_due(5.0 + 0.01 + 9.9 * line_s) == []
    expected = [5.01 + n * 10 * line_s for n in (1, 2, 3)]
    assert [due for due, _ in arrivals(way)] == pytest.approx(expected)


def test_a_full_queue_takes_the_packets_it_has_room_for() -> None:
    way = direction(queue_bytes=15 * WIRE_MTU)
    frames = [super_frame(10) for _ in range(3)]
    for frame in frames:
        way.accept(frame, 0.0)
    assert [frame for _, frame in arrivals(way)] == [frames[0], cut(frames[1], 0, 5)]
    stats = way.stats(0)
    assert (stats.packets, stats.queue_drops, stats.queue_bytes) == (15, 15, 0)
    assert stats.queue_peak_bytes == 15 * WIRE_MTU


def test_loss_hits_single_packets_at_the_rate_asked_for() -> None:
    way = direction(rate_bits=1e12, loss=0.02)
    sent = 50_000
    for _ in range(sent // 20):
        way.accept(super_frame(20), 0.0)
    got = sum(wire_size(frame)[0] for _, frame in arrivals(way))
    assert way.stats(0).losses == sent - got
    assert sent - got == pytest.approx(sent * 0.02, rel=0.12)  # 4 standard deviations
    assert way.stats(0).packets == sent  # lost ones take their time on the line too


def test_losses_follow_the_seed() -> None:
    def lost(seed: int) -> list[int]:
        way = Direction(LinkShape(1e12, 0.0, 1 << 30, 0.1), seed)
        for _ in range(20):
            way.accept(super_frame(20), 0.0)
        return [wire_size(frame)[0] for _, frame in arrivals(way)]

    assert lost(1) == lost(1) != lost(2)


def test_everything_is_lost_at_loss_one() -> None:
    way = direction(loss=1.0)
    way.accept(super_frame(20), 0.0)
    way.accept(super_frame(1), 0.0)
    assert arrivals(way) == []
    assert way.stats(0).losses == 21


def test_a_new_rate_holds_for_what_waits_and_not_for_what_was_sent() -> None:
    way, line_s = direction(delay_s=0.0), 10 * WIRE_MTU * 8 / 100e6
    for _ in range(3):
        way.accept(super_frame(10), 0.0)
    way.change(LinkChange(rate_bits=10e6), 1.5 * line_s)
    expected = [line_s, (1.5 + 5) * line_s, (1.5 + 15) * line_s]
    assert [due for due, _ in arrivals(way)] == pytest.approx(expected)


def test_a_stall_holds_all_and_a_blackhole_drops_all() -> None:
    way = direction()
    way.accept(super_frame(2), 0.0)
    way.change(LinkChange(stall=True), 0.005)
    assert (way.next_due(), way.take_due(9.0)) == (NEVER, [])
    way.change(LinkChange(stall=False), 9.0)
    assert len(way.take_due(9.0)) == 1

    way.accept(super_frame(3), 10.0)
    way.change(LinkChange(drop_ms=100), 10.0)
    way.accept(super_frame(4), 10.05)
    assert (way.next_due(), way.stats(0).blackholed) == (NEVER, 7)
    way.accept(super_frame(5), 10.11)
    assert len(arrivals(way)) == 1
    way.change(LinkChange(blackhole=True), 11.0)
    way.change(LinkChange(drop_ms=1), 11.0)
    way.accept(super_frame(6), 12.0)
    assert arrivals(way) == []


# Settings


def test_rates_and_shares_are_read_with_units_and_errors_quote_them() -> None:
    assert [parse_rate(text) for text in ("300M", "1G", "2.5k", "7", "1 Gbit/s")] == [
        300e6,
        1e9,
        2500,
        7,
        1e9,
    ]
    assert parse_share("0.1%") == pytest.approx(0.001)
    assert parse_share("0.5") == 0.5
    for text in ("fast", "0", "-1M", "", "inf"):
        with pytest.raises(ValueError, match="rate"):
            parse_rate(text)
    for text in ("2", "101%", "x"):
        with pytest.raises(ValueError, match="share"):
            parse_share(text)


def test_values_out_of_range_are_refused() -> None:
    for name, make in (
        ("rate_bits", lambda: WanLink(0, 1)),
        ("rtt", lambda: WanLink(1e6, -1)),
        ("queue_bytes", lambda: WanLink(1e6, 1, 10)),
        ("loss", lambda: WanLink(1e6, 1, loss=1.5)),
        ("mtu", lambda: WanLink(1e6, 1, mtu=100)),
        ("wmem", lambda: TcpSettings(wmem=(4096, 100, 5000))),
        ("drop_ms", lambda: LinkChange(drop_ms=-1)),
    ):
        with pytest.raises(ValueError, match=name):
            make()


def test_without_root_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert available() == "making network namespaces needs root"


# The real thing


@needs_link
def test_rate_and_round_trip_are_those_asked_for() -> None:
    with WanLink(100e6, 40) as link:
        assert min(ping(link, 20)) * 1e3 == pytest.approx(40, abs=2)
        link.set(rtt_ms=10)
        assert min(ping(link, 40)) * 1e3 == pytest.approx(10, abs=1)
        for _ in range(3):  # ends that the machine had no time for say nothing about the link
            report = link.measure(seconds=1, connections=(1,))
            (one,) = report.arrangements
            if one.line_share > 0.95:
                break
    assert one.goodput_bits == pytest.approx(94.1e6, rel=0.1)
    assert one.line_share == pytest.approx(1, abs=0.05)
    assert one.congestion_control in _available_congestion_controls()
    assert one.emulator_cpu_s_per_gb > 0
    assert "Mbit/s goodput" in str(report)


@needs_link
def test_a_small_queue_overflows_and_tcp_repairs_it() -> None:
    with WanLink(100e6, 20, queue_bytes=30_000) as link, link.transfer(connections=2) as transfer:
        wait_sent(link, 3_000_000)
        stats = link.stats()
        report = transfer.finish()
    assert stats.ab.queue_drops > 10
    assert stats.ab.queue_peak_bytes <= 30_000
    assert report.retransmits >= stats.ab.queue_drops / 2
    assert report.samples[-1][1] > 1e6


@needs_link
def test_lost_packets_are_sent_again_one_by_one() -> None:
    with WanLink(100e6, 10, loss=0.01, seed=3) as link, link.transfer() as transfer:
        wait_sent(link, 6_000_000)
        stats = link.stats()
        report = transfer.finish()
    assert stats.ab.losses / stats.ab.packets == pytest.approx(0.01, rel=0.5)
    repaired = report.retransmits - stats.ab.queue_drops
    assert 0.5 * stats.ab.losses < repaired < 4 * stats.ab.losses + 50


@needs_link
def test_a_new_rate_takes_effect_within_200_ms() -> None:
    with WanLink(100e6, 20) as link, link.transfer() as transfer:
        wait_sent(link, 3_000_000)
        link.set(rate_bits=20e6)
        changed = time.monotonic()
        time.sleep(0.2)
        before, begin = link.stats(), time.monotonic()
        time.sleep(0.6)
        after, end = link.stats(), time.monotonic()
        report = transfer.finish()
    assert report.goodput_bits(changed - 0.1, changed) > 40e6
    line_bits = (after.ab.wire_bytes - before.ab.wire_bytes) * 8 / (end - begin)
    assert line_bits == pytest.approx(20e6, rel=0.1)


@needs_link
def test_a_blackhole_stops_all_and_lifted_it_goes_on() -> None:
    with WanLink(100e6, 10) as link, link.transfer() as transfer:
        wait_sent(link, 2_000_000)
        link.set(blackhole=True)
        dark = time.monotonic()
        time.sleep(0.4)
        carried = link.set(blackhole=False).ab.wire_bytes
        light = time.monotonic()
        wait_sent(link, carried + 3_000_000)
        report = transfer.finish()
    assert report.received_bytes(dark - 0.01) > 1e6
    assert report.received_bytes(light) == report.received_bytes(dark + 0.05)
    assert report.samples[-1][1] > report.received_bytes(light) + 1e6


@needs_link
def test_a_stall_is_late_and_loses_nothing() -> None:
    with WanLink(100e6, 10) as link:
        link.set(stall=True, way="ba")
        lift = "import sys, time; time.sleep(0.4); sys.stdout.write('now')"
        pinger = link.run_in(
            "a",
            [sys.executable, "-c", _CONNECT, link.address("b")],
            stdout=subprocess.PIPE,
        )
        subprocess.run([sys.executable, "-c", lift], check=True, capture_output=True)
        stats = link.set(stall=False, way="ba")
        elapsed_s = float(pinger.communicate(timeout=5)[0])
    assert 0.3 < elapsed_s < 2
    assert stats.ba.queue_drops + stats.ba.blackholed == 0


_CONNECT = """
import socket, sys, time
began = time.monotonic()
try:
    socket.create_connection((sys.argv[1], 9), timeout=5)
except ConnectionRefusedError:  # an answer from the other side all the same
    print(time.monotonic() - began)
"""


@needs_link
def test_tcp_settings_hold_inside_and_leave_the_root_namespace_alone() -> None:
    ipv4 = Path("/proc/sys/net/ipv4")
    names = ("tcp_allowed_congestion_control", "tcp_congestion_control", "tcp_wmem")
    outside = [(ipv4 / name).read_text() for name in names]
    wanted = "cubic" if "cubic" in _available_congestion_controls() else "reno"
    settings = TcpSettings(congestion_control=wanted, wmem=(4096, 16384, 4 << 20), initcwnd=77)
    with WanLink(100e6, 5, tcp_settings=settings) as link:
        with namespaces.entered(link.namespace("a")):
            assert (ipv4 / "tcp_wmem").read_text().split()[2] == str(4 << 20)
            assert (ipv4 / "tcp_no_metrics_save").read_text().strip() == "1"
        with link.transfer(sender="b") as transfer:
            time.sleep(0.2)
            assert transfer.finish().congestion_control == wanted
        shown = link.run_in("b", ["ip", "route"], stdout=subprocess.PIPE).communicate()[0]
        assert b"initcwnd 77" in shown
        with pytest.raises(ValueError, match="'warp' is not one of"):
            link.apply_tcp(TcpSettings(congestion_control="warp"))
    assert [(ipv4 / name).read_text() for name in names] == outside


def _available_congestion_controls() -> list[str]:
    return Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()


@needs_link
def test_both_sides_have_a_loopback_of_their_own() -> None:
    serve = "import socket; s = socket.create_server(('127.0.0.1', 7777)); print(len(s.accept()))"
    connect = (
        "import socket, time\n"
        "for _ in range(100):\n"
        "    try: socket.create_connection(('127.0.0.1', 7777)); break\n"
        "    except ConnectionRefusedError: time.sleep(0.02)\n"
    )
    with WanLink(100e6, 5) as link:
        server = link.run_in("a", [sys.executable, "-c", serve], stdout=subprocess.PIPE)
        assert link.run_in("a", [sys.executable, "-c", connect]).wait(timeout=10) == 0
        assert server.communicate(timeout=10)[0] == b"2\n"


@needs_link
def test_closing_ends_every_process_and_removes_the_namespaces() -> None:
    link = WanLink(100e6, 5)
    names = [link.namespace("a"), link.namespace("b")]

    def fail_inside() -> None:
        with link:
            assert all(map(namespaces.exists, names))
            started.append(link.run_in("a", ["sleep", "1000"]))
            raise RuntimeError("of the user")

    started: list[subprocess.Popen[bytes]] = []
    with pytest.raises(RuntimeError, match="of the user"):
        fail_inside()
    (sleeper,) = started
    assert sleeper.returncode == -signal.SIGKILL
    assert not any(map(namespaces.exists, names))
    link.close()
    with pytest.raises(RuntimeError, match="is not up"):
        link.run_in("a", ["true"])


_OWNER = """
import os, sys, time
from bench.wanlink import WanLink
link = WanLink(100e6, 5)
link.start()
sleeper = link.run_in("b", ["sleep", "1000"])
print(link._emulator.pid, sleeper.pid, link.namespace("a"), link.namespace("b"), flush=True)
if os.fork() == 0:  # holds copies of everything the owner has open
    time.sleep(3)
    os._exit(0)
time.sleep(1000)
"""


@needs_link
def test_a_killed_owner_leaves_nothing_behind() -> None:
    with _owner() as owner:
        assert owner.stdout is not None
        emulator, sleeper, *names = owner.stdout.readline().split()
        assert alive(int(emulator))
        assert alive(int(sleeper))
        owner.kill()
        owner.wait()
    assert eventually(lambda: not any(map(namespaces.exists, names)), 3)
    assert eventually(lambda: not alive(int(emulator)) and not alive(int(sleeper)), 3)


@needs_link
def test_a_later_start_removes_what_a_killed_emulator_left() -> None:
    with _owner() as owner:
        assert owner.stdout is not None
        emulator, sleeper, *names = owner.stdout.readline().split()
        os.kill(int(emulator), signal.SIGKILL)
        owner.kill()
        owner.wait()
    assert all(map(namespaces.exists, names))
    with WanLink(100e6, 5):
        assert not any(map(namespaces.exists, names))
    assert not alive(int(sleeper))


def _owner() -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _OWNER]
    return subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)


@needs_link
def test_a_command_runs_over_a_link_and_its_status_is_ours() -> None:
    command = [sys.executable, "-m", "bench.wanlink", "run", "--rate", "100M", "--rtt", "5", "--"]
    script = 'echo "$WANLINK_A $WANLINK_B"; exit 3'
    done = subprocess.run(
        [*command, "sh", "-c", script], cwd=REPOSITORY, capture_output=True, text=True, timeout=20
    )
    assert (done.returncode, done.stdout) == (3, "198.18.0.1 198.18.0.2\n")
    assert done.stderr.startswith("from a: ")
    up = [sys.executable, "-m", "bench.wanlink", "up", "--rate", "1G", "--rtt", "5"]
    lines = "rate=50M loss=1%\nloss=7\n"
    done = subprocess.run(
        up, cwd=REPOSITORY, input=lines, capture_output=True, text=True, timeout=20
    )
    assert done.returncode == 0
    assert "ip netns exec" in done.stdout
    assert done.stderr == "not understood: share '7' must be from 0 to 1\n"


def test_the_congestion_control_read_back_is_the_sockets() -> None:
    with socket.socket() as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
        assert tcp.congestion_control(sock) == "reno"
