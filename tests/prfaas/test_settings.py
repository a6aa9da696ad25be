"""Settings: strict, frozen, one file and environment; every error names its key."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from prfaas.errors import ConfigError
from prfaas.settings import Settings, load_settings


def write(path: Path, text: str) -> Path:
    path.write_bytes(text.encode("latin-1"))
    return path


def test_file_overrides_and_environment_apply_in_that_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "c.yaml", "config_version: 1\ngateway: {port: 1, host: h}\n")
    assert load_settings(file).gateway.port == 1
    assert load_settings(file, {"gateway": {"port": 2}}).gateway.port == 2
    monkeypatch.setenv("PRFAAS_GATEWAY__PORT", "3")
    settings = load_settings(file, {"gateway": {"port": 2}})
    assert settings.gateway.port == 3
    assert settings.gateway.host == "h"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("gateway: {prot: 1}", "gateway.prot"),
        ("gatewy: {}", "gatewy"),
        ("gateway: {port: many}", "gateway.port"),
        ("gateway: {port: 70000}", "gateway.port"),
        ("engine: {kv_dtype: int1}", "engine.kv_dtype"),
        ("limits: {connect_timeout_s: 0}", "limits.connect_timeout_s"),
        ("agent: {peers: [{nome: x}]}", "agent.peers.0.nome"),
        ("config_version: 2", "config_version"),
        ("[1, 2]", "mapping"),
        ("a: [", "not YAML at line 1"),
        ("gateway: {}\nlimits: {}\ngateway: {}", "line 3: a key that is there already"),
        ("gateway: {kv_quality: exact, kv_quality: near}", "there already"),
        ("\xff\xfe\x00", "not YAML"),
        ("a: \x00", "not YAML"),
        ("a: 2026-13-45", "not YAML"),
        ("a: " + "[" * 5000, "not YAML"),
        ("a: !!python/name:os.system", "not YAML at line 1"),
        ("gateway: {port: true}", "port: a number, not true"),
        ("limits: {max_body_bytes: no}", "max_body_bytes: a number, not false"),
        ("limits: {request_timeout_s: .inf}", "limits.request_timeout_s"),
        ("limits: {request_timeout_s: .nan}", "limits.request_timeout_s"),
        ("limits: {request_timeout_s: 10s}", "limits.request_timeout_s"),
        ('gateway: {engines: [{name: "a\\nb", url: "http://x"}]}', "gateway.engines.0.name"),
        ('gateway: {engines: [{name: "", url: "http://x"}]}', "gateway.engines.0.name"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, names: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(write(tmp_path / "c.yaml", text))
    assert names in caught.value.message


def test_what_is_no_yaml_is_not_repeated(tmp_path: Path) -> None:
    """There may be a key in it."""
    for text in ("gateway: {transfer_key: [hush", "transfer_key: hush: x", "a: 1\nhush"):
        with pytest.raises(ConfigError) as caught:
            load_settings(write(tmp_path / "c.yaml", text))
        assert "hush" not in caught.value.message


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml"):
        load_settings(tmp_path / "absent.yaml")


def test_settings_are_frozen_and_secrets_do_not_print() -> None:
    settings = load_settings(overrides={"gateway": {"transfer_key": "hush"}})
    with pytest.raises(ValidationError):
        settings.gateway.port = 5  # type: ignore[misc]
    assert "hush" not in repr(settings)
    assert settings.gateway.transfer_key.get_secret_value() == "hush"


def test_every_setting_has_a_description_and_a_default_or_is_required() -> None:
    def walk(model: type, path: str) -> None:
        for name, info in model.model_fields.items():  # type: ignore[attr-defined]
            assert info.description, f"{path}{name} has no description"
            if isinstance(info.annotation, type) and hasattr(info.annotation, "model_fields"):
                walk(info.annotation, f"{path}{name}.")

    walk(Settings, "")
