"""What we use of gRPC's streams, so that a memory pipe can take their place."""

from __future__ import annotations

from typing import Protocol

import grpc

from prfaas.errors import PeerUnavailable, PrfaasError
from prfaas.rpc.status import error_of


class ControlStream(Protocol):
    """Either end of a stream of messages; anything but bytes from `read` is its end."""

    async def read(self) -> object: ...

    async def write(self, message: bytes) -> None: ...


class ClientStream(ControlStream, Protocol):
    """The end that opened it."""

    async def done_writing(self) -> None: ...

    def cancel(self) -> bool: ...


def stream_error(exc: grpc.RpcError, *, peer: str, phase: str) -> PrfaasError:
    """Why a stream ended. gRPC calls it an internal error of its own where a write met a
    connection that had just broken; our servers send typed errors only.
    """
    error = error_of(exc, peer=peer, phase=phase)
    return PeerUnavailable(error.message) if error.kind == PrfaasError.kind else error
