"""Errors through a real gRPC server and client: every class comes out as it went in."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest

from prfaas.errors import (
    BY_KIND,
    Cancelled,
    Forbidden,
    NotFound,
    PeerUnavailable,
    PrefillTimeout,
    PrfaasError,
)
from prfaas.rpc.status import BY_CODE, error_of, status_of


class Failing(grpc.GenericRpcHandler):
    """Method `/x/<kind>` fails with that error, `/x/bare-<CODE>` with a bare status."""

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        name = details.method.rpartition("/")[2]

        async def fail(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
            if name.startswith("bare-"):
                await context.abort(grpc.StatusCode[name.removeprefix("bare-")], "bare text")
            error = BY_KIND[name]("ein Fehler, häßlich", field="f", retry_after_s=1.5)
            await context.abort(*status_of(error))
            raise AssertionError

        return grpc.unary_unary_rpc_method_handler(fail) if name != "absent" else None


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Failing(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(None)


async def failure(channel: grpc.aio.Channel, method: str, *, timeout_s: float = 5) -> PrfaasError:
    with pytest.raises(grpc.RpcError) as caught:
        await channel.unary_unary(f"/x/{method}")(b"", timeout=timeout_s)
    return error_of(caught.value, peer="fra/p0", phase="connect")


async def test_every_error_crosses_grpc_as_its_class(channel: grpc.aio.Channel) -> None:
    for kind, cls in BY_KIND.items():
        error = await failure(channel, kind)
        assert type(error) is cls
        assert (error.message, error.field) == ("ein Fehler, häßlich", "f")
        assert error.retry_after_s == 1.5


async def test_bare_statuses_become_the_class_of_their_code(channel: grpc.aio.Channel) -> None:
    for code, cls in (
        ("UNAVAILABLE", PeerUnavailable),
        ("UNKNOWN", PeerUnavailable),
        ("CANCELLED", Cancelled),
        ("INTERNAL", PeerUnavailable),
        ("PERMISSION_DENIED", Forbidden),
        ("ALREADY_EXISTS", PrfaasError),
    ):
        error = await failure(channel, f"bare-{code}")
        assert type(error) is cls, code
        assert error.message == "fra/p0: bare text"
    assert type(await failure(channel, "absent")) is NotFound


async def test_a_deadline_says_in_which_phase(channel: grpc.aio.Channel) -> None:
    error = await failure(channel, "bare-DEADLINE_EXCEEDED")
    assert type(error) is PrefillTimeout
    assert error.phase == "connect"


async def test_nobody_listening_is_peer_unavailable() -> None:
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        assert type(await failure(channel, "x")) is PeerUnavailable


def test_every_class_has_a_code_that_leads_to_one_class() -> None:
    assert all(cls.grpc_code in BY_CODE for cls in BY_KIND.values())
    assert BY_CODE["UNAVAILABLE"] is PeerUnavailable
