"""Files that a configuration names: each that is broken or missing is said, by key."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.app import check_settings
from policies.profiles import find_profile, to_yaml
from policies.registry import make_policy
from prfaas.certs import make_certs
from prfaas.check.files import named_files
from prfaas.check.findings import Findings, Level
from prfaas.settings import Settings
from prfaas.testing.tinymodel import make_tiny_model

ENGINES = [{"name": "d-0", "url": "http://127.0.0.1:1"}]
GOOD_POLICY = "policy_version: 1\npolicy: priced\nparameters: {link_budget_s: 3.0}\n"


def opened(sections: dict[str, Any]) -> Findings:
    return named_files(Settings.model_validate(sections), make_policy, check_settings)


def wrong(sections: dict[str, Any]) -> dict[str, str]:
    return {each.what: each.found for each in opened(sections).failed()}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (GOOD_POLICY.replace("link_budget_s", "link_budget"), "did you mean link_budget_s?"),
        (GOOD_POLICY.replace("link_budget_s", "color"), "parameters.color: unknown key"),
        (GOOD_POLICY.replace("policy_version: 1\n", ""), "policy_version: Field required"),
        (GOOD_POLICY.replace("policy_version: 1", "policy_version: 2"), "policy_version"),
        (GOOD_POLICY.replace("priced", "pricey"), "did you mean priced?"),
        ("- {", "is not YAML"),
        ("", "a policy file is a mapping"),
        (None, "cannot read"),
    ],
)
@pytest.mark.parametrize("role", ["policy", "canary", "shadow"])
def test_a_policy_file_that_would_not_load_is_named_with_its_fault(
    role: str, text: str | None, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "policy.yaml"
    if text is not None:
        path.write_text(text)
    found = wrong({"gateway": {role: {"file": str(path)}}})
    assert set(found) == {f"gateway.{role}"}
    assert str(path) in found[f"gateway.{role}"]
    assert said in found[f"gateway.{role}"]


def test_every_file_that_is_not_there_is_said_under_its_key() -> None:
    tls = {"cert": "/none/cert.pem", "key": "/none/key.pem", "ca": "/none/ca.pem"}
    gateway = {
        "tokenizer": "/none/model",
        "discovery": {"file": "/none/found.yaml"},
        "worker_dir": "/dev/null/none",
        "tenants": {"file": "/none/tenants.yaml", "audit_log": "/none/audit.log"},
        "state": {"redis_ca": "/none/ca", "redis_cert": "/none/cert", "redis_key": "/none/key"},
        "tls": tls,
    }
    calibration = {"codec_calibration": "/none/c.npz"}
    found = wrong(
        {
            "gateway": gateway,
            "engine": {"paced": "/none/p.yaml", **calibration},
            "agent": {"tls": tls, "discovery": {"file": "/none/peers.yaml"}, **calibration},
            "prefill": {"tls": tls, **calibration},
        }
    )
    assert set(found) == {
        "gateway", "gateway.tokenizer", "gateway.worker_dir", "gateway.tenants.file",
        "gateway.tenants.audit_log", "gateway.state.redis_ca", "gateway.state.redis_cert",
        "gateway.tls", "engine.paced", "engine.codec_calibration", "agent.tls",
        "agent.discovery.file", "agent.codec_calibration", "prefill.tls",
        "prefill.codec_calibration",
    }  # fmt: skip
    assert "/none/found.yaml" in found["gateway"]


def test_files_that_processes_would_take_are_said_to_be_well(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", layers=1)
    make_certs(tmp_path, ("g",), days=30)
    tls = {
        "cert": tmp_path / "g" / "cert.pem",
        "key": tmp_path / "g" / "key.pem",
        "ca": tmp_path / "ca.pem",
    }
    (tmp_path / "policy.yaml").write_text(GOOD_POLICY)
    (tmp_path / "found.yaml").write_text(yaml.safe_dump({"engines": ENGINES}))
    (tmp_path / "tenants.yaml").write_text("tenants: [{name: a, keys: []}]")
    (tmp_path / "peers.yaml").write_text("peers: []")
    paced = find_profile("paper-h20").model_copy(update={"tokenizer": model})
    (tmp_path / "paced.yaml").write_text(to_yaml(paced))
    state = {"redis_ca": tls["ca"], "redis_cert": tls["cert"], "redis_key": tls["key"]}
    findings = opened(
        {
            "gateway": {
                "tokenizer": str(model),
                "discovery": {"file": str(tmp_path / "found.yaml")},
                "policy": {"file": str(tmp_path / "policy.yaml")},
                "tenants": {
                    "file": str(tmp_path / "tenants.yaml"),
                    "audit_log": str(tmp_path / "audit.log"),
                },
                "worker_dir": str(tmp_path / "a" / "b"),
                "cache_secret": "secret",
                "state": state,
                "tls": tls,
            },
            "engine": {"paced": str(tmp_path / "paced.yaml")},
            "agent": {"tls": tls, "discovery": {"file": str(tmp_path / "peers.yaml")}},
        }
    )
    assert not findings.failed()
    assert findings.count(Level.OK) == 11
    assert sorted(each.name for each in tmp_path.iterdir() if each.name in ("a", "audit.log")) == []


def test_what_contradicts_itself_is_said(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", layers=1)
    make_certs(tmp_path, ("g", "other"), days=30)
    crossed = {
        "redis_cert": tmp_path / "g" / "cert.pem",
        "redis_key": tmp_path / "other" / "key.pem",
    }
    twice = {"engines": ENGINES, "discovery": {"file": str(tmp_path / "found.yaml")}}
    (tmp_path / "found.yaml").write_text(yaml.safe_dump({"engines": ENGINES}))
    (tmp_path / "paced.yaml").write_text("name: x\nspeed: 3\n")
    assert (
        "key values mismatch" in wrong({"gateway": {"state": crossed}})["gateway.state.redis_cert"]
    )
    assert set(wrong({"gateway": {"state": {"redis_key": "/k"}}})) == {"gateway.state.redis_key"}
    assert "d-0" in next(iter(wrong({"gateway": twice}).values()))
    both = wrong({"engine": {"model": str(model), "paced": str(tmp_path / "paced.yaml")}})
    assert set(both) == {"engine.model", "engine.paced"}
    assert "speed: unknown key" in both["engine.paced"]
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "tokenizer.json" in wrong({"engine": {"model": str(empty)}})["engine.model"]


def test_the_command_names_file_and_fault_in_one_line_and_keys_alone_may_be_checked(
    tmp_path: Path,
) -> None:
    policy, file = tmp_path / "policy.yaml", tmp_path / "prfaas.yaml"
    policy.write_text(GOOD_POLICY.replace("link_budget_s", "link_budget"))
    settings = {"gateway": {"policy": {"file": str(policy)}, "tokenizer": "/none"}}
    file.write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "prfaas", "config", "check", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("prfaas: gateway.policy: ")
    assert "parameters.link_budget: the unit is missing; did you mean link_budget_s?" in line
    assert "gateway.tokenizer: /none is neither" in line
    command.append("--keys-only")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"{file}: ok\n")
