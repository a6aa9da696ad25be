"""The file of a fleet: what is wrong is named before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from prfaas.errors import ConfigError
from prfaas.up.fleet import FleetPlan
from prfaas.up.fleet_file import read_fleet

PROFILES = Path(__file__).parents[3] / "deploy"
GOOD: dict[str, Any] = {
    "fleet_version": 1,
    "model": "m",
    "gateways": 2,
    "gateway": {"tokenizer": "tok"},
    "limits": {"progress_timeout_s": 2.5},
    "engines": {"count": 2, "engine": {"paced": "d.yaml"}, "agent": {"codec_threads": 2}},
    "peers": [
        {"name": "fra", "instances": 2, "engine": {"paced": "p.yaml"}, "link": {"mbit_s": 100}},
        {"name": "iad", "link_class": "lan"},
    ],
    "faults": [{"at_s": 1, "do": "kill", "what": "fra-p-1-agent"}],
}


def plan_of(tmp_path: Path, **changes: Any) -> FleetPlan:
    file = tmp_path / "fleet.yaml"
    file.write_text(yaml.safe_dump({**GOOD, **changes}))
    (tmp_path / "run").mkdir(exist_ok=True)
    return FleetPlan.create(read_fleet(file), file, tmp_path / "run", port=9000)


def section(tmp_path: Path, name: str, command: str) -> Any:
    file = tmp_path / "run" / f"{name}.yaml"
    assert file.stat().st_mode & 0o077 == 0, "it has keys in it"
    content = yaml.safe_load(file.read_text())
    assert content["limits"]["progress_timeout_s"] == 2.5
    return content[command]


def test_every_process_has_a_file_of_its_own(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    specs = (*plan.prefill_side(), *plan.decode_side(), *plan.gateways())
    assert tuple(spec.name for spec in specs) == plan.fleet.process_names
    assert plan.gateway_urls == ("http://127.0.0.1:9000", "http://127.0.0.1:9001")
    gateway = section(tmp_path, "gateway-1", "gateway")
    assert [e["name"] for e in gateway["engines"]] == ["d-0", "d-1"]
    assert [(p["peer"], p["instance"], p["link_class"]) for p in gateway["peers"]] == [
        ("fra", "p-0", "wan"), ("fra", "p-1", "wan"), ("iad", "p-0", "lan"),
    ]  # fmt: skip
    assert (gateway["port"], gateway["tokenizer"]) == (9001, str(tmp_path / "tok"))
    agent = section(tmp_path, "d-1-agent", "agent")
    assert agent["transfer_keys"] == [gateway["transfer_key"]]
    assert agent["codec_threads"] == 2
    lines = [i["address"] for peer in agent["peers"] for i in peer["instances"]]
    assert lines == [peer["watch"] for peer in gateway["peers"]], "all go over the line"
    prefill = section(tmp_path, "fra-p-1-agent", "prefill")
    assert f"127.0.0.1:{prefill['port']}" not in lines
    engine = section(tmp_path, "fra-p-1-engine", "engine")
    assert engine["port_socket"] == prefill["socket"]
    assert (engine["roles"], engine["paced"]) == (["prefill"], str(tmp_path / "p.yaml"))
    sockets = {section(tmp_path, f"d-{at}-engine", "engine")["port_socket"] for at in (0, 1)}
    assert len(sockets) == 2


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"fleet_version": 2}, "fleet_version"),
        ({"engines": {"count": 0}}, r"engines\.count"),
        ({"nonsense": 1}, "nonsense"),
        ({"peers": [{"name": "a"}, {"name": "a"}]}, "names must be unique"),
        ({"peers": [{"name": "No Name"}]}, r"peers\.0\.name"),
        ({"faults": [{"at_s": 1, "do": "kill", "what": "d-9-engine"}]}, "'d-9-engine' is none of"),
        ({"faults": [{"at_s": 1, "do": "link", "what": "fra"}]}, "`link` or `drop`"),
        ({"faults": [{"at_s": 1, "do": "link", "what": "x", "drop": True}]}, "'x' is none of fra"),
        ({"faults": [{"at_s": -1, "do": "kill", "what": "d-0-agent"}]}, r"faults\.0\.at_s"),
        (
            {"faults": [{"at_s": 3, "do": "start", "what": "d-0-agent"}]},
            "start d-0-agent at 3 s: it runs",
        ),
        (
            {
                "faults": [
                    {"at_s": 9, "do": "drain", "what": "d-0-agent"},
                    {"at_s": 3, "do": "pause", "what": "d-0-agent"},
                ]
            },
            "drain d-0-agent at 9 s: it is paused",
        ),
        (
            {
                "faults": [
                    {"at_s": 3, "do": "kill", "what": "d-0-agent"},
                    {"at_s": 4, "do": "start", "what": "d-0-agent"},
                    {"at_s": 5, "do": "resume", "what": "d-0-agent"},
                ]
            },
            "resume d-0-agent at 5 s: it runs",
        ),
    ],
)
def test_a_wrong_file_is_named_with_its_key(
    tmp_path: Path, changes: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        plan_of(tmp_path, **changes)
    assert str(tmp_path / "fleet.yaml") in caught.value.message


def test_a_wrong_setting_names_the_process(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, engines={"count": 1, "agent": {"codec_treads": 2}})
    with pytest.raises(ConfigError, match=r"d-0-agent: .*codec_treads"):
        plan.decode_side()


def test_a_file_that_is_not_there_or_no_yaml(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_fleet(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match="not YAML"):
        read_fleet(tmp_path / "bad.yaml")


def test_the_shipped_fleets_are_good(tmp_path: Path) -> None:
    shipped = sorted((PROFILES / "fleets").glob("*.yaml"))
    assert shipped
    for file in shipped:
        plan = FleetPlan.create(read_fleet(file), file, tmp_path)
        specs = (*plan.prefill_side(), *plan.decode_side(), *plan.gateways())
        assert len(specs) == len({spec.name for spec in specs})
        for spec in specs:
            written = yaml.safe_load((tmp_path / f"{spec.name}.yaml").read_text())
            paced = written.get("engine", {}).get("paced")
            assert paced is None or Path(paced).is_file()
