"""What an agent knows of its engine, from KvPort messages to the Watch feed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from prfaas.hashing import HASH_BYTES, BlockHash
from prfaas.kvport import EngineConn
from prfaas.snapshot import UNKNOWN_CURVE, PrefillCurve
from prfaas.telemetry import EngineInfo
from prfaas_connect.port.messages import KvEvents, PortError, Stats
from remote_prefill.watch import WatchFeed

log = logging.getLogger(__name__)


class EngineMirror:
    """The engine named `name` as the feed shows it; one connection at a time.

    What is free, and (tokens, sessions) that wait at the agent and that the engine does not know
    of yet, are asked for whenever the state is published, with every Stats at least.
    """

    def __init__(
        self,
        name: str,
        feed: WatchFeed,
        *,
        free_staging: Callable[[], int] = lambda: 0,
        free_retention: Callable[[], int] = lambda: 0,
        queued: Callable[[], tuple[int, int]] = lambda: (0, 0),
    ) -> None:
        self._name = name
        self._feed = feed
        self._conn: EngineConn | None = None
        self._stats: Stats | None = None
        self._seq = 0
        self._draining = False
        self._free_staging = free_staging
        self._free_retention = free_retention
        self._queued = queued
        self.publish()

    def connected(self, conn: EngineConn) -> None:
        """A new engine; nothing of the one before holds."""
        self._conn, self._stats, self._seq = conn, None, 0
        self._feed.forget_index()
        self.publish()

    def disconnected(self) -> None:
        self._conn = self._stats = None
        self._feed.forget_index()
        self.publish()

    def drain(self) -> None:
        """The agent takes no new work."""
        self._draining = True
        self.publish()

    def stats(self, stats: Stats | None) -> None:
        """None: the load is not known any more."""
        self._stats = stats
        self.publish()

    def kv_events(self, events: KvEvents) -> None:
        """Cache changes. A gap in the numbers voids what was known; PortError where malformed."""
        conn = self._conn
        if conn is None or events.epoch != conn.hello.epoch:
            log.warning("cache events of epoch %s dropped", events.epoch)
            return
        stored, removed = _hashes(events.stored), _hashes(events.removed)
        gap = events.seq != self._seq + 1
        self._seq = events.seq
        if events.cleared or gap or self._feed.index is None:
            if gap and not events.cleared:
                log.warning("cache events jumped to %d: index starts anew", events.seq)
            self._feed.set_index(self._name, events.epoch, stored)
        else:
            self._feed.change_index(stored, removed)

    def prefill_s(self, uncached: int, cached: int) -> float | None:
        """Until the engine has computed so many tokens behind its queue; None where it is not known
        how fast it is.
        """
        if self._conn is None or self._stats is None:
            return None
        stats, chunk_tokens = self._stats, self._conn.hello.chunk_tokens
        curve = _curve(stats, chunk_tokens)
        if not curve.known or chunk_tokens <= 0:
            return None
        chunks = -(-(stats.queue_tokens + uncached) // chunk_tokens)
        steps_s = chunks * stats.decode_step_s if stats.running else 0.0
        return curve.seconds(stats.queue_tokens) + curve.seconds(uncached, cached) + steps_s

    def publish(self) -> None:
        """Tell the feed how things stand."""
        conn, stats = self._conn, self._stats
        if conn is None:
            self._feed.set_engine(EngineInfo(self._name, draining=self._draining))
            return
        hello = conn.hello
        queued_tokens, queued_sessions = self._queued()
        self._feed.set_engine(
            EngineInfo(
                name=self._name,
                ready=stats is not None,
                draining=self._draining or (stats is not None and stats.draining),
                queue_tokens=queued_tokens + (stats.queue_tokens if stats else 0),
                waiting=queued_sessions + (stats.waiting if stats else 0),
                running=stats.running if stats else 0,
                context_tokens=stats.context_tokens if stats else 0,
                free_blocks=stats.free_blocks if stats else 0,
                total_blocks=stats.total_blocks if stats else 0,
                decode_step_s=stats.decode_step_s if stats else 0.0,
                curve=_curve(stats, hello.chunk_tokens) if stats else UNKNOWN_CURVE,
                model=hello.model,
                block_tokens=hello.block_tokens,
                token_bytes=conn.layout.token_bytes,
                epoch=hello.epoch,
                paced=hello.paced,
                free_staging_bytes=self._free_staging(),
                free_retention_bytes=self._free_retention(),
                roles=tuple(hello.roles),
                waiting_kv=stats.waiting_kv if stats else 0,
                max_running=hello.max_running,
            )
        )


def _curve(stats: Stats, chunk_tokens: int) -> PrefillCurve:
    return PrefillCurve(
        stats.prefill_base_s,
        stats.prefill_token_s,
        stats.prefill_token_context_s,
        chunk_tokens,
    )


def _hashes(texts: Iterable[str]) -> list[BlockHash]:
    try:
        hashes = [bytes.fromhex(text) for text in texts]
    except ValueError as exc:
        raise PortError(f"kv_events: not a hash: {exc}") from exc
    if any(len(h) != HASH_BYTES for h in hashes):
        raise PortError(f"kv_events: hashes have {HASH_BYTES} bytes")
    return hashes
