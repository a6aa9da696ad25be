"""The command line: options win, errors are one line and a status, the schema fits the file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml
from click.testing import CliRunner

from prfaas.cli import _ready, _settings, _vllm_options, cli
from prfaas.errors import ConfigError
from prfaas.up.stack import StackPlan


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "prfaas", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | environment,
    )


def test_help_names_every_command() -> None:
    done = run("--help")
    assert done.returncode == 0
    for command in ("gateway", "engine", "agent", "prefill", "up", "certs", "check-host", "config"):
        assert f"  {command} " in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [["up"], ["engine", "--model", "m"], ["calibrate-kv", "--model", "m", "--out", "kv.npz"]],
)
def test_without_the_engines_packages_what_runs_one_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.setattr("prfaas.cli.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs torch: pip install 'prfaas\[engine\]'"):
        CliRunner().invoke(cli, arguments, catch_exceptions=False)


def test_a_wrong_setting_is_one_line_on_stderr_and_status_2(tmp_path: Path) -> None:
    file = tmp_path / "prfaas.yaml"
    file.write_text("gateway: {prot: 1}\nengine: {block_tokens: 0}\n")
    done = run("config", "check", str(file))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("prfaas: ")
    assert len(done.stderr.splitlines()) == 1
    assert "gateway.prot" in done.stderr
    assert "engine.block_tokens" in done.stderr


def test_a_right_file_passes_and_the_environment_is_checked_with_it(tmp_path: Path) -> None:
    file = tmp_path / "prfaas.yaml"
    file.write_text("config_version: 1\ngateway: {port: 9000}\n")
    assert run("config", "check", str(file)).stdout == f"{file}: ok\n"
    done = run("config", "check", str(file), PRFAAS_GATEWAY__PORT="many")
    assert done.returncode == 2
    assert "gateway.port" in done.stderr


def test_an_engine_without_a_model_says_how_to_name_one() -> None:
    done = run("engine")
    assert done.returncode == 2
    assert done.stderr.startswith("prfaas: engine.model: ")


def test_the_schema_accepts_good_files_and_refuses_bad_ones() -> None:
    schema = json.loads(run("config", "schema").stdout)
    jsonschema.Draft202012Validator.check_schema(schema)
    good = yaml.safe_load("config_version: 1\nengine: {model: /m, chunk_tokens: 128}\n")
    jsonschema.validate(good, schema)
    for bad in ("gatewy: {}", "engine: {chunk_tokens: 0}", "config_version: 2"):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(yaml.safe_load(bad), schema)


def test_options_win_over_environment_over_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "prfaas.yaml"
    file.write_text("gateway: {port: 1, host: h, transfer_key: hush}\n")
    monkeypatch.setenv("PRFAAS_GATEWAY__PORT", "2")
    assert _settings(file, "gateway", port=None).gateway.port == 2
    settings = _settings(file, "gateway", port=3)
    assert settings.gateway.port == 3
    assert settings.gateway.host == "h"
    assert settings.gateway.transfer_key.get_secret_value() == "hush"


def test_a_wrong_option_names_its_setting() -> None:
    with pytest.raises(ConfigError, match=r"engine\.block_tokens: "):
        _settings(None, "engine", block_tokens=0)


def test_an_agent_s_options_for_its_vllm_join_what_the_file_says(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("prefill: {vllm: {kv_events: 'ipc:///e', poll_s: 0.5}}\n")
    options = {"socket": None, "engine": "vllm", "engine_url": "http://h:1", "kv_events": None}
    settings = _settings(file, "prefill", **_vllm_options(options)).prefill
    assert settings.engine == "vllm"
    assert settings.vllm.url == "http://h:1"
    assert (settings.vllm.kv_events, settings.vllm.poll_s) == ("ipc:///e", 0.5)
    assert _vllm_options({"socket": None, "engine_url": None}) == {"socket": None}


@pytest.mark.parametrize(
    ("command", "module"), [("agent", "agent_main"), ("prefill", "prefill_main")]
)
def test_agents_tune_their_process_before_they_start(
    command: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    async def serve(*_: object) -> None:
        seen.append(os.environ["GRPC_EXPERIMENTS"])

    monkeypatch.setenv("GRPC_EXPERIMENTS", "")
    monkeypatch.delenv("GRPC_EXPERIMENTS")
    monkeypatch.setattr(f"remote_prefill.{module}.serve", serve)
    done = CliRunner().invoke(cli, [command])
    assert done.exit_code == 0, done.output
    assert seen == ["tcp_rcv_lowat,tcp_frame_size_tuning"]


def test_ready_tells_the_port_once_and_closes() -> None:
    reader, writer = os.pipe()
    _ready(writer)(8123)
    with os.fdopen(reader) as pipe:
        assert pipe.read() == "8123\n"


def test_certs_makes_pairs_and_says_what_they_are_for(tmp_path: Path) -> None:
    out = ["certs", "--out", str(tmp_path / "c")]
    done = CliRunner().invoke(cli, [*out, "--name", "p", "--name", "d", "--days", "2"])
    assert done.exit_code == 0, done.output
    assert "for tests and pilots only" in done.output
    before = (tmp_path / "c" / "p" / "cert.pem").read_bytes()
    assert CliRunner().invoke(cli, [*out, "--rotate", "p"]).exit_code == 0
    assert (tmp_path / "c" / "p" / "cert.pem").read_bytes() != before
    done = CliRunner().invoke(cli, [*out, "--name", "../p"])
    assert isinstance(done.exception, ConfigError)


def test_check_host_exits_with_1_exactly_when_a_setting_is_weak() -> None:
    def check(*options: str) -> tuple[int, dict[str, str], int]:
        done = CliRunner().invoke(cli, ["check-host", "--json", *options])
        report = json.loads(done.output)
        levels = {each["setting"]: each["level"] for each in report["findings"]}
        return done.exit_code, levels, report["weak"]

    # No host has buffers for 100 Tbit/s, and none lacks them for 1 kbit/s; other settings vary.
    status, levels, _ = check("--rate", "100T", "--rtt", "80", "--connections", "1")
    assert status == 1
    assert levels["net.ipv4.tcp_wmem"] == "weak"
    status, levels, weak = check("--rate", "1k", "--rtt", "1")
    assert levels["net.ipv4.tcp_wmem"] == "good"
    assert status == (1 if weak else 0)
    text = CliRunner().invoke(cli, ["check-host", "--rate", "1k", "--rtt", "1"])
    assert f"{weak} weak setting" in text.output
    assert isinstance(
        CliRunner().invoke(cli, ["check-host", "--rate", "fast"]).exception, ConfigError
    )


@pytest.mark.parametrize("tls", [True, False])
def test_up_runs_with_tls_where_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tls: bool
) -> None:
    plans = []

    def create(plan: StackPlan, directory: Path) -> None:
        plans.append(plan)
        raise ConfigError("no further")

    monkeypatch.setattr("prfaas.up.main.Stack.create", create)
    monkeypatch.setattr("prfaas.up.main.tempfile.mkdtemp", lambda prefix: str(tmp_path))
    done = CliRunner().invoke(cli, ["up", "--once", "--model", str(tmp_path), *["--tls"] * tls])
    assert isinstance(done.exception, ConfigError)
    assert [plan.tls for plan in plans] == [tls]


@pytest.mark.parametrize("command", ["agent", "prefill"])
def test_a_process_without_tls_says_in_one_line_where_it_may_listen(
    tmp_path: Path, command: str
) -> None:
    done = run(command, "--host", "0.0.0.0", "--port", "0", "--socket", str(tmp_path / "s"))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert f"{command}.host: '0.0.0.0' is not a loopback address" in line
