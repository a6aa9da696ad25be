"""What gateways tell each other of prompts that they sent to engines."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Collection, Hashable, Iterable, Sequence
from itertools import islice

from gateway.recent_prefixes import RecentPrefixes
from prfaas.clock import Clock
from prfaas.cluster_state import (
    PREFIX_NAME_BYTES,
    PREFIX_TTL_S,
    HeardPrefixes,
    PrefixDelta,
)

STEP_TOKENS = 256
"""One name for so many tokens: it stands for all before it too."""
MAX_NAMES = 1 << 15
"""Of what this gateway told, by engine, and as many of what it heard: about 5 MB each."""
MAX_PENDING = 8192
"""Names not told yet; when there are more, the newest that fit are told again later."""
BURST_S = 10.0
"""What another gateway sent so long ago to an engine that tells what it has cached is among that by
now, or gone again."""
BATCH_NAMES = 1024
"""In one exchange, so 8 KiB."""

_CLEARED = b""


class SharedPrefixes:
    """Owns what is to be told and what was heard; synchronous, nothing to close.

    Blocks go by names made with a secret that all gateways have: who reads them learns of no
    prompt, and cannot try one. Prompts of different tenants and salts have nothing in common.
    """

    def __init__(self, secret: bytes, clock: Clock) -> None:
        """`secret`: `gateway.cache_secret`, not empty."""
        self._key = hashlib.blake2b(secret, person=b"prfaas-shared").digest()
        self._own = RecentPrefixes(clock, MAX_NAMES, PREFIX_TTL_S)
        self._heard = RecentPrefixes(clock, MAX_NAMES, PREFIX_TTL_S)
        self._pending: deque[tuple[str, bytes]] = deque()
        """Engine and name, or _CLEARED."""
        self._under_way = 0
        """Of the pending ones, in a report."""
        self._overflowed = False

    def names(self, block_tokens: int, chain: Sequence[Hashable]) -> list[bytes]:
        """Of every so many of its blocks."""
        step = max(1, STEP_TOKENS // block_tokens)
        return [self._name(block) for block in islice(chain, step - 1, None, step)]

    def match(self, engine: str, names: Sequence[bytes], *, tells: bool = False) -> int:
        """How many of the leading names others sent there of late; where the engine itself tells
        what it has, only where that was so lately that it may not have computed all of them yet.
        """
        matched = self._heard.match(engine, names)
        if tells and matched and self._heard.age_s(engine, names[matched - 1]) > BURST_S:
            return 0
        return matched

    def tokens(self, block_tokens: int, matched: int) -> int:
        """So many names stand for so many tokens."""
        return matched * max(1, STEP_TOKENS // block_tokens) * block_tokens

    def sent(self, engine: str, names: Sequence[bytes]) -> None:
        """A prompt goes there."""
        for name in self._own.sent(engine, names):
            if len(self._pending) < MAX_PENDING:
                self._pending.append((engine, name))
            else:
                self._overflowed = True

    def cleared(self, engine: str) -> None:
        """It lost what it had."""
        self._own.forget(engine)
        self._heard.forget(engine)
        kept = [each for each in islice(self._pending, self._under_way, None) if each[0] != engine]
        while len(self._pending) > self._under_way:
            self._pending.pop()
        self._pending += [*kept, (engine, _CLEARED)]

    # --- telling ---

    def report(self) -> tuple[PrefixDelta, ...]:
        """The next to be told; `told` or `untold` follows."""
        self._under_way = min(BATCH_NAMES, len(self._pending))
        deltas: list[PrefixDelta] = []
        engine, names, cleared = "", [], False  # type: tuple[str, list[bytes], bool]
        for place, name in islice(self._pending, self._under_way):
            if place != engine or name == _CLEARED:
                if engine:
                    deltas.append(PrefixDelta(engine, b"".join(names), cleared))
                engine, names, cleared = place, [], name == _CLEARED
            if name != _CLEARED:
                names.append(name)
        if engine:
            deltas.append(PrefixDelta(engine, b"".join(names), cleared))
        return tuple(deltas)

    def told(self) -> int:
        """The report arrived; how many names and losses were in it."""
        count, self._under_way = self._under_way, 0
        for _ in range(count):
            self._pending.popleft()
        if self._overflowed:
            self.tell_again()
        return count

    def untold(self) -> None:
        """It may not have arrived, and is told once more, which changes nothing where it had."""
        self._under_way = 0

    def tell_again(self) -> None:
        """All that is known of late, the newest if it is too much: who hears it knows nothing."""
        self._overflowed = False
        losses = [each for each in self._pending if each[1] == _CLEARED]
        self._pending.clear()
        self._pending += losses
        self._under_way = 0
        for engine, names in self._own.newest(MAX_PENDING):
            self._pending += [(engine, name) for name in names]

    # --- hearing ---

    def take(self, heard: Iterable[HeardPrefixes], known: Collection[str]) -> int:
        """In the order in which it was told, of engines that are `known`; how many names."""
        count = 0
        for batch in heard:
            for delta in batch.deltas:
                if delta.engine not in known:
                    continue
                if delta.cleared:
                    self._heard.forget(delta.engine)
                names = [
                    delta.names[at : at + PREFIX_NAME_BYTES]
                    for at in range(0, len(delta.names), PREFIX_NAME_BYTES)
                ]
                count += len(names)
                # Told with the last block first, for so it is when some of it does not arrive.
                self._heard.sent(delta.engine, names[::-1], batch.age_s)
        return count

    def reset(self) -> None:
        """Something was missed: what was heard may be wrong."""
        self._heard.clear()

    def blocks(self, engine: str) -> int:
        return self._heard.blocks(engine)

    def _name(self, block: Hashable) -> bytes:
        data = block if isinstance(block, bytes) else str(block).encode()
        return hashlib.blake2b(data, digest_size=PREFIX_NAME_BYTES, key=self._key).digest()
