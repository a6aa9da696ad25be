"""Mutual TLS for gRPC: credentials that follow rotated files, and who the other side is."""

from __future__ import annotations

import ipaddress
import logging
from collections import Counter
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
)
from contextlib import aclosing, asynccontextmanager
from datetime import UTC, datetime
from typing import Any, Protocol

import grpc
import grpc.aio

from prfaas.clock import SYSTEM_CLOCK, Clock
from prfaas.errors import ConfigError, Overloaded, PrfaasError, Unauthorized
from prfaas.rpc.status import status_of
from prfaas.settings import TlsSettings
from prfaas.tls_files import TlsFiles, TlsMaterial, certificate_names, parse_certificates

log = logging.getLogger(__name__)


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Credentials that demand a client certificate of the CA, for `add_secure_port`.

    Every handshake looks at the files anew, CA included; open connections live on.
    """
    used = files.current()

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal used
        material = files.current()
        if material.version == used.version:
            return None
        used = material
        return _configuration(material)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(used), fetch, require_client_authentication=True
    )


def channel_credentials(material: TlsMaterial) -> grpc.ChannelCredentials:
    """Credentials of a channel; they stay those of `material`, so compare `TlsFiles.version()`."""
    return grpc.ssl_channel_credentials(material.ca, material.key, material.cert)


def server_name_options(name: str) -> list[tuple[str, str]]:
    """Channel options under which the server's certificate must carry `name`.

    Without them it must carry the host that is dialled.
    """
    return [("grpc.ssl_target_name_override", name)]


class AuthContext(Protocol):
    """The part of a gRPC servicer context that tells who called."""

    def auth_context(self) -> Mapping[str, Iterable[bytes]]: ...


def peer_identity(
    context: AuthContext, allowed: Iterable[str] = (), *, clock: Clock = SYSTEM_CLOCK
) -> str:
    """The name of the calling side: its first that is in `allowed`, or its first when all may.

    Raises Unauthorized for callers without TLS, without a name, with none of the allowed ones,
    and for certificates that have expired since the connection was made.
    """
    pem = b"".join(context.auth_context().get("x509_pem_cert", ()))
    if not pem:
        raise Unauthorized("a client certificate is required")
    try:
        certificate = parse_certificates(pem)[0]
    except ValueError as exc:
        raise Unauthorized("the client certificate cannot be read") from exc
    names = certificate_names(certificate)
    if not names:
        raise Unauthorized("the client certificate has no DNS or URI name")
    if certificate.not_valid_after_utc < datetime.fromtimestamp(clock.wall(), UTC):
        raise Unauthorized(f"the client certificate of {names[0]} has expired")
    wanted = frozenset(allowed)
    known = [name for name in names if name in wanted] if wanted else list(names)
    if not known:
        raise Unauthorized(f"{names[0]} is not among the peers allowed here")
    return known[0]


class PeerGate(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Lets no RPC of any service through whose caller `peer_identity` refuses, and of one caller
    no more than `max_rpcs_each` at once. Nothing to close.
    """

    def __init__(
        self, allowed: Iterable[str], *, max_rpcs_each: int, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._allowed = frozenset(allowed)
        self._max_rpcs_each = max_rpcs_each
        self._running: Counter[str] = Counter()
        self._clock = clock

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        if handler.response_streaming:
            serve = handler.stream_stream if handler.request_streaming else handler.unary_stream
            wrapped = self._streaming(serve, method)
            make = (
                grpc.stream_stream_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_stream_rpc_method_handler
            )
        else:
            serve = handler.stream_unary if handler.request_streaming else handler.unary_unary
            wrapped = self._single(serve, method)
            make = (
                grpc.stream_unary_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_unary_rpc_method_handler
            )
        return make(wrapped, handler.request_deserializer, handler.response_serializer)

    def _single(self, serve: Callable[..., Any], method: str) -> Callable[..., Awaitable[Any]]:
        async def guarded(request: Any, context: grpc.aio.ServicerContext) -> Any:
            async with self._admitted(context, method):
                return await serve(request, context)

        return guarded

    def _streaming(self, serve: Callable[..., Any], method: str) -> Callable[..., Awaitable[None]]:
        async def guarded(request: Any, context: grpc.aio.ServicerContext) -> None:
            async with self._admitted(context, method):
                answer = serve(request, context)
                if isinstance(answer, AsyncGenerator):
                    async with aclosing(answer):
                        async for message in answer:
                            await context.write(message)
                else:
                    await answer

        return guarded

    @asynccontextmanager
    async def _admitted(
        self, context: grpc.aio.ServicerContext, method: str
    ) -> AsyncIterator[None]:
        try:
            name = self._admit(context)
        except PrfaasError as exc:
            log.warning("refused %s from %s: %s", method, context.peer(), exc.message)
            await context.abort(*status_of(exc))
        try:
            yield
        finally:
            self._running[name] -= 1
            if not self._running[name]:
                del self._running[name]

    def _admit(self, context: AuthContext) -> str:
        name = peer_identity(context, self._allowed, clock=self._clock)
        if self._running[name] >= self._max_rpcs_each:
            raise Overloaded(f"{name} has {self._running[name]} RPCs running already")
        self._running[name] += 1
        return name


def require_tls_or_loopback(host: str, tls: TlsSettings | None, what: str) -> None:
    """Raise ConfigError when `what` would speak without TLS to or on anything but loopback."""
    if tls is None and not is_loopback(host):
        raise ConfigError(
            f"{what}: {host!r} is not a loopback address, and without TLS only those are allowed; "
            "set tls (cert, key, ca)"
        )


def is_loopback(host: str) -> bool:
    """Whether a host name or address, IPv6 with or without brackets, can only be this machine."""
    if host.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def _configuration(material: TlsMaterial) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(material.key, material.cert)], material.ca)
