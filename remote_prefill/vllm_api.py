"""vLLM's HTTP API as an agent uses it: prefills by token ids, metrics, health."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlencode

import aiohttp
import msgspec
import numpy as np

from prfaas.errors import (
    EngineUnavailable,
    InvalidRequest,
    Overloaded,
    PrfaasError,
    Unauthorized,
    UnknownModel,
)
from prfaas.settings import VllmSettings

EXPORT_PARAM = "prfaas_export"
"""Key of ours in `kv_transfer_params`; the connector's producer has the same."""
RETRY_AFTER_S = 1.0
MAX_METRICS_BYTES = 8 << 20
MAX_ERROR_BYTES = 4096
MAX_ANSWER_BYTES = 1 << 20
"""Of one token; vLLM answers with some hundred bytes."""
CONNECT_TIMEOUT_S = 3.0
POLL_TIMEOUT_S = 2.0


class VllmApi:
    """Owns the HTTP connections to one vLLM server; `close` ends them.

    All methods raise EngineUnavailable where it cannot be reached, Unauthorized where it wants
    another key.
    """

    def __init__(self, settings: VllmSettings) -> None:
        self._url = settings.url.rstrip("/")
        key = settings.api_key.get_secret_value()
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._session: aiohttp.ClientSession | None = None
        self._prefills: aiohttp.ClientSession | None = None
        self._selects = True

    async def close(self) -> None:
        """End all requests under way."""
        sessions = self._session, self._prefills
        self._session = self._prefills = None
        for session in sessions:
            if session is not None:
                await session.close()

    async def metrics(self, names: Sequence[str] = ()) -> str:
        """The text of /metrics; with `names`, of no more than these where vLLM can tell them apart.

        All of them would cost it four times as much, twice a second.
        """
        if names and self._selects:
            # With a slash, as the route without one serves everything whatever is asked.
            query = urlencode([("name[]", name) for name in names])
            try:
                text = await self._metrics(f"/metrics/?{query}")
            except UnknownModel:  # 404
                text = ""
            if text.strip():
                return text
            # Several API processes join their metrics into one collector, which has no names.
            self._selects = False
        return await self._metrics("/metrics")

    async def _metrics(self, path: str) -> str:
        return (await self._get(path, MAX_METRICS_BYTES)).decode(errors="replace")

    async def healthy(self) -> bool:
        """Whether /health says that its engine runs."""
        try:
            await self._get("/health", MAX_ANSWER_BYTES)
        except PrfaasError:
            return False
        return True

    async def prefill(
        self,
        model: str,
        tokens: bytes,
        *,
        salt: str = "",
        use_cache: bool = True,
        export: dict[str, Any] | None = None,
    ) -> None:
        """Have `tokens` (int32 ids) computed; the token that vLLM samples after them is discarded.

        Raises InvalidRequest, UnknownModel, Overloaded. Cancelling aborts the request at vLLM.
        """
        body: dict[str, Any] = {
            "model": model,
            "prompt": np.frombuffer(tokens, dtype="<i4").tolist(),
            "max_tokens": 1,
            "temperature": 0.0,
            "ignore_eos": True,
        }
        # No request goes without vLLM's prefix cache; under a salt of its own it shares nothing.
        own = salt if use_cache else f"probe-{secrets.token_hex(16)}"
        if own:
            body["cache_salt"] = own
        if export is not None:
            body["kv_transfer_params"] = {EXPORT_PARAM: export}
        try:
            async with self._prefill_client().post(
                f"{self._url}/v1/completions",
                data=msgspec.json.encode(body),
                headers={**self._headers, "Content-Type": "application/json"},
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            ) as response:
                text = (await _body(response, MAX_ANSWER_BYTES)).decode(errors="replace")
                if response.status != 200:
                    raise _error(response.status, text[:MAX_ERROR_BYTES])
                if export is not None and not _exported(text):
                    raise EngineUnavailable(
                        f"the vLLM at {self._url} is not the engine on the port, or has no "
                        "connector of ours",
                        retry_after_s=RETRY_AFTER_S,
                    )
        except (aiohttp.ClientError, OSError, TimeoutError) as exc:
            raise self._unreachable(exc) from exc

    async def _get(self, path: str, most_bytes: int) -> bytes:
        try:
            async with asyncio.timeout(POLL_TIMEOUT_S):
                async with self._client().get(
                    f"{self._url}{path}", headers=self._headers
                ) as response:
                    data = await _body(response, most_bytes)
                    if response.status != 200:
                        raise _error(
                            response.status, data[:MAX_ERROR_BYTES].decode("utf-8", "replace")
                        )
                    return data
        except (aiohttp.ClientError, OSError, TimeoutError) as exc:
            raise self._unreachable(exc) from exc

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession()
        return self._session

    def _prefill_client(self) -> aiohttp.ClientSession:
        """Each prefill has a connection of its own: vLLM closes idle ones after 5 s, a busy server
        even as the next request lies in them, and what may have been begun is not sent again.
        """
        if self._prefills is None:
            # As many as P has sessions: each waits here for its own, and the bound on sessions is
            # the agent's.
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            self._prefills = aiohttp.ClientSession(connector=connector)
        return self._prefills

    def _unreachable(self, exc: BaseException) -> EngineUnavailable:
        text = str(exc) or type(exc).__name__
        return EngineUnavailable(
            f"vLLM at {self._url} cannot be reached: {text}", retry_after_s=RETRY_AFTER_S
        )


async def _body(response: aiohttp.ClientResponse, most_bytes: int) -> bytes:
    """All of an answer. Raises EngineUnavailable where it is too large."""
    parts, size = [], 0
    async for part in response.content.iter_chunked(1 << 16):
        parts.append(part)
        size += len(part)
        if size > most_bytes:
            raise EngineUnavailable(f"an answer of vLLM is over {most_bytes} bytes")
    return b"".join(parts)


def _error(status: int, text: str) -> PrfaasError:
    """What an answer of vLLM means for whoever asked us."""
    message = f"vLLM answers {status}: {_message(text)}"
    if status in (400, 422):
        return InvalidRequest(message, param="tokens")
    if status in (401, 403):
        return Unauthorized(message)
    if status == 404:
        return UnknownModel(message, param="model")
    if status in (429, 503):
        return Overloaded(message, retry_after_s=RETRY_AFTER_S)
    return EngineUnavailable(message, retry_after_s=RETRY_AFTER_S)


def _exported(text: str) -> bool:
    """Whether the connector that answers knew the export."""
    try:
        return bool(msgspec.json.decode(text)["kv_transfer_params"][EXPORT_PARAM]["known"])
    except (msgspec.DecodeError, TypeError, KeyError):
        return False


def _message(text: str) -> str:
    try:
        body = msgspec.json.decode(text)
        found = body["error"]["message"] if "error" in body else body.get("message", text)
    except (msgspec.DecodeError, TypeError, KeyError, AttributeError):
        found = text
    return " ".join(str(found).split())[:300]
