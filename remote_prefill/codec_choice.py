"""Which codecs a session at P may use, and how fast each has been lately."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prfaas.clock import Clock
from prfaas.codecs import Codec, Preparable, Quality
from prfaas.codecs.choice import Pace, choose
from prfaas.errors import ProtocolError

WINDOW_BYTES = 8 << 20
"""Over about so many raw bytes a pace is measured."""
LEAST_BYTES = 256 << 10
"""Fewer prove nothing."""
STALE_S = 60.0
"""What was measured longer ago is forgotten: another codec gets its turn again."""


@dataclass(slots=True)
class _Seen:
    """Sums of one codec, halved whenever they cover WINDOW_BYTES."""

    raw_bytes: float = 0.0
    wire_bytes: float = 0.0
    seconds: float = 0.0
    at_s: float = 0.0


class EncodePaces:
    """What encoding took on an agent's codec threads; owns nothing. `count` gets what each codec
    has carried: its name, raw and encoded bytes.
    """

    def __init__(self, clock: Clock, threads: int, count: Callable[[str, int, int], None]) -> None:
        self.threads = threads
        self._clock = clock
        self._count = count
        self._seen: dict[str, _Seen] = {}

    def note(self, codec: str, raw_bytes: int, wire_bytes: int, seconds: float) -> None:
        """One piece was encoded in so much time of one thread."""
        self._count(codec, raw_bytes, wire_bytes)
        seen = self._seen.setdefault(codec, _Seen())
        now = self._clock.now()
        if now - seen.at_s > STALE_S:
            seen.raw_bytes = seen.wire_bytes = seen.seconds = 0.0
        elif seen.raw_bytes >= WINDOW_BYTES:
            seen.raw_bytes, seen.wire_bytes = seen.raw_bytes / 2, seen.wire_bytes / 2
            seen.seconds /= 2
        seen.raw_bytes += raw_bytes
        seen.wire_bytes += wire_bytes
        seen.seconds += seconds
        seen.at_s = now

    def paces(self) -> dict[str, Pace]:
        """By codec name, of those used lately."""
        now = self._clock.now()
        return {
            name: Pace(seen.raw_bytes / max(seen.seconds, 1e-9), seen.raw_bytes / seen.wire_bytes)
            for name, seen in self._seen.items()
            if now - seen.at_s <= STALE_S and seen.raw_bytes >= LEAST_BYTES
        }


class CodecChoice:
    """The codecs of one session, chosen anew for each chunk; owns nothing.

    `codecs`: those both sides have within the session's class.
    """

    def __init__(
        self, codecs: Sequence[Codec], paces: EncodePaces, goodput_bytes_per_s: Callable[[], float]
    ) -> None:
        self._codecs = tuple(codecs)
        self._exact = tuple(codec for codec in codecs if codec.quality is Quality.EXACT)
        self._paces = paces
        self._goodput_bytes_per_s = goodput_bytes_per_s
        self._chosen: dict[int, tuple[Codec, ...]] = {}
        """By chunk, for the life of the session: layers of a chunk share frames."""
        self._last: tuple[Codec, ...] = ()

    def of_chunk(self, chunk: int) -> tuple[Codec, ...]:
        """What to try, in this order: second an exact one, for tensors that no lossy codec may
        touch (states) or can (a part of the heads).
        """
        chosen = self._chosen.get(chunk)
        if chosen is None:
            before = self._last or (None,)
            first = self._choose(self._codecs, before[0])
            chosen = (first,)
            if first.quality is not Quality.EXACT:
                chosen = (first, self._choose(self._exact, before[-1]))
            self._chosen[chunk] = self._last = chosen
        return chosen

    def preferred(self) -> str:
        """Name of what the next chunk would be sent with by what is known now."""
        return self._choose(self._codecs, self._last[0] if self._last else None).name

    def prepared(self, name: str) -> tuple[Codec, ...]:
        """What to try with KV that was prepared for a codec. Raises ProtocolError: the session has
        no such codec, or it is none to prepare for.
        """
        for codec in self._codecs:
            if codec.name == name and isinstance(codec, Preparable):
                return codec, self._choose(self._exact, None)
        raise ProtocolError(f"the engine prepared KV for {name}, which this session has not")

    def note(self, codec: Codec, raw_bytes: int, wire_bytes: int, seconds: float) -> None:
        """A piece was encoded."""
        self._paces.note(codec.name, raw_bytes, wire_bytes, seconds)

    def _choose(self, codecs: Sequence[Codec], current: Codec | None) -> Codec:
        return choose(
            codecs,
            self._paces.paces(),
            goodput_bytes_per_s=self._goodput_bytes_per_s(),
            threads=self._paces.threads,
            current=current,
        )
