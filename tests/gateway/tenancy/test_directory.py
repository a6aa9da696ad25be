"""Keys in headers, and a file that changes while the gateway runs."""

from __future__ import annotations

import base64
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gateway.tenancy.directory import TenantDirectory
from prfaas.errors import ConfigError, Unauthorized
from prfaas.testing.clock import ManualClock
from prfaas.testing.tenant_files import TenantFixture

CLOCK = ManualClock()


@pytest.fixture
def file(tmp_path: Path) -> TenantFixture:
    found = TenantFixture(tmp_path / "tenants.yaml")
    found.put("acme")
    return found


def directory_of(file: TenantFixture, heard: list[str] | None = None) -> TenantDirectory:
    return TenantDirectory(file.path, CLOCK, (heard if heard is not None else []).append)


def test_a_key_finds_its_tenant(file: TenantFixture) -> None:
    key = file.put("zeta")
    directory = directory_of(file)
    for header in (f"Bearer {key}", f"bearer  {key} "):
        assert directory.caller(header).tenant.name == "zeta"
    basic = base64.b64encode(f"admin:{key}".encode()).decode()
    assert directory.caller(f"Basic {basic}").tenant.name == "zeta"


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        "Token {key}",
        "{key}",
        "Bearer {key}x",
        "Basic {key}",
        "Basic !!!",
        "Bearer \udcff",
        "Bearer " + "x" * 600,
        "Bearer {hash}",
    ],
)
def test_what_is_no_key_is_refused_and_not_repeated(file: TenantFixture, header: str) -> None:
    header = header.format(key=file.keys["acme"], hash=file.hashes[0])
    with pytest.raises(Unauthorized) as caught:
        directory_of(file).caller(header)
    for secret in (*file.keys.values(), *file.hashes):
        assert secret not in caught.value.message


def test_a_key_ends_when_it_says(file: TenantFixture) -> None:
    key = file.put("brief", expires=datetime.fromtimestamp(CLOCK.wall() + 10, UTC))
    directory = directory_of(file)
    assert directory.caller(f"Bearer {key}").tenant.name == "brief"
    CLOCK.advance(11)
    with pytest.raises(Unauthorized, match="expired"):
        directory.caller(f"Bearer {key}")


async def test_a_changed_file_is_taken_over(file: TenantFixture) -> None:
    heard: list[str] = []
    directory = directory_of(file, heard)
    old = file.keys["acme"]
    new = file.put("acme")
    await directory.look()
    assert directory.caller(f"Bearer {new}").tenant.name == "acme"
    with pytest.raises(Unauthorized):
        directory.caller(f"Bearer {old}")
    await directory.look()
    assert heard == ["loaded"]


async def test_a_bad_file_changes_nothing(
    file: TenantFixture, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[str] = []
    directory = directory_of(file, heard)
    file.path.write_text("tenants: [{name: acme, secret: abc")
    await directory.look()
    file.path.unlink()
    await directory.look()
    assert heard == ["refused", "refused"]
    assert directory.caller(f"Bearer {file.keys['acme']}").tenant.name == "acme"
    assert "stay as they are" in caplog.text
    assert "abc" not in caplog.text


def test_a_gateway_does_not_start_on_a_bad_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        TenantDirectory(tmp_path / "none", CLOCK, print)
