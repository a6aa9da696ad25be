"""What `prfaas check` says of files that name nothing that runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from prfaas.certs import make_certs
from prfaas.check.agent_part import check_agent, check_engine, check_prefill
from prfaas.check.findings import Findings, Level
from prfaas.codecs import Calibration
from prfaas.codecs.calibration import Header, Measured, Rung
from prfaas.quality import Quality
from prfaas.settings import AgentSettings, EngineSettings, PrefillSettings, TlsSettings
from prfaas.testing.dns_server import dns_server
from prfaas.testing.tinymodel import make_tiny_model


def said(findings: Findings, level: Level) -> dict[str, str]:
    return {each.what: each.found for each in findings if each.level is level}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "prfaas", "check", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_key_that_is_unknown_is_named_and_the_status_says_so(tmp_path: Path) -> None:
    file = tmp_path / "prfaas.yaml"
    file.write_text("gateway: {prot: 1}\n")
    done = run(str(file), "--json")
    assert done.returncode == 1, done.stderr
    told = json.loads(done.stdout)
    assert told["ok"] is False
    (finding,) = told["findings"]
    assert finding["level"] == "fail"
    assert "gateway.prot" in finding["found"]
    assert finding["mend"]


def test_only_the_sections_of_the_file_are_checked_and_text_says_how_to_mend(
    tmp_path: Path,
) -> None:
    file = tmp_path / "prfaas.yaml"
    file.write_text("engine: {model: /none}\n")
    done = run(str(file))
    assert done.returncode == 1
    assert "fail  engine.model: /none does not exist\n      -> correct the path" in done.stdout
    assert "gateway" not in done.stdout
    assert done.stdout.splitlines()[-1] == "1 ok, 1 to look at, 1 wrong"


async def test_an_agent_without_keys_or_with_a_socket_that_cannot_be_made() -> None:
    agent = AgentSettings(socket=Path("/none/agent.sock"))
    found = said(await check_agent(agent, 1.0), Level.FAIL)
    assert set(found) == {"agent.socket", "agent.transfer_keys"}
    long = AgentSettings(socket=Path("/tmp/" + "x" * 120), transfer_keys=("k",))
    assert "107 bytes" in said(await check_agent(long, 1.0), Level.FAIL)["agent.socket"]


async def test_more_memory_than_there_is_is_said_before_it_is_missed() -> None:
    agent = AgentSettings(staging_bytes=1 << 50, transfer_keys=("k",))
    assert "may be had" in said(await check_agent(agent, 1.0), Level.FAIL)["agent.staging_bytes"]


async def test_a_vllm_that_does_not_answer_is_named_with_both_its_addresses() -> None:
    agent = AgentSettings(
        engine="vllm",
        transfer_keys=("k",),
        vllm={"url": "http://127.0.0.1:1", "kv_events": "tcp://127.0.0.1:1"},
    )
    found = said(await check_agent(agent, 2.0), Level.FAIL)
    assert set(found) == {"agent.vllm.url", "agent.vllm.kv_events"}
    assert "refused" in found["agent.vllm.url"]


async def test_a_service_on_the_network_needs_tls_and_with_it_clients() -> None:
    prefill = PrefillSettings(host="0.0.0.0")
    assert "prefill.host" in said(await check_prefill(prefill, 1.0), Level.FAIL)


async def test_certificates_that_end_soon_or_do_not_fit_are_told(tmp_path: Path) -> None:
    make_certs(tmp_path, ("p0", "other"), days=3)
    tls = TlsSettings(
        cert=tmp_path / "p0" / "cert.pem", key=tmp_path / "p0" / "key.pem", ca=tmp_path / "ca.pem"
    )
    prefill = PrefillSettings(tls=tls)
    findings = await check_prefill(prefill, 1.0)
    assert "p0" in said(findings, Level.WARN)["prefill.tls"]
    assert "prefill.authorised" in said(findings, Level.FAIL)
    crossed = tls.model_copy(update={"key": tmp_path / "other" / "key.pem"})
    findings = await check_prefill(PrefillSettings(tls=crossed), 1.0)
    assert "prefill.tls" in said(findings, Level.FAIL)


def test_an_engine_without_a_model_and_one_with_nothing_to_say(tmp_path: Path) -> None:
    assert set(said(check_engine(EngineSettings()), Level.FAIL)) == {"engine.model"}
    model = make_tiny_model(tmp_path / "model", layers=1)
    fine = EngineSettings(model=model, port_socket=tmp_path / "d.sock")
    findings = check_engine(fine)
    assert said(findings, Level.FAIL) == {}
    assert said(findings, Level.WARN) == {}


@pytest.mark.parametrize("level", list(Level))
def test_every_level_is_counted(level: Level) -> None:
    findings = Findings()
    findings.ok("a", "b")
    findings.warn("a", "b", "c")
    findings.fail("a", "b", "c")
    assert findings.count(level) == 1


def calibration(path: Path, *rungs: Rung) -> Path:
    """Of a model of one layer with two channels."""
    eye = np.eye(2, dtype=np.float32)
    flat = np.ones((1, 2, 2), np.float32)
    header = Header(1, "m", (0,), 1, 2, ((0, 1),), rungs)
    metric = np.broadcast_to(eye, (1, 2, 1, 2, 2)).copy()
    Calibration(header, np.zeros(0, np.float32), flat, flat, metric, (eye, eye)).save(path)
    return path


async def test_a_calibration_says_which_codecs_kept_their_class(tmp_path: Path) -> None:
    good = Measured(2400, 1e-6, 1e-5, 1.0, 1.0, 1e-3, 3.0, 1e-6)
    bad = Measured(2400, 4e-4, 1e-5, 1.0, 1.0, 1e-3, 3.0, 1e-6)
    near = Rung("near-channels", Quality.NEAR, 0.1, measured=good)
    int8 = Rung("int8", Quality.NEAR, 1.0, measured=bad)
    key = "agent.codec_calibration"

    async def found(path: Path, level: Level) -> str:
        return said(await check_agent(AgentSettings(codec_calibration=path), 1.0), level)[key]

    both = calibration(tmp_path / "both.npz", near, int8)
    wrong = "int8 is not: KL 0.0004 is over 0.0002"
    assert await found(both, Level.OK) == f"near-channels offered; {wrong}"
    assert await found(calibration(tmp_path / "none.npz", int8), Level.WARN) == wrong
    assert "not a calibration" in await found(tmp_path / "missing.npz", Level.FAIL)


async def test_peers_that_an_agent_finds_are_checked_like_those_it_lists(tmp_path: Path) -> None:
    file, service = tmp_path / "peers.yaml", "_kv._tcp.prefill.test"
    file.write_text("peers: [{name: ams, instances: [{name: p0, address: '127.0.0.1:1'}]}]")
    records = {
        (service, "SRV"): ["1 1 1 p0.prefill.test."],
        ("p0.prefill.test", "A"): ["127.0.0.1"],
    }
    async with dns_server(records) as server:
        found = {
            "file": str(file),
            "peers": [
                {"name": service, "peer": "fra"},
                {"name": "_kv._tcp.none.test", "peer": "x"},
            ],
            "dns_server": server.address,
        }
        agent = AgentSettings.model_validate({"transfer_keys": ["k"], "discovery": found})
        findings = await check_agent(agent, 1.0)
    assert set(said(findings, Level.FAIL)) == {"peer ams/p0", "peer fra/p0"}
    assert said(findings, Level.OK)["agent.discovery.peers"] == f"{service}: 1 prefill instances"
    assert "none.test" in said(findings, Level.WARN)["agent.discovery.peers"]
    file.write_text("peers: [{name: ams, instances: [{}]}]")
    agent = AgentSettings.model_validate(
        {"transfer_keys": ["k"], "discovery": {"file": str(file), "dns_server": "nowhere"}}
    )
    found_wrong = said(await check_agent(agent, 1.0), Level.FAIL)
    assert "peers.0.instances.0" in found_wrong["agent.discovery.file"]
