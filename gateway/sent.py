"""What this gateway sent and the feeds do not show yet, so that a burst spreads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec


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


class _Local(msgspec.Struct):
    engine: str
    tokens: int
    at: float


class _Remote(msgspec.Struct):
    engine: str
    place: str
    tokens: int
    raw_bytes: int
    wire_bytes: int
    shown_by_p: bool = False
    shown_by_d: bool = False


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
        self._local: dict[str, _Local] = {}
        self._remote: dict[str, _Remote] = {}
        self._sums: dict[str, Unshown] = {}
        self.on_change: Callable[[], None] | None = None
        """Called whenever sums change."""

    def add_local(self, key: str, engine: str, tokens: int, now: float) -> None:
        self.finish(key)
        self._local[key] = _Local(engine, tokens, now)
        sums = self._at(engine)
        sums.tokens += tokens
        sums.requests += 1
        self._changed()

    def add_remote(
        self,
        key: str,
        engine: str,
        place: str,
        tokens: int,
        raw_bytes: int,
        wire_bytes: int,
    ) -> None:
        """For `engine`; `place` is `peer/instance`, the first of the plan."""
        self.finish(key)
        self._remote[key] = _Remote(engine, place, tokens, raw_bytes, wire_bytes)
        at_p = self._at(place)
        at_p.tokens += tokens
        at_p.requests += 1
        at_p.raw_bytes += raw_bytes
        at_p.wire_bytes += wire_bytes
        at_d = self._at(engine)
        at_d.transfers += 1
        at_d.staged_bytes += raw_bytes
        self._changed()

    def shown_by_p(self, key: str) -> None:
        sent = self._remote.get(key)
        if sent is None or sent.shown_by_p:
            return
        self._over_at_p(sent)
        if sent.shown_by_d:
            del self._remote[key]
        sent.shown_by_p = True
        self._changed()

    def shown_by_d(self, key: str) -> None:
        sent = self._remote.get(key)
        if sent is None or sent.shown_by_d:
            return
        self._over_at_d(sent)
        if sent.shown_by_p:
            del self._remote[key]
        sent.shown_by_d = True
        self._changed()

    def is_shown(self, key: str) -> bool:
        """The place that is to prefill it has told of it, so its load includes it."""
        sent = self._remote.get(key)
        return key not in self._local and (sent is None or sent.shown_by_p)

    def only_d_knows(self, key: str) -> bool:
        """D's agent has named this transfer, and P's has not."""
        sent = self._remote.get(key)
        return sent is not None and sent.shown_by_d

    def load_reported(self, engine: str, now: float) -> None:
        """D reported its load: what was sent well before is in it."""
        old = [
            key
            for key, sent in self._local.items()
            if sent.engine == engine and sent.at <= now - self._settle_s
        ]
        for key in old:
            self.finish(key)

    def finish(self, key: str) -> None:
        """The prefill is over, wherever it ran."""
        local = self._local.pop(key, None)
        if local is not None:
            sums = self._sums[local.engine]
            sums.tokens -= local.tokens
            sums.requests -= 1
            self._forget_nothing(local.engine, sums)
        remote = self._remote.pop(key, None)
        if remote is not None:
            if not remote.shown_by_p:
                self._over_at_p(remote)
            if not remote.shown_by_d:
                self._over_at_d(remote)
        if local is not None or remote is not None:
            self._changed()

    def unshown(self, place: str) -> Unshown:
        return self._sums.get(place, _NOTHING)

    def sums(self) -> Mapping[str, Unshown]:
        """Of all places where anything is."""
        return self._sums

    def __len__(self) -> int:
        return len(self._remote) + len(self._local)

    def _at(self, place: str) -> Unshown:
        sums = self._sums.get(place)
        if sums is None:
            sums = self._sums[place] = Unshown()
        return sums

    def _over_at_p(self, sent: _Remote) -> None:
        sums = self._sums[sent.place]
        sums.tokens -= sent.tokens
        sums.requests -= 1
        self._forget_nothing(sent.place, sums)

    def _over_at_d(self, sent: _Remote) -> None:
        at_p, at_d = self._sums[sent.place], self._sums[sent.engine]
        at_p.raw_bytes -= sent.raw_bytes
        at_p.wire_bytes -= sent.wire_bytes
        at_d.transfers -= 1
        at_d.staged_bytes -= sent.raw_bytes
        self._forget_nothing(sent.place, at_p)
        self._forget_nothing(sent.engine, at_d)

    def _forget_nothing(self, place: str, sums: Unshown) -> None:
        if not sums.requests and not sums.transfers and sums == _NOTHING:
            del self._sums[place]

    def _changed(self) -> None:
        if self.on_change is not None:
            self.on_change()
