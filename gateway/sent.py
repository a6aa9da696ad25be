"""What this gateway sent and the feeds do not show yet, so that a burst spreads (case 42)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(slots=True)
class Unshown:
    """Sums over one place's dispatched and not yet shown requests."""

    tokens: int = 0
    requests: int = 0
    """Of which something is to be computed there."""
    raw_bytes: int = 0
    wire_bytes: int = 0
    transfers: int = 0
    """Requests of a D whose KV is to come, and the staging that they will take there."""
    staged_bytes: int = 0


@dataclass(slots=True)
class _Entry:
    place: str
    tokens: int
    raw_bytes: int
    wire_bytes: int
    at: float
    engine: str = ""
    """Where the bytes go to."""


_NOTHING = Unshown()


class SentLedger:
    """Counts a dispatch from when it leaves until the load of its place includes it.

    A remote one has two halves: its tokens count at P until P's agent names the transfer, its bytes
    on the link, and it as a transfer to D, until D's agent does. A local one has no transfer id, so
    it counts until D reports a load that is clearly younger, or its first token comes. Keys are our
    own ids; nothing to close.
    """

    def __init__(self, settle_s: float) -> None:
        """`settle_s`: a load report this much younger than a local dispatch includes it."""
        self._settle_s = settle_s
        self._tokens: dict[str, _Entry] = {}
        self._bytes: dict[str, _Entry] = {}
        self._local: dict[str, _Entry] = {}
        self._sums: dict[str, Unshown] = defaultdict(Unshown)
        self.on_change: Callable[[], None] | None = None
        """Called whenever sums change."""

    def add_local(self, key: str, engine: str, tokens: int, now: float) -> None:
        self._add(self._local, key, _Entry(engine, tokens, 0, 0, now))

    def add_remote(
        self,
        key: str,
        engine: str,
        place: str,
        tokens: int,
        raw_bytes: int,
        wire_bytes: int,
        now: float,
    ) -> None:
        """For `engine`; `place` is `peer/instance`, the first of the plan."""
        self._add(self._tokens, key, _Entry(place, tokens, 0, 0, now))
        self._add(self._bytes, key, _Entry(place, 0, raw_bytes, wire_bytes, now, engine))

    def shown_by_p(self, key: str) -> None:
        self._remove(self._tokens, key)

    def shown_by_d(self, key: str) -> None:
        self._remove(self._bytes, key)

    def is_shown(self, key: str) -> bool:
        """The place that is to prefill it has told of it, so its load includes it."""
        return key not in self._tokens and key not in self._local

    def only_d_knows(self, key: str) -> bool:
        """D's agent has named this transfer, and P's has not."""
        return key in self._tokens and key not in self._bytes

    def load_reported(self, engine: str, now: float) -> None:
        """D reported its load: what was sent well before is in it."""
        old = [
            key
            for key, entry in self._local.items()
            if entry.place == engine and entry.at <= now - self._settle_s
        ]
        for key in old:
            self._remove(self._local, key)

    def finish(self, key: str) -> None:
        """The prefill is over, wherever it ran."""
        if key in self._local:
            self._remove(self._local, key)
        if key in self._tokens:
            self._remove(self._tokens, key)
        if key in self._bytes:
            self._remove(self._bytes, key)

    def unshown(self, place: str) -> Unshown:
        return self._sums.get(place) or _NOTHING

    def sums(self) -> Mapping[str, Unshown]:
        """Of all places where anything is."""
        return self._sums

    def __len__(self) -> int:
        return len(self._tokens.keys() | self._bytes.keys() | self._local.keys())

    def _add(self, table: dict[str, _Entry], key: str, entry: _Entry) -> None:
        if key in table:
            self._remove(table, key)
        table[key] = entry
        self._sum(table, entry, 1)

    def _remove(self, table: dict[str, _Entry], key: str) -> None:
        entry = table.pop(key, None)
        if entry is not None:
            self._sum(table, entry, -1)

    def _sum(self, table: dict[str, _Entry], entry: _Entry, sign: int) -> None:
        sums = self._sums[entry.place]
        sums.tokens += sign * entry.tokens
        sums.raw_bytes += sign * entry.raw_bytes
        sums.wire_bytes += sign * entry.wire_bytes
        if table is self._bytes:
            at_d = self._sums[entry.engine]
            at_d.transfers += sign
            at_d.staged_bytes += sign * entry.raw_bytes
        else:
            sums.requests += sign
        if self.on_change is not None:
            self.on_change()
        if sign > 0:
            return
        for place in (entry.place, entry.engine) if entry.engine else (entry.place,):
            if self._sums[place] == _NOTHING:
                del self._sums[place]
