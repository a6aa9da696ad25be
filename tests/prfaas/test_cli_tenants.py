"""`prfaas tenants`: what its commands do to the file, and that keys are shown once."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from prfaas.cli import cli
from prfaas.errors import ConfigError
from prfaas.tenants import hash_of, load_tenants


def run(path: Path, *words: str) -> str:
    done = CliRunner().invoke(cli, ["tenants", *words, "--file", str(path)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tenants.yaml"


def test_a_tenant_is_added_changed_and_removed(path: Path) -> None:
    key = run(path, "add", "acme", "--tokens-per-minute", "1000", "--peer", "fra").strip()
    (tenant,) = load_tenants(path).tenants
    assert tenant.keys[0].sha256 == hash_of(key)
    assert (tenant.tokens_per_minute, tenant.peers) == (1000, ("fra",))
    assert key not in path.read_text()

    run(path, "change", "acme", "--no-peers", "--priority", "3", "--admin")
    (tenant,) = load_tenants(path).tenants
    assert (tenant.peers, tenant.priority, tenant.admin) == ((), 3, True)
    assert tenant.tokens_per_minute == 1000
    assert tenant.keys[0].sha256 == hash_of(key)

    listed = run(path, "list")
    assert listed.startswith("acme tokens_per_minute=1000.0 priority=3 peers=[] admin=True\n")
    assert f"key {tenant.keys[0].id} good\n" in listed
    assert key not in listed
    assert tenant.keys[0].sha256 not in listed

    run(path, "remove", "acme")
    assert load_tenants(path).tenants == ()


def test_a_key_is_rotated_and_revoked(path: Path) -> None:
    first = run(path, "add", "acme").strip()
    second = run(path, "rotate", "acme", "--grace-hours", "2").strip()
    new, old = load_tenants(path).tenants[0].keys
    assert (new.sha256, old.sha256) == (hash_of(second), hash_of(first))
    assert new.expires is None
    assert old.expires is not None
    assert "good until" in run(path, "list")
    run(path, "revoke", "acme", old.id)
    assert [key.id for key in load_tenants(path).tenants[0].keys] == [new.id]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("add", "acme"), "already"),
        (("add", "Bad Name"), "name"),
        (("change", "nobody"), "no tenant 'nobody'"),
        (("change", "acme", "--peer", "a", "--no-peers"), "exclude each other"),
        (("revoke", "acme", "00000000"), "no key '00000000'"),
        (("rotate", "nobody"), "no tenant"),
        (("remove", "nobody"), "no tenant"),
    ],
)
def test_what_cannot_be_done_is_said(path: Path, words: tuple[str, ...], says: str) -> None:
    run(path, "add", "acme")
    with pytest.raises(ConfigError, match=says):
        run(path, *words)
