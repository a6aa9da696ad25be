"""Instances that an agent finds: they come and go with a file and DNS names, sessions go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import prfaas.following
from prfaas.agent_peers import read_peers
from prfaas.errors import ConfigError
from prfaas.settings import Settings
from prfaas.testing.dns_server import dns_server
from prfaas.testing.scripted_port import PrefillScript
from prfaas.testing.waiting import eventually
from remote_prefill.agent_main import AgentServer

PROMPT = 22
SERVICE = "_kv._tcp.prefill.test"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prfaas.following, "LOOK_S", 0.02)


def write(file: Path, **ports: int) -> None:
    """Instances of peer `fra` by name, moved over what was there."""
    instances = [{"name": name, "address": f"127.0.0.1:{port}"} for name, port in ports.items()]
    fresh = file.with_suffix(".new")
    fresh.write_text(json.dumps({"peers": [{"name": "fra", "instances": instances}]}))
    fresh.rename(file)


def names(d: Any) -> list[str]:
    return [link.name for link in d.agent.pool]


async def staged(d: Any, prompt: Any, plan: str = "fra/p0") -> str:
    """What became of a fetch: its status, or the reason where nothing came."""
    done = await d.engine.fetch(d.params(plan), prompt, 0)
    if done.status == "staged":
        assert d.engine.staged_is_right(done, prompt, 0)
        d.engine.release(done)
    return str(done.reason or done.status)


async def test_instances_come_and_go_with_a_file(
    prefill_site: Any, decode_site: Any, tokens: Any, tmp_path: Path
) -> None:
    p, file, prompt = await prefill_site(), tmp_path / "peers.yaml", tokens(PROMPT)
    write(file)
    d = await decode_site({}, discovery={"file": str(file)})
    assert await staged(d, prompt) == "unknown_peer"
    write(file, p0=p.port)
    await eventually(lambda: names(d) == ["fra/p0"])
    await d.ready("fra/p0")
    assert [(k.peer, k.instance, k.ready) for k in d.agent.feed.links()] == [("fra", "p0", True)]
    assert await staged(d, prompt) == "staged"
    write(file)
    await eventually(lambda: names(d) == [])
    assert await staged(d, prompt) == "unknown_peer"
    assert d.agent.feed.links() == ()
    await d.clean(p)
    metrics = d.agent.metrics.registry.get_sample_value
    applied = {"source": str(file), "result": "applied"}
    await eventually(lambda: metrics("prfaas_agent_discovery_changes_total", applied) == 2)
    assert metrics("prfaas_agent_discovered_instances", {"source": str(file)}) == 0


async def test_an_instance_that_moves_is_dialled_where_it_is(
    prefill_site: Any, decode_site: Any, tokens: Any, tmp_path: Path
) -> None:
    p, file = await prefill_site(), tmp_path / "peers.yaml"
    write(file, p0=1)  # nobody is there
    d = await decode_site({}, discovery={"file": str(file)})
    before = d.link("fra/p0")
    write(file, p0=p.port)
    await eventually(lambda: d.link("fra/p0") is not before)
    await d.ready("fra/p0")
    assert await staged(d, tokens(PROMPT)) == "staged"
    link = d.link("fra/p0")
    write(file, p1=1, p0=p.port)
    await eventually(lambda: names(d) == ["fra/p1", "fra/p0"])
    assert d.link("fra/p0") is link, "who stays is not dialled anew"
    await d.clean(p)


async def test_a_session_goes_on_at_an_instance_that_leaves(
    prefill_site: Any, decode_site: Any, tokens: Any, tmp_path: Path
) -> None:
    p = await prefill_site(engine={"script": PrefillScript(layer_s=0.03)})
    file, prompt = tmp_path / "peers.yaml", tokens(PROMPT)
    write(file, p0=p.port)
    d = await decode_site({}, discovery={"file": str(file)})
    await d.ready("fra/p0")
    link = d.link("fra/p0")
    _, answer = d.engine.begin_fetch(d.params("fra/p0"), prompt)
    await eventually(lambda: len(link.sessions) == 1)
    write(file)
    await eventually(lambda: names(d) == [])
    done = await answer
    assert done.status == "staged"
    assert d.engine.staged_is_right(done, prompt, 0)
    d.engine.release(done)
    await eventually(lambda: not link.ready)
    assert link.detail == "it is not dialled any more"
    await d.clean(p)


@pytest.mark.parametrize(
    "bad",
    [
        "peers: [",
        "peers: [{name: fra, instances: [{name: p0}]}]",
        # One that is listed in the settings, and one that must not be dialled without TLS.
        "peers: [{name: ams, instances: [{name: p0, address: '127.0.0.1:2'}]}]",
        "peers: [{name: fra, instances: [{name: p0, address: '192.0.2.1:1'}]}]",
    ],
)
async def test_what_is_no_good_changes_nothing(decode_site: Any, tmp_path: Path, bad: str) -> None:
    file = tmp_path / "peers.yaml"
    write(file, p0=1)
    d = await decode_site({"ams/p0": 1}, engine=None, discovery={"file": str(file)})
    file.write_text(bad)
    metrics = d.agent.metrics.registry.get_sample_value
    refused = {"source": str(file), "result": "refused"}
    await eventually(lambda: metrics("prfaas_agent_discovery_changes_total", refused) == 1)
    assert names(d) == ["ams/p0", "fra/p0"]


@pytest.mark.parametrize("text", ["", "peers: {}", "engines: []"])
async def test_at_the_start_a_file_has_to_be_good(tmp_path: Path, text: str) -> None:
    file = tmp_path / "peers.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"peers\.yaml"):
        read_peers(file)
    agent = {"socket": tmp_path / "s", "discovery": {"file": str(file)}}
    with pytest.raises(ConfigError, match=r"peers\.yaml"):
        AgentServer(Settings.model_validate({"agent": agent}))


async def test_instances_behind_a_name_are_found_and_stay_when_it_fails(
    prefill_site: Any, decode_site: Any, tokens: Any
) -> None:
    p = await prefill_site()
    records = {
        (SERVICE, "SRV"): [f"1 1 {p.port} p0.prefill.test."],
        ("p0.prefill.test", "A"): ["127.0.0.1"],
    }
    async with dns_server(records) as server:
        server.ttl_s = 0
        found = {
            "peers": [{"name": SERVICE, "peer": "fra", "channels": 2}],
            "dns_server": server.address,
        }
        d = await decode_site({}, discovery=found)
        await eventually(lambda: names(d) == ["fra/p0"])
        await d.ready("fra/p0")
        assert await staged(d, tokens(PROMPT)) == "staged"
        server.rcode = "SERVFAIL"
        metrics = d.agent.metrics.registry.get_sample_value
        await eventually(
            lambda: metrics("prfaas_agent_discovery_failures_total", {"source": SERVICE}) or 0
        )
        assert names(d) == ["fra/p0"]
        await d.clean(p)
