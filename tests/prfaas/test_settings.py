"""Settings: strict, frozen, one file and environment; every error names its key."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from prfaas.errors import ConfigError
from prfaas.settings import Settings, load_settings


def write(path: Path, text: str) -> Path:
    path.write_text(text)
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
        ("a: [", "not YAML"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, names: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(write(tmp_path / "c.yaml", text))
    assert names in caught.value.message


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
