"""A store in Redis, for gateways anywhere in a region."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from itertools import islice
from typing import Any, cast

import msgspec
import redis.exceptions

from gateway.state.redis_client import client_of
from gateway.state.redis_script import EXCHANGE, KEYS, LEAVE
from prfaas.cluster_state import (
    PREFIX_TTL_S,
    BucketKey,
    HeardPrefixes,
    Member,
    PrefixDelta,
    Report,
    Sent,
    Shared,
    SharedPolicy,
)
from prfaas.errors import StateUnavailable
from prfaas.settings import StateSettings

MAX_REASON_CHARS = 200
SEPARATOR = "|"
"""Between tenant and limit; no tenant's name holds one."""


class RedisStore:
    """Owns a connection to Redis, made anew where it broke; close it with `close`.

    Nothing is tried twice here: the loop that exchanges does that, with what is true by then.
    """

    def __init__(self, settings: StateSettings) -> None:
        """Raises ConfigError where the URL is none, which it does not repeat."""
        assert settings.redis is not None
        self._timeout_s = settings.timeout_s
        self._keys = [f"{{{settings.prefix}}}:{name}" for name in KEYS]
        self._channel = f"{{{settings.prefix}}}:sent"
        self._told_at: float | None = None
        """Since when something told has not come back to who hears here."""
        self._encoder = msgspec.json.Encoder()
        self._member = msgspec.json.Decoder(Member)
        self._packer = msgspec.msgpack.Encoder()
        self._deltas = msgspec.msgpack.Decoder(tuple[PrefixDelta, ...])
        self._sent = msgspec.msgpack.Decoder(Sent)
        self._client, self._close = client_of(settings)
        self._exchange = self._client.register_script(EXCHANGE)
        self._leave = self._client.register_script(LEAVE)

    async def exchange(self, report: Report) -> Shared:
        """Raises StateUnavailable."""
        ask = {
            "id": report.member.id,
            "ttl_ms": report.ttl_s * 1000,
            "epoch": report.epoch,
            "new_epoch": uuid.uuid4().hex,
            "since": report.since,
            "policy_version": report.policy_version,
        }
        if report.publish is not None:
            ask["publish"] = report.publish
        if report.prefixes_since is not None:
            ask["prefixes_since"] = report.prefixes_since
        arguments: list[bytes | str] = [
            self._encoder.encode(ask),
            self._encoder.encode(report.member),
            self._packer.encode(report.prefixes) if report.prefixes else b"",
        ]
        for spend in report.spends:
            rate_per_ms = spend.capacity / spend.period_s / 1000
            arguments += [
                SEPARATOR.join(spend.key),
                repr(spend.capacity),
                repr(rate_per_ms),
                repr(spend.spent),
                repr(spend.level),
            ]
        answer = await self._asked(
            cast(Awaitable[Any], self._exchange(keys=self._keys, args=arguments))
        )
        return self._shared(answer)

    async def tell_sent(self, sent: Sent) -> None:
        """Raises StateUnavailable."""
        data = self._packer.encode(sent)
        await self._asked(cast(Awaitable[Any], self._client.publish(self._channel, data)))
        if self._told_at is None:
            self._told_at = asyncio.get_running_loop().time()

    async def hear_sent(self, take: Callable[[Sent], None]) -> None:
        """On a connection of its own. Raises StateUnavailable, also where it is still open and what
        this gateway itself tells does not come back.
        """
        channel = self._client.pubsub()
        try:
            await self._asked(channel.subscribe(self._channel))
            self._told_at = None
            while True:
                try:
                    message = await channel.get_message(timeout=self._timeout_s)
                except (redis.exceptions.RedisError, OSError) as exc:
                    raise StateUnavailable(f"Redis: {_reason(exc)}") from exc
                if message is None:
                    self._check_heard()
                elif message["type"] == "message":
                    self._told_at = None
                    self._hear(message["data"], take)
        finally:
            await channel.aclose()  # type: ignore[no-untyped-call]

    def _check_heard(self) -> None:
        """Raises StateUnavailable."""
        told_at, now = self._told_at, asyncio.get_running_loop().time()
        if told_at is not None and now - told_at > self._timeout_s:
            raise StateUnavailable("Redis: nothing comes of what is told")

    def _hear(self, data: bytes, take: Callable[[Sent], None]) -> None:
        try:
            sent = self._sent.decode(data)
        except msgspec.MsgspecError:  # of another version: its exchanges may be understood
            return
        take(sent)

    async def leave(self, member_id: str) -> None:
        """Raises StateUnavailable."""
        await self._asked(cast(Awaitable[Any], self._leave(keys=self._keys[:2], args=[member_id])))

    async def close(self) -> None:
        await self._close()

    async def _asked(self, answer: Awaitable[Any]) -> Any:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await answer
        except TimeoutError as exc:
            text = f"Redis did not answer within {self._timeout_s:g} s"
            raise StateUnavailable(text) from exc
        except (redis.exceptions.RedisError, OSError) as exc:
            if isinstance(exc, redis.exceptions.ReadOnlyError):
                # It was the primary when we connected; another one is now, under the same name.
                await self._client.connection_pool.disconnect(inuse_connections=False)
            raise StateUnavailable(f"Redis: {_reason(exc)}") from exc

    def _shared(self, answer: Any) -> Shared:
        """Raises StateUnavailable where it makes no sense."""
        try:
            parts = iter(answer)
            epoch, seq, version, text, upto, gap, batches = islice(parts, 7)
            prefixes = list(islice(parts, int(batches)))
            told = list(islice(parts, int(next(parts))))
            levels = list(parts)
            policy = SharedPolicy(int(version), text.decode()) if int(version) else None
            return Shared(
                epoch.decode(),
                int(seq),
                tuple(self._member_in(at, info) for at, info in enumerate(told)),
                {
                    _key(name): float(level)
                    for name, level in zip(levels[::2], levels[1::2], strict=True)
                },
                policy,
                tuple(heard for batch in prefixes if (heard := self._prefixes_in(batch))),
                int(upto),
                gap == b"1",
            )
        except (StopIteration, ValueError, TypeError, AttributeError, msgspec.MsgspecError) as exc:
            raise StateUnavailable("Redis holds what no gateway of this version wrote") from exc

    def _member_in(self, at: int, info: bytes) -> Member:
        """One of another version may not be understood; it takes its share nevertheless."""
        try:
            return self._member.decode(info)
        except msgspec.MsgspecError:
            return Member(f"unreadable-{at}")

    def _prefixes_in(self, batch: bytes) -> HeardPrefixes | None:
        """None where they are too old, or another version wrote them."""
        age_ms, sender, packed = batch.split(b"|", 2)
        age_s = int(age_ms) / 1000
        try:
            deltas = self._deltas.decode(packed)
        except msgspec.MsgspecError:
            return None
        return HeardPrefixes(sender.decode(), age_s, deltas) if age_s < PREFIX_TTL_S else None


def _key(name: bytes) -> BucketKey:
    tenant, _, limit = name.decode().partition(SEPARATOR)
    return tenant, limit


def _reason(exc: BaseException) -> str:
    """The class and what it says on one line, which names hosts and users but no passwords."""
    text = " ".join(str(exc).split())[:MAX_REASON_CHARS]
    return f"{type(exc).__name__}: {text}" if text else type(exc).__name__
