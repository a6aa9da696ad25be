"""Dialling what a configuration names, once each, with answers that say what went wrong."""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import socket
import ssl
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import aiohttp
import grpc
import grpc.aio
import msgspec
from cryptography import x509

from prfaas.dialling import Endpoint
from prfaas.errors import PeerUnavailable, PrfaasError
from prfaas.rpc.convert_watch import watch_from_pb
from prfaas.rpc.status import error_of
from prfaas.rpc.v1 import prefill_pb2, prefill_pb2_grpc
from prfaas.settings import TlsSettings
from prfaas.telemetry import WatchUpdate
from prfaas.tls_files import certificate_names

TIME_KEY = "prfaas-time"
KEYS_KEY = "prfaas-key-ids"
"""Initial metadata of Watch: the agent's clock in Unix seconds, and ids of its transfer keys."""
MAX_EVENT_BYTES = 64 << 20
MAX_ANSWER_BYTES = 1 << 20
OPTIONS = (
    ("grpc.max_receive_message_length", MAX_EVENT_BYTES),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
)


@dataclass(frozen=True, slots=True)
class Heard:
    """The first event of an agent's Watch."""

    update: WatchUpdate
    took_s: float
    ahead_s: float | None
    """How far its clock is ahead of ours, give or take half of `took_s`; None: it does not say."""
    key_ids: tuple[str, ...] | None
    """Of the transfer keys it knows; None: it does not say."""


@dataclass(frozen=True, slots=True)
class Answered:
    """One answer over HTTP; `body` is JSON, or None where it is not."""

    status: int
    body: Any
    took_s: float
    ahead_s: float | None
    """As its Date header says, which is whole seconds."""


@dataclass(frozen=True, slots=True)
class Shown:
    """The certificate that a server showed and that passed."""

    names: tuple[str, ...]
    ends: datetime

    def left_s(self) -> float:
        return (self.ends - datetime.now(UTC)).total_seconds()


class Refused(Exception):
    """It did not work; the text says why, `word` which kind of trouble it is."""

    def __init__(self, text: str, word: str) -> None:
        super().__init__(text)
        self.word = word
        """`address`, `refused`, `timeout`, `name`, `authority`, `expired`, `tls`, `permission` or
        `other`."""


async def ask(
    url: str, timeout_s: float, *, json: object | None = None, api_key: str = ""
) -> Answered:
    """GET, or POST of `json`. Raises Refused."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = aiohttp.ClientTimeout(timeout_s)
    began, wall = time.monotonic(), time.time()
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
            session.request("GET" if json is None else "POST", url, json=json) as response,
        ):
            data = await response.content.read(MAX_ANSWER_BYTES)
            took_s = time.monotonic() - began
            body: Any = None
            with contextlib.suppress(ValueError):
                body = msgspec.json.decode(data)
            return Answered(
                response.status, body, took_s, _ahead(response.headers.get("date"), wall)
            )
    except TimeoutError as exc:
        raise Refused(f"no answer within {timeout_s:g} s", "timeout") from exc
    except aiohttp.ClientConnectorError as exc:
        raise _of_os(exc.os_error) from exc
    except (aiohttp.ClientError, ValueError, OSError) as exc:
        raise Refused(str(exc) or type(exc).__name__, "other") from exc


async def reach(host: str, port: int, timeout_s: float) -> None:
    """A connection over TCP, and nothing more. Raises Refused."""
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError as exc:
        raise Refused(f"no connection within {timeout_s:g} s", "timeout") from exc
    except OSError as exc:
        raise _of_os(exc) from exc
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


async def shake(
    host: str, port: int, tls: TlsSettings, name: str | None, timeout_s: float
) -> Shown:
    """A TLS handshake with our certificate; the server must carry `name`. Raises Refused."""
    context = ssl.create_default_context(cafile=str(tls.ca))
    context.load_cert_chain(str(tls.cert), str(tls.key))
    context.set_alpn_protocols(["h2"])
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(
                host, port, ssl=context, server_hostname=name or host
            )
    except TimeoutError as exc:
        raise Refused(f"no TLS handshake within {timeout_s:g} s", "timeout") from exc
    except ssl.SSLCertVerificationError as exc:
        raise Refused(exc.verify_message, _VERIFIES.get(exc.verify_code, "tls")) from exc
    except ssl.SSLError as exc:
        raise Refused(f"the handshake failed: {exc.reason or exc}", "tls") from exc
    except OSError as exc:
        raise _of_os(exc) from exc
    found = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    certificate = x509.load_der_x509_certificate(found)
    return Shown(tuple(certificate_names(certificate)), certificate.not_valid_after_utc)


async def hear(endpoint: Endpoint, timeout_s: float) -> Heard:
    """The first event of its Watch. Raises Refused."""
    began, wall = time.monotonic(), time.time()
    async with endpoint.open(OPTIONS) as channel:
        call = prefill_pb2_grpc.TelemetryStub(channel).Watch(
            prefill_pb2.WatchRequest(gateway="prfaas check")
        )
        try:
            async with asyncio.timeout(timeout_s):
                told = dict(await call.initial_metadata() or ())
                took_s = time.monotonic() - began
                message = await call.read()
            if message is grpc.aio.EOF:
                raise PeerUnavailable("it ended the stream at once")
            update = watch_from_pb(message)
        except TimeoutError as exc:
            raise Refused(f"no telemetry within {timeout_s:g} s", "timeout") from exc
        except grpc.aio.AioRpcError as exc:
            error = error_of(exc, peer=endpoint.address, phase="connect")
            permission = exc.code() in (
                grpc.StatusCode.PERMISSION_DENIED,
                grpc.StatusCode.UNAUTHENTICATED,
            )
            raise Refused(error.message, "permission" if permission else "other") from exc
        except PrfaasError as exc:
            raise Refused(exc.message, "other") from exc
        finally:
            call.cancel()
    theirs, ids = _text(told.get(TIME_KEY)), _text(told.get(KEYS_KEY))
    ahead_s = float(theirs) - wall - took_s / 2 if theirs else None
    return Heard(
        update, took_s, ahead_s, None if ids is None else tuple(filter(None, ids.split(",")))
    )


def _text(value: str | bytes | None) -> str | None:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _ahead(date: str | None, wall: float) -> float | None:
    """By a Date header, which is cut to whole seconds: half a second later on average."""
    parsed = email.utils.parsedate_tz(date) if date else None
    return None if parsed is None else email.utils.mktime_tz(parsed) + 0.5 - wall


_VERIFIES = {62: "name", 64: "name", 10: "expired", 9: "expired", 18: "authority", 19: "authority",
             20: "authority", 21: "authority"}  # fmt: skip
"""OpenSSL's codes of X.509 verification."""


def _of_os(exc: OSError) -> Refused:
    if isinstance(exc, socket.gaierror):
        return Refused("the host's name is not known", "address")
    if isinstance(exc, ConnectionRefusedError):
        return Refused("connection refused: nobody listens there", "refused")
    return Refused(exc.strerror or str(exc) or type(exc).__name__, "refused")
