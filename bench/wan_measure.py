"""Arms of the wan benchmark on one link, with what link and machine did during each."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil

from bench.wan_site import Baseline, SiteError, WanSite
from bench.wanlink import WanLink
from prfaas.testing.replayer import Replayed

MIB = 1 << 20

MAX_LATE_S = 0.004
"""An emulator later than this was held up by the machine: the round is repeated."""
TRIES = 4
REST_S = 10.5
"""bbr measures the round trip anew every 10 s, which costs 200 ms (PROBE_RTT). Connections that
have rested for longer do it in the unmeasured transfer that follows, and are not due again in the
measured one: else chance would decide what a transfer of two seconds reaches.
"""
_PROBE_TOKENS = 2000
_WIRE_SHARE = 1448 / 1538
"""Of the line that is TCP payload."""
_CUT_TIMEOUT_S = 30.0
_POLL_S = 0.005


@dataclass(frozen=True, slots=True)
class Conditions:
    """The link of one part."""

    name: str
    rate_bits: float
    rtt_ms: float
    loss: float = 0.0

    def __str__(self) -> str:
        loss = f", {self.loss:.1%} loss" if self.loss else ""
        return f"{self.rate_bits / 1e6:.0f} Mbit/s, {self.rtt_ms:g} ms{loss}"


@dataclass(frozen=True, slots=True)
class Seen:
    """What the link and the machine did during one transfer."""

    line_share: float
    """Wire bits over what the line could have carried in that time."""
    worst_late_s: float
    device_drops: int
    cores_left: float

    @property
    def sound(self) -> bool:
        return self.worst_late_s <= MAX_LATE_S and not self.device_drops


@dataclass(slots=True)
class _Arm:
    seen: list[Seen] = field(default_factory=list)
    repeats: int = 0
    unsound: int = 0


class Measuring:
    """The arms on one link; borrows everything. Values are Mbit/s of goodput where not said."""

    def __init__(
        self,
        conditions: Conditions,
        link: WanLink,
        site: WanSite,
        raw: Baseline,
        grpc: Baseline,
        aio: Baseline,
    ) -> None:
        """`grpc` and `aio` are plain gRPC with threads and on asyncio."""
        self.conditions = conditions
        self._link = link
        self._site = site
        self._raw = raw
        self._grpc = grpc
        self._aio = aio
        self._arms: dict[str, _Arm] = {}
        self._used_s: dict[str, float] = {}
        self._wire_bytes_of_token = 0.0
        self._congestion_control = ""
        self._cpu_parts: list[tuple[float, float, float]] = []

    def warm_up(self, connections: tuple[int, ...]) -> None:
        """Every path once, and find out how many tokens make so many bytes on the wire."""
        self._site.fetch(_PROBE_TOKENS // 4)
        wire_bytes, _ = self._fetch(_PROBE_TOKENS)
        self._wire_bytes_of_token = wire_bytes / _PROBE_TOKENS
        for count in connections:
            self._congestion_control = self._raw.fetch(wire_bytes, count).congestion_control
            self._used_s[f"raw{count}"] = time.monotonic()
        self._grpc.fetch(wire_bytes)
        self._aio.fetch(wire_bytes)
        self._used_s["ours"] = time.monotonic()

    def ours(self, arm: str, wire_bytes: int, *, warm: bool = True) -> float:
        """One session of about so many wire bytes; `warm`: right after another one."""
        tokens = self._tokens(wire_bytes)

        def act() -> tuple[int, float]:
            found_bytes, found = self._fetch(tokens)
            return found_bytes, found.elapsed_s

        return self._goodput(arm, act, "ours", warm)

    def raw(self, arm: str, nbytes: int, connections: int) -> float:
        """The same over blocking sockets, right after another one."""

        def act() -> tuple[int, float]:
            found = self._raw.fetch(nbytes, connections)
            return found.nbytes, found.elapsed_s

        return self._goodput(arm, act, f"raw{connections}", True)

    def plain_grpc(self, arm: str, nbytes: int, *, fresh: bool) -> float:
        """The same over plain gRPC; `fresh`: on a channel opened for it, its connection included.

        Closing the channel of before is not in the time.
        """

        def act() -> tuple[int, float]:
            found = self._grpc.fetch(nbytes, fresh=fresh)
            return found.nbytes, found.elapsed_s

        return self._goodput(arm, act)

    def ours_cpu(self, arm: str, wire_bytes: int, sessions: int) -> float:
        """CPU seconds for a GB on the wire, over some sessions."""
        tokens = self._tokens(wire_bytes)
        parts: list[tuple[float, float, float]] = []

        def act() -> tuple[int, float]:
            moved = -self._site.received_wire_bytes()
            agents, cpu = self._site.agent_cpu_s(), self._site.cpu()
            # Nothing is read out meanwhile: that costs the agents CPU too.
            done = [self._site.fetch(tokens) for _ in range(sessions)]
            spent, after = self._site.cpu() - cpu, self._site.agent_cpu_s()
            moved += self._site.received_wire_bytes()
            p_s, d_s = (after[side] - agents[side] for side in ("a", "b"))
            parts.append((p_s / moved * 1e9, d_s / moved * 1e9, spent.ports_s / moved * 1e9))
            return round(moved), sum(found.elapsed_s for found in done)

        self._observe(arm, act)
        self._cpu_parts.append(parts[-1])
        return sum(parts[-1])

    def plain_grpc_cpu(
        self, arm: str, nbytes: int, transfers: int, *, threads: bool = False
    ) -> float:
        """The same of plain gRPC on one warm channel, on asyncio or with threads."""
        plain = self._grpc if threads else self._aio
        spent_s: list[float] = []

        def act() -> tuple[int, float]:
            before_s = plain.cpu_s()
            done = [plain.fetch(nbytes) for _ in range(transfers)]
            spent_s.append(plain.cpu_s() - before_s)
            return nbytes * transfers, sum(found.elapsed_s for found in done)

        self._observe(arm, act)
        return spent_s[-1] / (nbytes * transfers) * 1e9

    def resume_extra(self, arm: str, wire_bytes: int) -> float:
        """What crossed the line more than for the same session uncut, as a share of that.

        The line counts what is sent twice whoever sends it, and nothing that a queue dropped.
        """
        tokens, seed = self._tokens(wire_bytes), time.time_ns() % (1 << 30)
        start = self._link.stats().ab.wire_bytes
        self._site.fetch(tokens, seed=seed)
        uncut = self._link.stats().ab.wire_bytes

        def act() -> tuple[int, float]:
            self._site.begin_fetch(tokens, seed=seed)
            try:
                self._cut_at(wire_bytes / 2)
            finally:
                found = self._site.end_fetch()
            return wire_bytes, found.elapsed_s

        self._observe(arm, act, repeat=False)
        cut = self._link.stats().ab.wire_bytes
        return (cut - uncut) / (uncut - start) - 1

    # --- notes ---

    def arm_note(self, arm: str) -> str:
        """Of the link and the machine while it ran."""
        found = self._arms[arm]
        line = statistics.median(seen.line_share for seen in found.seen)
        cores = statistics.median(seen.cores_left for seen in found.seen)
        text = f"{arm}: line {line:.0%} busy, {cores:.2f} cores idle"
        if found.unsound:
            text += f", {found.unsound} of {len(found.seen)} UNSOUND (emulator late)"
        return text

    def conditions_note(self) -> str:
        """Of the link, and how often a round was repeated."""
        late_s = max(seen.worst_late_s for arm in self._arms.values() for seen in arm.seen)
        repeats = sum(arm.repeats for arm in self._arms.values())
        control = self._site.congestion_control()
        payload = self.conditions.rate_bits * _WIRE_SHARE / 1e6
        return (
            f"{self.conditions}, payload at most {payload:.1f} Mbit/s; congestion control: raw "
            f"{self._congestion_control}, ours {control}; emulator at worst {late_s * 1e3:.1f} ms "
            f"late, {repeats} repeated"
        )

    def cpu_parts(self) -> str:
        """Medians of the last `ours_cpu` of each round."""
        parts = [statistics.median(column) for column in zip(*self._cpu_parts, strict=True)]
        return " + ".join(f"{part:.2f}" for part in parts)

    # --- inside ---

    def _tokens(self, wire_bytes: int) -> int:
        return round(wire_bytes / self._wire_bytes_of_token)

    def _fetch(self, tokens: int) -> tuple[int, Replayed]:
        before = self._site.received_wire_bytes()
        found = self._site.fetch(tokens)
        return round(self._site.received_wire_bytes() - before), found

    def _goodput(
        self,
        arm: str,
        act: Callable[[], tuple[int, float]],
        connections: str = "",
        warm: bool = False,
    ) -> float:
        """Mbit/s. `connections`: those used; `warm`: after a rest and an unmeasured transfer."""
        nbytes, elapsed_s = self._observe(arm, act, connections, warm=warm)
        return nbytes * 8 / elapsed_s / 1e6

    def _observe(
        self,
        name: str,
        act: Callable[[], tuple[int, float]],
        connections: str = "",
        *,
        warm: bool = False,
        repeat: bool = True,
    ) -> tuple[int, float]:
        """Do it, again where the emulator was held up; what could not be had sound is noted."""
        arm = self._arms.setdefault(name, _Arm())
        for left in reversed(range(TRIES if repeat else 1)):
            if warm:
                used_s = self._used_s[connections]
                time.sleep(max(0.0, used_s + REST_S - time.monotonic()))
                act()
            before, idle, began = self._link.stats(), psutil.cpu_times().idle, time.monotonic()
            nbytes, elapsed_s = act()
            if connections:
                self._used_s[connections] = time.monotonic()
            after, took_s = self._link.stats(), time.monotonic() - began
            line_bits = (after.ab.wire_bytes - before.ab.wire_bytes) * 8
            drops = [stats.ab.device_drops + stats.ba.device_drops for stats in (before, after)]
            seen = Seen(
                line_share=line_bits / elapsed_s / self.conditions.rate_bits,
                worst_late_s=after.worst_late_s,
                device_drops=drops[1] - drops[0],
                cores_left=(psutil.cpu_times().idle - idle) / took_s,
            )
            if seen.sound or left == 0:
                break
            arm.repeats += 1
        arm.seen.append(seen)
        arm.unsound += not seen.sound
        return nbytes, elapsed_s

    def _cut_at(self, wire_bytes: float) -> None:
        """Reset P's busiest connection once so much of the payload has crossed the link."""
        start = self._link.stats().ab.wire_bytes
        deadline = time.monotonic() + _CUT_TIMEOUT_S
        while (self._link.stats().ab.wire_bytes - start) * _WIRE_SHARE < wire_bytes:
            if time.monotonic() > deadline:
                raise SiteError("the session did not come to half")
            time.sleep(_POLL_S)
        while not self._site.cut_busiest():
            if time.monotonic() > deadline:
                raise SiteError("no connection of P had anything waiting to be cut")
