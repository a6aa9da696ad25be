"""Which engines have an endpoint beyond chat and completions: as configured, or as they say."""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gateway.engines import Engine
from gateway.passed import PassedApi
from prfaas.clock import Clock
from prfaas.errors import PrfaasError
from prfaas.limits import Limits
from prfaas.settings import EngineEndpoint

logger = logging.getLogger(__name__)

ASK_AGAIN_S = 30.0
"""An engine that lacked an endpoint, or did not say, is asked anew after so long."""
ANSWER_BYTES = 1 << 20


class Offer(enum.StrEnum):
    """Whether an engine has an endpoint."""

    YES = "yes"
    NO = "no"
    UNKNOWN = "unknown"
    """It did not say: trying is the way to know."""


@dataclass(frozen=True, slots=True)
class _Told:
    offer: Offer
    at: float
    losses: int
    """Of the engine's probe when it told: what comes back may be another one."""


class Abilities:
    """Keeps what engines have told; nothing to close.

    A `GET` at an endpoint for `POST` asks without making the engine work: 405 where it is there,
    404 where it is not. Anything else tells nothing (a key that is missing, a proxy's own page).
    """

    def __init__(self, limits: Limits, clock: Clock) -> None:
        self._timeout_s = limits.control_timeout_s
        self._clock = clock
        self._configured: dict[str, frozenset[str]] = {}
        self._told: dict[tuple[str, PassedApi], _Told] = {}
        self._asking: dict[tuple[str, PassedApi], asyncio.Lock] = {}

    def joined(self, endpoint: EngineEndpoint) -> None:
        """An engine that may be asked for from now on."""
        self.forget(endpoint.name)
        if endpoint.apis is not None:
            self._configured[endpoint.name] = frozenset(endpoint.apis)

    async def offer(self, engine: Engine, api: PassedApi, headers: Mapping[str, str]) -> Offer:
        """Of one engine, with a question to it where that is not known; never raises for it.

        `headers`: of the request that wants to know, its key among them.
        """
        configured = self._configured.get(engine.name)
        if configured is not None:
            return Offer.YES if api.value in configured else Offer.NO
        key = (engine.name, api)
        known = self._known(engine, api)
        if known is not None:
            return known
        lock = self._asking.setdefault(key, asyncio.Lock())
        async with lock:
            known = self._known(engine, api)  # another request may have asked meanwhile
            if known is None:
                known = await self._ask(engine, api, headers)
                self._told[key] = _Told(known, self._clock.now(), engine.probe.losses)
        return known

    def lacks(self, engine: Engine, api: PassedApi) -> None:
        """It answered a request so that this is certain."""
        self._told[engine.name, api] = _Told(Offer.NO, self._clock.now(), engine.probe.losses)

    def forget(self, engine: str) -> None:
        """It is gone."""
        self._configured.pop(engine, None)
        for api in PassedApi:
            self._told.pop((engine, api), None)
            self._asking.pop((engine, api), None)

    def told(self) -> Iterator[tuple[str, PassedApi, Offer]]:
        """By engine and endpoint, what is remembered."""
        for (name, api), told in self._told.items():
            yield name, api, told.offer

    def _known(self, engine: Engine, api: PassedApi) -> Offer | None:
        told = self._told.get((engine.name, api))
        if told is None or told.losses != engine.probe.losses:
            return None
        if told.offer is not Offer.YES and self._clock.now() - told.at > ASK_AGAIN_S:
            return None
        return told.offer

    async def _ask(self, engine: Engine, api: PassedApi, headers: Mapping[str, str]) -> Offer:
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                engine.upstream.request("GET", api.path, headers) as response,
            ):
                await response.read(ANSWER_BYTES)
        except (PrfaasError, TimeoutError):
            return Offer.UNKNOWN
        offer = {405: Offer.YES, 404: Offer.NO}.get(response.status, Offer.UNKNOWN)
        logger.info("engine %s has %s: %s", engine.name, api.path, offer.value)
        return offer
