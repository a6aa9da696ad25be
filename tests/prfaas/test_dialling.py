"""Only what is configured is dialled: host and port, with TLS unless it is loopback."""

from __future__ import annotations

from pathlib import Path

import grpc
import grpc.aio
import pytest

from prfaas.dialling import checked_endpoint, ends_at, open_files
from prfaas.errors import ConfigError
from prfaas.testing.pki import Pki
from prfaas.tls import server_credentials
from prfaas.tls_files import TlsFiles


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    return Pki(tmp_path / "pki")


@pytest.mark.parametrize("address", ["127.0.0.1:1", "localhost:1", "[::1]:1", "127.9.9.9:1"])
def test_loopback_is_dialled_without_tls(address: str) -> None:
    assert checked_endpoint(address, None, None, "key").address == address


@pytest.mark.parametrize("address", ["10.0.0.1:1", "p.example:1", "0.0.0.0:1", "[2001:db8::1]:1"])
def test_everything_else_needs_tls(pki: Pki, address: str) -> None:
    with pytest.raises(ConfigError, match=r"^key: .* is not a loopback address, and without TLS"):
        checked_endpoint(address, None, None, "key")
    files = open_files(pki.settings("d"), "client", "tls")
    assert checked_endpoint(address, files, None, "key").address == address


@pytest.mark.parametrize(
    "address",
    ["", ":1", "host", "host:", "host:x", "host:٣", "::1:1", "unix:/tmp/s", "dns:///host:1:2"],
)
def test_what_is_no_host_and_port_is_refused(pki: Pki, address: str) -> None:
    files = open_files(pki.settings("d"), "client", "tls")
    with pytest.raises(ConfigError, match=r"^key: .* is not host:port"):
        checked_endpoint(address, files, None, "key")


def test_a_name_to_expect_needs_tls() -> None:
    with pytest.raises(ConfigError, match="tls_name 'p0' needs tls"):
        checked_endpoint("127.0.0.1:1", None, "p0", "key")


def test_the_version_changes_with_the_files(pki: Pki) -> None:
    files = open_files(pki.settings("d"), "client", "tls")
    endpoint = checked_endpoint("127.0.0.1:1", files, None, "key")
    before, end = endpoint.version(), ends_at(files)
    assert endpoint.version() == before
    pki.issue("d", begins_s=-60, ends_s=300)
    assert endpoint.version() != before
    assert ends_at(files) < end
    assert (checked_endpoint("127.0.0.1:1", None, None, "k").version(), ends_at(None)) == ("", 0.0)


@pytest.mark.parametrize(("name", "reached"), [(None, True), ("p0", True), ("p1", False)])
async def test_the_server_must_carry_the_name_that_is_expected(
    pki: Pki, name: str | None, reached: bool
) -> None:
    server = grpc.aio.server()
    credentials = server_credentials(TlsFiles(pki.settings("p0"), "server"))
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    files = open_files(pki.settings("d"), "client", "tls")
    endpoint = checked_endpoint(f"127.0.0.1:{port}", files, name, "key")
    async with endpoint.open([("grpc.use_local_subchannel_pool", 1)]) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/nobody/knows")(b"", timeout=5)
    await server.stop(None)
    code = grpc.StatusCode.UNIMPLEMENTED if reached else grpc.StatusCode.UNAVAILABLE
    assert caught.value.code() is code
