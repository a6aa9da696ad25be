"""What a link is like, how it may be changed while it runs, and what it counted."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

Side = Literal["a", "b"]
Way = Literal["ab", "ba"]

SIDES: tuple[Side, ...] = get_args(Side)
WAYS: tuple[Way, ...] = get_args(Way)

MIN_QUEUE_BYTES = 256 << 10

_RATE_UNITS = {"k": 1e3, "m": 1e6, "g": 1e9}


def parse_rate(text: str) -> float:
    """`300M`, `1G`, `250k` or plain bits a second; ValueError names what is wrong."""
    number, unit = text.strip().lower().removesuffix("bit/s").removesuffix("bit"), 1.0
    if number and number[-1] in _RATE_UNITS:
        number, unit = number[:-1], _RATE_UNITS[number[-1]]
    try:
        rate_bits = float(number) * unit
    except ValueError:
        raise ValueError(f"rate {text!r} is not like 300M or 1G") from None
    if not 0 < rate_bits < float("inf"):
        raise ValueError(f"rate {text!r} must be above 0")
    return rate_bits


def parse_share(text: str) -> float:
    """`0.001` or `0.1%` as a number from 0 to 1; ValueError names what is wrong."""
    number = text.strip()
    try:
        share = float(number.removesuffix("%")) * (0.01 if number.endswith("%") else 1.0)
    except ValueError:
        raise ValueError(f"share {text!r} is not like 0.001 or 0.1%") from None
    if not 0 <= share <= 1:
        raise ValueError(f"share {text!r} must be from 0 to 1")
    return share


@dataclass(frozen=True, slots=True)
class LinkShape:
    """One direction: line rate in bits a second, one-way delay, queue, share of packets lost."""

    rate_bits: float
    delay_s: float
    queue_bytes: int
    loss: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.rate_bits < float("inf"):
            raise ValueError(f"rate_bits must be above 0, not {self.rate_bits}")
        if not 0 <= self.delay_s <= 10:
            raise ValueError(f"rtt must be from 0 to 20 s, not {2 * self.delay_s} s")
        if self.queue_bytes < 2000:
            raise ValueError(f"queue_bytes must hold a packet (2000), not {self.queue_bytes}")
        if not 0 <= self.loss <= 1:
            raise ValueError(f"loss must be from 0 to 1, not {self.loss}")


def default_queue_bytes(rate_bits: float, rtt_ms: float) -> int:
    """One bandwidth-delay product, as a router would have, and never under 256 KiB."""
    return max(MIN_QUEUE_BYTES, int(rate_bits / 8 * rtt_ms / 1e3))


@dataclass(frozen=True, slots=True)
class LinkChange:
    """What to change now; None leaves a value as it is, and no way means both.

    blackhole drops all there is and all that comes. stall holds all of it until it is lifted, what
    does not fit in the queue is dropped. drop_ms is a blackhole that ends by itself.
    """

    way: Way | None = None
    rate_bits: float | None = None
    rtt_ms: float | None = None
    queue_bytes: int | None = None
    loss: float | None = None
    blackhole: bool | None = None
    stall: bool | None = None
    drop_ms: float | None = None

    def __post_init__(self) -> None:
        if self.way is not None and self.way not in WAYS:
            raise ValueError(f"way must be one of {', '.join(WAYS)}, not {self.way!r}")
        if self.drop_ms is not None and (self.drop_ms < 0 or self.blackhole is not None):
            raise ValueError("drop_ms must not be negative nor come with blackhole")

    def reshape(self, shape: LinkShape) -> LinkShape:
        """The shape with the changed values; ValueError if one is out of range."""
        return replace(
            shape,
            rate_bits=shape.rate_bits if self.rate_bits is None else self.rate_bits,
            delay_s=shape.delay_s if self.rtt_ms is None else self.rtt_ms / 2e3,
            queue_bytes=shape.queue_bytes if self.queue_bytes is None else self.queue_bytes,
            loss=shape.loss if self.loss is None else self.loss,
        )


@dataclass(frozen=True, slots=True)
class WayStats:
    """Counters of one direction since the start, in wire packets and bytes, and its queue now.

    device_drops counts frames that the kernel dropped before the emulator read them or refused to
    deliver: anything but 0 is not part of the link that was asked for.
    """

    frames: int
    packets: int
    wire_bytes: int
    queue_drops: int
    losses: int
    blackholed: int
    queue_bytes: int
    queue_peak_bytes: int
    device_drops: int


@dataclass(frozen=True, slots=True)
class LinkStats:
    """Both directions, CPU seconds of the emulator, and how its process is scheduled.

    worst_late_s is since the counters were last asked for, so that each measurement has its own.
    """

    ab: WayStats
    ba: WayStats
    cpu_s: float
    worst_late_s: float
    scheduling: str
