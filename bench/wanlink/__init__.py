"""A WAN link on one machine: two network namespaces joined in userspace, with real TCP across it.

    with WanLink(rate_bits=300e6, rtt_ms=40) as link:
        server = link.run_in("b", ["python", "server.py", link.address("b")])
        client = link.run_in("a", ["python", "client.py", link.address("b")])
        link.set(rate_bits=50e6, loss=0.001)
        link.drop_for(200)
        print(link.stats().ab.queue_drops, link.measure())

    python -m bench.wanlink measure --rate 300M --rtt 40
    python -m bench.wanlink run --rate 300M --rtt 40 --peer 'COMMAND ON b' -- COMMAND ON a
    python -m bench.wanlink up --rate 300M --rtt 40     # lines like `rate=50M loss=0.1%` change it
    python -m bench.wanlink clean                       # what killed owners and emulators left

It needs root, /dev/net/tun and iproute2 (`apt-get install -y iproute2`); `available()` says what is
missing. Nothing leaves the machine: the namespaces have a loopback and the link, no other way out.

How it works
    Each side has a TUN device (198.18.0.1 and .2) whose other end one process, the emulator, reads
    and writes. IFF_VNET_HDR with TCP segmentation offload gives it super-frames of up to 64 KiB
    with partial checksums, so that a gigabit is two thousand frames a second each way and not
    eighty thousand. A frame counts as its packets on an Ethernet wire, 38 bytes of framing each.

    Each direction (`direction.py`, without I/O or clock): drop-tail queue in bytes, the line at its
    rate, half the round trip, then the other device. A queue that is nearly full takes the packets
    it has room for. Loss is drawn for every packet from a seeded generator: a super-frame that is
    hit is cut, with sequence numbers, lengths and checksums of its own for each surviving run.

    The emulator runs with real-time priority, sleeps to within 0.04 ms of what is due, and under
    load looks at all there is every 0.5 ms instead of for every frame.

    It watches its owner: if that closes the link or dies in any way, it kills what runs in the
    namespaces and removes them. What is left if both are killed, the next start of a link removes.

Rate and queue
    Rates are those of the wire: TCP payload is at most 1448 / 1538 = 94.1% at an MTU of 1500. A
    report may show a little more: data that a hole held back before the window counts inside it.
    A line that was idle for under 2 ms may catch up, like a token bucket 2 ms deep.
    Loss, as everything, is in both directions unless `way` says which.

Measured (2 cores of an AMD EPYC VM, Linux 6.18, Python 3.11, shared with other work; buffers up to
64 MB, queue of one bandwidth-delay product; share of nominal that was goodput, CPU of the emulator
with the kernel's receive path that runs in it)

    rate, RTT          idle RTT, min   1 connection, bbr   4, bbr    cubic, 1 / 4   of a core, 1/4
    100 Mbit/s, 10 ms     10.20 ms     94%                 94%                      11 / 18%
    100 Mbit/s, 40 ms     40.23 ms     94%                 94%                      11 / 15%
    300 Mbit/s, 40 ms     40.26 ms     94%                 92-95%    94 / 94%       13 / 24%
    1 Gbit/s, 1 ms         1.23 ms     94%                 94%                      20 / 21%
    1 Gbit/s, 40 ms       40.20 ms     88-94%              88-93%    94 / 94%       15-20 / 19-32%
    3 Gbit/s, 20 ms       20.19 ms     94%                 93%                      24 / 31%
    8 Gbit/s, 10 ms       10.19 ms     93%                 94%                      43 / 51%

    The line was 99-100% busy where bbr had less than 94%: the rest went into what it sent twice.
    Stock 4 MB send buffers at 1 Gbit/s and 80 ms: 30% on one connection, 94% on four.
    CPU for each GB: 1.3-2.0 s at 1 Gbit/s, 3.6-7 s at 300 Mbit/s (smaller frames, more wake-ups).

Limits
    1 Gbit/s is where the ends still have a core and a half; above, see what they leave to it. On a
    loaded machine the ends are late, not the link: trust `worst_late_s` and `line_share`. TCP over
    IPv4 is cut and counted exactly; other packets pass one by one. Timing under load is right
    to half a millisecond. No jitter, no reordering.
"""

from bench.wanlink.link import WanLink, available
from bench.wanlink.measure import Arrangement, LinkReport, Transfer, TransferReport
from bench.wanlink.shape import LinkStats, WayStats, parse_rate
from bench.wanlink.tcp import TcpSettings

__all__ = [
    "Arrangement",
    "LinkReport",
    "LinkStats",
    "TcpSettings",
    "Transfer",
    "TransferReport",
    "WanLink",
    "WayStats",
    "available",
    "parse_rate",
]
