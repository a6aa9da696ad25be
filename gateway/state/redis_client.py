"""The client of Redis as the settings have it: of one server, or of what Sentinels name."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import unquote, urlsplit

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff

from prfaas.errors import ConfigError
from prfaas.settings import StateSettings

SENTINEL_PORT = 26379
Close = Callable[[], Awaitable[Any]]


def client_of(settings: StateSettings) -> tuple[redis.asyncio.Redis, Close]:
    """And what closes it. Nothing is tried twice by it.

    Raises ConfigError where the URL is none, which it does not repeat.
    """
    assert settings.redis is not None
    url = settings.redis.get_secret_value()
    try:
        if "+sentinel://" in url:
            return _by_sentinels(url, settings)
        secured = url.startswith("rediss://")
        options = _options(settings, settings.timeout_s, secured)
        client = redis.asyncio.Redis.from_url(url, max_connections=4, **options)
    except (ValueError, TypeError) as exc:
        raise ConfigError(
            "gateway.state.redis: not a URL like redis://USER:PASSWORD@HOST:6379/0, "
            "rediss://..., unix:///PATH or "
            "redis+sentinel://USER:PASSWORD@HOST:26379,HOST:26379/NAME/0",
            field="gateway.state.redis",
        ) from exc
    return client, client.aclose


def _by_sentinels(url: str, settings: StateSettings) -> tuple[redis.asyncio.Redis, Close]:
    """Each new connection goes to whom they call the primary by then. Raises ValueError."""
    scheme, where, path, query, fragment = urlsplit(url)
    if scheme not in ("redis+sentinel", "rediss+sentinel") or query or fragment:
        raise ValueError("scheme")
    who, _, hosts = where.rpartition("@")
    user, _, password = who.partition(":")
    name, _, database = path.lstrip("/").partition("/")
    if not name:
        raise ValueError("no name of a primary")
    sentinels = [_address(each) for each in hosts.split(",")]
    secured = scheme == "rediss+sentinel"
    # All of them are asked within one exchange, for the first ones may hang.
    asking = _options(settings, settings.timeout_s / (len(sentinels) + 1), secured)
    secret = settings.redis_sentinel_password.get_secret_value()
    if secret:
        asking["password"] = secret
    found: Any = Sentinel(  # type: ignore[no-untyped-call]
        sentinels, sentinel_kwargs={**asking, "ssl": secured}
    )
    client = found.master_for(
        name,
        ssl=secured,
        db=int(database or 0),
        username=unquote(user) or None,
        password=unquote(password) or None,
        max_connections=4,
        **_options(settings, settings.timeout_s, secured),
    )

    async def close() -> None:
        await asyncio.gather(*(each.aclose() for each in (client, *found.sentinels)))

    return client, close


def _address(text: str) -> tuple[str, int]:
    """Raises ValueError."""
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError("no host")
    return parts.hostname, parts.port or SENTINEL_PORT


def _options(settings: StateSettings, timeout_s: float, secured: bool) -> dict[str, Any]:
    options: dict[str, Any] = {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "retry": Retry(NoBackoff(), 0),
        "client_name": "prfaas-gateway",
    }
    if not secured:
        return options
    options |= {
        "ssl_cert_reqs": "required",
        "ssl_check_hostname": True,
        "ssl_min_version": ssl.TLSVersion.TLSv1_2,
    }
    for name, path in (
        ("ssl_ca_certs", settings.redis_ca),
        ("ssl_certfile", settings.redis_cert),
        ("ssl_keyfile", settings.redis_key),
    ):
        if path is not None:
            options[name] = str(path)
    return options
