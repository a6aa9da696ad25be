"""Our errors as gRPC statuses and back: the border where gRPC's exceptions are translated."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import grpc
import grpc.aio

from prfaas.errors import BY_KIND, PeerUnavailable, PrefillTimeout, PrfaasError
from prfaas.rpc.convert import error_from_bytes, error_to_bytes

DETAIL_KEY = "prfaas-error-bin"
"""Trailing metadata that carries the typed error beside the status code."""


def _by_code() -> Mapping[str, type[PrfaasError]]:
    """The class that stands for a bare code: the first one listed with it."""
    table: dict[str, type[PrfaasError]] = {}
    for cls in BY_KIND.values():
        table.setdefault(cls.grpc_code, cls)
    # Ours come with their detail; bare, they are gRPC's own for a connection that broke (what TLS
    # could not read, or could not write any more).
    table["INTERNAL"] = table["UNKNOWN"] = PeerUnavailable
    return MappingProxyType(table)


BY_CODE = _by_code()


def status_of(error: PrfaasError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, bytes], ...]]:
    """(code, text, trailing metadata) that carry an error across gRPC."""
    return (
        grpc.StatusCode[error.grpc_code],
        error.message,
        ((DETAIL_KEY, error_to_bytes(error)),),
    )


def error_of(exc: grpc.RpcError, *, peer: str, phase: str) -> PrfaasError:
    """The error behind a failed RPC: the other side's own where it sent one, else by its code.

    `peer` goes into the message of errors that gRPC itself made, `phase` into its time-outs.
    """
    if not isinstance(exc, grpc.aio.AioRpcError):
        return PrfaasError(f"{peer}: {exc}")
    for key, value in exc.trailing_metadata() or ():
        if key == DETAIL_KEY and isinstance(value, bytes):
            return error_from_bytes(value)
    cls = BY_CODE.get(exc.code().name, PrfaasError)
    text = f"{peer}: {exc.details() or exc.code().name}"
    return cls(text, phase=phase) if cls is PrefillTimeout else cls(text)
