"""The file of tenants: what it may hold, how keys are made, and that it never holds one."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from prfaas.errors import ConfigError
from prfaas.tenants import (
    ApiKey,
    Tenant,
    TenantFile,
    edit_tenants,
    hash_of,
    load_tenants,
    new_key,
    rotated,
    save_tenants,
)


def write(path: Path, data: Any) -> Path:
    path.write_text(data if isinstance(data, str) else yaml.safe_dump(data))
    return path


def test_a_key_is_long_random_and_kept_as_a_hash() -> None:
    key, kept = new_key()
    other, _ = new_key()
    assert key != other
    assert key.startswith(f"sk-prfaas-{kept.id}-")
    assert len(key) > 50
    assert kept.sha256 == hash_of(key)
    assert key not in kept.model_dump_json()


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    _, key = new_key(datetime(2030, 1, 1, tzinfo=UTC))
    file = TenantFile(
        tenants=(
            Tenant(name="acme", keys=(key,), tokens_per_minute=1000, peers=("fra",), weight=2),
            Tenant(name="zeta", peers=(), kv_quality="near", admin=True),
        )
    )
    path = tmp_path / "tenants.yaml"
    save_tenants(path, file)
    assert load_tenants(path) == file
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ([], "the top level must be a mapping"),
        ("a: [", "is not YAML at line 1"),
        ({"tenants": [{"name": "a"}, {"name": "a"}]}, "named twice: a"),
        ({"tenants": [{"name": "A b"}]}, r"tenants\.0\.name"),
        ({"tenants": [{"name": "a", "tokens_per_minute": 0}]}, r"tokens_per_minute: .* greater"),
        ({"tenants": [{"name": "a", "rate": 1}]}, r"tenants\.0\.rate: Extra"),
        ({"tenants": [{"name": "a", "priority": 10}]}, "priority"),
        ({"tenants": [{"name": "a", "kv_quality": "best"}]}, "kv_quality"),
        ({"tenants_version": 2}, "tenants_version"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, data: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_tenants(write(tmp_path / "t.yaml", data))


def test_no_error_repeats_what_the_file_holds(tmp_path: Path) -> None:
    key, _ = new_key()
    for text in (
        f"tenants: [{{name: a, keys: [{{id: abcdef01, sha256: {key}}}]}}]",
        f"tenants: [{{name: a, {key}: 1",
        f"{key}",
        f"tenants: {key}",
    ):
        with pytest.raises(ConfigError) as caught:
            load_tenants(write(tmp_path / "t.yaml", text))
        assert key not in caught.value.message


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none.yaml: No such file"):
        load_tenants(tmp_path / "none.yaml")


def test_two_tenants_never_share_a_key(tmp_path: Path) -> None:
    _, key = new_key()
    shared = [{"name": name, "keys": [key.model_dump(mode="json")]} for name in ("a", "b")]
    with pytest.raises(ConfigError, match="two keys have the same id"):
        load_tenants(write(tmp_path / "t.yaml", {"tenants": shared}))


def test_rotation_gives_old_keys_a_last_day_and_drops_dead_ones() -> None:
    now = datetime.now(UTC)
    _, good = new_key()
    _, soon = new_key(now + timedelta(minutes=5))
    _, dead = new_key(now - timedelta(minutes=5))
    key, tenant = rotated(Tenant(name="a", keys=(good, soon, dead)), timedelta(hours=1))
    made, first, second = tenant.keys
    assert (made.sha256, made.expires) == (hash_of(key), None)
    assert first.id == good.id
    assert first.expires is not None
    assert timedelta(minutes=59) < first.expires - now < timedelta(minutes=61)
    assert second == soon


def test_an_edit_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "t.yaml"
    edit_tenants(path, lambda file: file.with_tenant(Tenant(name="a")))
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="no tenant 'b'"):
        edit_tenants(path, lambda file: file.without("b"))
    assert path.read_bytes() == before


def test_peers_are_all_some_or_none() -> None:
    assert Tenant(name="a").may_use("fra")
    assert Tenant(name="a", peers=("fra",)).may_use("fra")
    assert not Tenant(name="a", peers=("fra",)).may_use("ohio")
    assert not Tenant(name="a", peers=()).may_use("fra")


def test_a_key_is_not_given_as_its_hash() -> None:
    with pytest.raises(ValueError, match="sha256"):
        ApiKey(id="abcdef01", sha256="sk-prfaas-in-the-clear")
