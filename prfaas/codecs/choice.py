"""Which codec a chunk is sent with: the one that gets it across soonest, less loss before more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prfaas.codecs.base import Codec, base_name
from prfaas.codecs.raw import RAW
from prfaas.quality import Quality

GAIN = 0.05
"""A codec that changes more must save this share of the time."""
SWITCH_GAIN = 0.15
"""To leave the codec of the chunk before takes more: measurements waver."""


@dataclass(frozen=True, slots=True)
class Pace:
    """What a codec does: raw bytes a second on one thread, raw over wire bytes."""

    bytes_per_s: float
    ratio: float

    def seconds(self, goodput_bytes_per_s: float, threads: int) -> float:
        """Time of one raw byte: it is encoded and sent at once, so the slower of both counts."""
        encode_s = 1 / (self.bytes_per_s * threads)
        return max(encode_s, 1 / (self.ratio * goodput_bytes_per_s))


EXPECTED = {
    "raw": Pace(4e9, 1.0),
    "planes-zstd": Pace(0.45e9, 1.44),
    "exponent": Pace(0.8e9, 1.5),
    "int8": Pace(2.4e9, 1.92),
    "near-channels": Pace(0.9e9, 2.6),
    "near-basis": Pace(50e6, 3.4),
    "compact-basis": Pace(60e6, 5.5),
    "tight-basis": Pace(90e6, 10.5),
}
"""Before anything was measured: what a core does with bfloat16 KV, about."""
UNKNOWN_BYTES_PER_S = 125e6
"""A link that nobody has measured may do this: what encodes slower waits for a measurement."""


def choose(
    codecs: Sequence[Codec],
    paces: Mapping[str, Pace],
    *,
    goodput_bytes_per_s: float,
    threads: int,
    current: Codec | None = None,
) -> Codec:
    """One of `codecs` (none: `raw`), by its pace on this machine and the link's. While the link is
    not measured (0): the one for fewest bytes that encodes UNKNOWN_BYTES_PER_S.

    Never one that is slower than `raw`, by these numbers, where `raw` is among them.
    """
    if not codecs:
        return RAW
    known = {
        codec.name: paces.get(codec.name) or EXPECTED[base_name(codec.name)] for codec in codecs
    }
    if goodput_bytes_per_s <= 0:
        enough = UNKNOWN_BYTES_PER_S / threads
        fast = [codec for codec in codecs if known[codec.name].bytes_per_s >= enough]
        if not fast:
            return max(codecs, key=lambda codec: known[codec.name].bytes_per_s)
        return max(fast, key=lambda codec: known[codec.name].ratio)
    seconds = {name: pace.seconds(goodput_bytes_per_s, threads) for name, pace in known.items()}

    def soonest(quality: Quality) -> Codec | None:
        of_class = [codec for codec in codecs if codec.quality is quality]
        return min(of_class, key=lambda codec: seconds[codec.name], default=None)

    first, *others = (found for quality in Quality if (found := soonest(quality)) is not None)
    best = first
    for other in others:
        if seconds[other.name] < seconds[best.name] * (1 - GAIN):
            best = other
    if current is not None and current.name in seconds:
        plain_s = seconds.get(RAW.name, float("inf"))
        kept_s = seconds[current.name]
        if kept_s <= plain_s and seconds[best.name] >= kept_s * (1 - SWITCH_GAIN):
            return current
    return best
