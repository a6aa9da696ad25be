"""The card of the gateway's model, as its engines show it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.engines import Engines
from prfaas.errors import PrfaasError, UnknownModel
from prfaas.limits import Limits

PATH = "/v1/models"
MAX_NAME_CHARS = 200
"""Of a name that is none, in the error that says so."""


class _List(msgspec.Struct):
    data: list[dict[str, Any]]


class ModelCard:
    """Asks an engine for its card, and makes one where none answers in time; nothing to close.

    Engines say more than their model's name, such as `max_model_len`, by which clients plan.
    """

    def __init__(self, model: str, engines: Engines, limits: Limits) -> None:
        self._model = model
        self._engines = engines
        self._limits = limits
        self._created = int(time.time())

    async def card(self, headers: Mapping[str, str]) -> Mapping[str, Any]:
        """Of our model; never raises. `headers` of the client go along, its key among them."""
        for engine in self._engines:
            if not engine.probe.reachable:
                continue
            try:
                async with (
                    asyncio.timeout(self._limits.control_timeout_s),
                    engine.upstream.request("GET", PATH, headers) as response,
                ):
                    body = await response.read(self._limits.max_answer_bytes)
                listed = msgspec.json.decode(body, type=_List)
            except (PrfaasError, TimeoutError, msgspec.DecodeError, ValueError, RecursionError):
                continue
            for card in listed.data:
                if card.get("id") == self._model:
                    return card
        return {
            "id": self._model, "object": "model", "created": self._created, "owned_by": "prfaas"
        }  # fmt: skip


def check_model(asked: str | None, served: str) -> None:
    """Raises UnknownModel. A request need not name one."""
    if asked is not None and asked != served:
        raise UnknownModel(
            f"the model {asked[:MAX_NAME_CHARS]!r} does not exist; this gateway serves {served!r}",
            param="model",
        )
