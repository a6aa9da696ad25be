"""The decode engines of one gateway: health, breakers, and which one takes a request."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence

from gateway.cluster_view import ClusterView
from gateway.engine_choice import EngineOption, rank_engines
from gateway.engine_probe import EngineProbe
from gateway.engine_room import KEPT_S, EngineRoom
from gateway.outliers import Outliers
from gateway.recent_prefixes import RecentPrefixes
from gateway.shared_prefixes import SharedPrefixes
from gateway.text_blocks import TEXT_BLOCK_TOKENS, OwnHasher, SharedHasher, TextBlocks
from gateway.tokenise import Chains
from gateway.turns import Turns
from gateway.upstream import Upstream
from prfaas.clock import Clock
from prfaas.errors import EngineUnavailable
from prfaas.limits import Limits

logger = logging.getLogger(__name__)

SLOW_START_S = 10.0
SLOW_START_PER_S = 4.0
"""An engine that has just come back gets one request at once, and so many more with each second:
its caches are cold, and what waits for it would come all at once."""


class Serving:
    """While a request is at an engine: enter it each time."""

    __slots__ = ("_engine",)

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __enter__(self) -> None:
        self._engine.in_flight += 1

    def __exit__(self, *exc: object) -> None:
        self._engine.in_flight -= 1


class Engine:
    """One decode engine as the gateway sees it; borrows its upstream."""

    def __init__(
        self,
        name: str,
        upstream: Upstream,
        limits: Limits,
        clock: Clock,
        on_change: Callable[[Engine], None],
        room: EngineRoom,
    ) -> None:
        self.name = name
        self.upstream = upstream
        self.in_flight = 0
        """Requests of this gateway there."""
        self.serving = Serving(self)
        self._clock = clock
        self._on_change = on_change
        self._room = room
        self._back_at: float | None = None
        self.probe = EngineProbe(upstream, limits.control_timeout_s, self._changed)

    def __repr__(self) -> str:
        return f"<Engine {self.name} up={self.probe.reachable} in_flight={self.in_flight}>"

    @property
    def has_room(self) -> bool:
        """False where it has what it may have, which is little while it starts slowly."""
        if self._room.bounds and self.in_flight >= self.most:
            return False
        if self._back_at is None:
            return True
        age_s = self._clock.now() - self._back_at
        return age_s > SLOW_START_S or self.in_flight < 1 + SLOW_START_PER_S * age_s

    @property
    def most(self) -> int:
        """Requests that it may have in all, where that is bounded."""
        return self._room.most(self.name, self.in_flight)

    def came_back(self, at: float | None = None) -> None:
        """It failed, and does not any more, now or from `at` on."""
        self._back_at = self._clock.now() if at is None else at

    def _changed(self, reachable: bool) -> None:
        logger.info("engine %s is %s", self.name, "reachable" if reachable else "not reachable")
        if reachable and self.probe.losses:
            self.came_back()
        self._on_change(self)


class Engines:
    """Owns what was sent to whom; borrows the rest, and whoever lets an engine join probes it."""

    def __init__(
        self,
        upstreams: dict[str, Upstream],
        view: ClusterView,
        limits: Limits,
        clock: Clock,
        on_change: Callable[[Engine], None],
        shared: SharedPrefixes | None = None,
    ) -> None:
        """`shared`: what other gateways sent where."""
        self._view = view
        self._shared = shared
        self._limits = limits
        self._clock = clock
        self.breakers = view.breakers
        self.recent = RecentPrefixes(clock)
        self._texts = TextBlocks(OwnHasher() if shared is None else SharedHasher())
        self.outliers = Outliers(clock, self._ejected)
        self._on_change = on_change
        self._room = EngineRoom(limits, view, clock)
        self._room_found, self._room_until = 0, 0.0
        self.turns: Turns | None = None
        """Where requests wait for room; None where engines get as many as come."""
        if self._room.bounds:
            self.turns = Turns(lambda: self.room, limits.gateway_waiting, limits.gateway_wait_s)
        self._engines = {
            name: Engine(name, upstream, limits, clock, self._changed, self._room)
            for name, upstream in upstreams.items()
        }

    def __iter__(self) -> Iterator[Engine]:
        return iter(self._engines.values())

    def __len__(self) -> int:
        return len(self._engines)

    def __getitem__(self, name: str) -> Engine:
        return self._engines[name]

    def join(self, name: str, upstream: Upstream) -> Engine:
        """One more, which the caller probes; it takes the place of another one of that name."""
        engine = Engine(name, upstream, self._limits, self._clock, self._changed, self._room)
        self._room.forget(name)
        self._room_until = 0.0
        self._engines[name] = engine
        return engine

    def leave(self, engine: Engine) -> None:
        """It gets nothing new; who is there already may go on."""
        if self._engines.get(engine.name) is engine:
            del self._engines[engine.name]
            self._room_until = 0.0
            self.breakers.engines.pop(engine.name, None)
            self._lost_cache(engine)
            self.outliers.left(engine.name)

    @property
    def reachable(self) -> bool:
        """One of them answers."""
        return any(engine.probe.reachable for engine in self)

    def any_upstream(self) -> Upstream:
        """Of an engine that answers, where one does. Raises EngineUnavailable without any."""
        up = next((engine for engine in self if engine.probe.reachable), None)
        up = up or next(iter(self), None)
        if up is None:
            raise EngineUnavailable("no decode engine is known")
        return up.upstream

    def choose(
        self,
        chains: Chains,
        prompt_tokens: int,
        key: str,
        tried: Collection[str] = (),
        texts: Sequence[int] = (),
    ) -> tuple[Engine, int] | None:
        """The best one for a prompt that was not tried yet, and how many tokens of it were sent
        there shortly before; None where there is none left.

        Where none is usable it is the least bad: its answer says best what is wrong.
        """
        left = [engine for engine in self._engines.values() if engine.name not in tried]
        if not left:
            return None
        if len(self._engines) < 2:
            return left[0], 0
        block_tokens, chain = coarsest(chains, texts)
        names = self._names(block_tokens, chain)
        options = [
            EngineOption(
                self._view.local(engine.name, chains),
                self._recent_tokens(engine, block_tokens, chain, names),
                self._view.transfers(engine.name),
                self.usable(engine),
            )
            for engine in left
        ]
        best = rank_engines(options, prompt_tokens, key)[0] if len(left) > 1 else options[0]
        return self._engines[best.local.name], best.recent_tokens

    @property
    def room(self) -> int:
        """How many requests the engines that work may have together; where none does, as many as
        come there, to hear what is wrong. What was found holds for a moment.
        """
        now = self._clock.now()
        if now >= self._room_until:
            working = [engine.most for engine in self if self._works(engine)]
            self._room_found = sum(working) if working else sys.maxsize
            self._room_until = now + KEPT_S
        return self._room_found

    def usable(self, engine: Engine) -> bool:
        """It works, and has room for one more request."""
        return engine.has_room and self._works(engine)

    def _works(self, engine: Engine) -> bool:
        """It answers, takes new requests, and has not failed of late."""
        feed = self._view.feeds.get(engine.name)
        return (
            engine.probe.reachable
            and not (feed is not None and feed.connected and feed.engine.draining)
            and not self.outliers.out(engine.name)
            and self.breakers.engines[engine.name].allows
        )

    def sent(self, engine: Engine, chains: Chains, texts: Sequence[int] = ()) -> None:
        """A request goes there."""
        self.breakers.engines[engine.name].sent()
        if len(self._engines) < 2:
            return
        block_tokens, chain = coarsest(chains, texts)
        self.recent.sent(engine.name, chain)
        if self._shared is not None and (names := self._names(block_tokens, chain)):
            self._shared.sent(engine.name, names)

    def texts(self, body: bytes, salt: str) -> list[int]:
        """Blocks of the text of a request that was not tokenised."""
        return self._texts.chain(body, salt)

    def _names(self, block_tokens: int, chain: Sequence[Hashable]) -> list[bytes]:
        """What gateways call its blocks; none where they tell each other of none."""
        return [] if self._shared is None else self._shared.names(block_tokens, chain)

    def _recent_tokens(
        self,
        engine: Engine,
        block_tokens: int,
        chain: Sequence[Hashable],
        names: Sequence[bytes],
    ) -> int:
        """Of the prompt, sent there of late by this gateway or another one."""
        own = self.recent.match(engine.name, chain) * block_tokens
        if self._shared is None or not names:
            return own
        tells = self._view.cache_known(engine.name)
        matched = self._shared.match(engine.name, names, tells=tells)
        return max(own, self._shared.tokens(block_tokens, matched))

    def _lost_cache(self, engine: Engine) -> None:
        self.recent.forget(engine.name)
        if self._shared is not None:
            self._shared.cleared(engine.name)

    def failed(self, engine: Engine) -> None:
        """It could not answer: no connection, a broken one, an error of its own."""
        if self._belongs(engine):
            self.breakers.engines[engine.name].failed()
            self.outliers.answered(engine.name, failed=True)

    def unjudged(self, engine: Engine) -> None:
        """The client left, or the request failed for another reason."""
        if self._belongs(engine):
            self.breakers.engines[engine.name].unjudged()

    def paced(self, engine: Engine, gap_s: float) -> None:
        """A stream went by, with so much time between two of its events."""
        if self._belongs(engine):
            self.outliers.paced(engine.name, gap_s)

    def succeeded(self, engine: Engine) -> None:
        """It answered, whatever it said."""
        if not self._belongs(engine):
            return
        breaker = self.breakers.engines[engine.name]
        if not breaker.is_closed:
            engine.came_back()
        breaker.succeeded()
        self.outliers.answered(engine.name, failed=False)

    def _ejected(self, name: str, until: float) -> None:
        engine = self._engines.get(name)
        if engine is not None:
            engine.came_back(until)

    def _belongs(self, engine: Engine) -> bool:
        """Not one that has left, whose name another one may have by now."""
        return self._engines.get(engine.name) is engine

    def _changed(self, engine: Engine) -> None:
        self._room_until = 0.0
        if not engine.probe.reachable:  # whatever comes back has nothing cached
            self._lost_cache(engine)
            self.outliers.forget(engine.name)
        elif self.turns is not None:
            self.turns.look()
        self._on_change(engine)


def coarsest(chains: Chains, texts: Sequence[int] = ()) -> tuple[int, Sequence[Hashable]]:
    """Block size in tokens and hashes of the chain with the fewest blocks; that of the text without
    any.
    """
    if not chains:
        return TEXT_BLOCK_TOKENS, texts
    size = max(chains)
    return size, chains[size]
