"""What lies in deploy/: every flag, setting, file, port and metric that it names exists."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from prfaas.cli import cli
from prfaas.limits import Limits
from prfaas.settings import Settings, load_settings
from scripts.metrics_page import metrics_page

DEPLOY = Path(__file__).parents[1] / "deploy"
SITES = ("decode-site", "prefill-site")
CONFIGS = sorted([*DEPLOY.glob("compose/*.yaml"), *DEPLOY.glob("kubernetes/*/*.config.yaml")])
CONFIGS = [file for file in CONFIGS if file.name != "compose.yaml"]
COMPOSE = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())
SECTION = {"gateway": "gateway", "engine": "engine", "agent": "agent", "prefill": "prefill"}


def file_name(file: Path) -> str:
    return file.relative_to(DEPLOY).as_posix()


@pytest.mark.parametrize("file", CONFIGS, ids=file_name)
def test_every_configuration_is_one_that_processes_read(file: Path) -> None:
    load_settings(file)


def objects(site: str) -> list[dict[str, Any]]:
    """Of all manifests that the site's kustomization names."""
    folder = DEPLOY / "kubernetes" / site
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    return [
        each
        for name in kustomization["resources"]
        for each in yaml.safe_load_all((folder / name).read_text())
    ]


def containers() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Site, pod and container, for all of ours."""
    for site in SITES:
        for each in objects(site):
            if each["kind"] in ("Deployment", "StatefulSet"):
                pod = each["spec"]["template"]["spec"]
                for container in pod["containers"]:
                    yield site, pod, container


def our_containers() -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    return [found for found in containers() if found[2]["image"] == "prfaas"]


def check_command(arguments: list[str]) -> None:
    """A command of `prfaas`, with options that it has."""
    command = cli.commands[arguments[0]]
    known = {name for param in command.params for name in param.opts}
    assert {word for word in arguments[1:] if word.startswith("--")} <= known, arguments


def check_environment(names: Iterator[str]) -> None:
    """Each PRFAAS_ name is a setting."""
    for name in names:
        if not name.startswith("PRFAAS_"):
            continue
        model: Any = Settings
        for part in name.removeprefix("PRFAAS_").lower().split("__"):
            assert part in model.model_fields, name
            model = model.model_fields[part].annotation


def test_manifests_start_commands_that_exist_with_settings_that_exist() -> None:
    for _, _, container in our_containers():
        check_command(container["args"])
        check_environment(each["name"] for each in container.get("env", ()))
    assert len(our_containers()) == 3


def test_compose_starts_commands_that_exist_with_settings_that_exist() -> None:
    started = set()
    for service in COMPOSE["services"].values():
        if service["image"].startswith("prfaas"):
            check_command(service["command"])
            started.add(service["command"][0])
            check_environment(iter(service.get("environment", {})))
            for option, value in zip(service["command"], service["command"][1:], strict=False):
                if option == "--config":
                    name = Path(value).name
                    assert (DEPLOY / "compose" / name).is_file()
                    assert any(volume.startswith(f"./{name}:") for volume in service["volumes"])
    assert started == {"certs", *SECTION}


def test_compose_makes_each_image_in_one_way_from_a_target_that_exists() -> None:
    made: dict[str, dict[str, str]] = {}
    for service in COMPOSE["services"].values():
        if "build" in service:
            assert made.setdefault(service["image"], service["build"]) == service["build"]
    assert set(made) == {"prfaas", "prfaas-engine"}
    for build in made.values():
        file = DEPLOY / "compose" / build["context"] / build["dockerfile"]
        assert f" AS {build['target']}\n" in file.read_text()


def test_compose_services_probe_and_call_ports_that_their_processes_open() -> None:
    gateway = load_settings(DEPLOY / "compose" / "gateway.yaml").gateway
    engine = load_settings(DEPLOY / "compose" / "d-engine.yaml").engine
    assert gateway.engines[0].url == f"http://d-engine:{engine.port}"
    assert COMPOSE["services"]["gateway"]["ports"] == [f"127.0.0.1:8000:{gateway.port}"]
    for name, settings in (("gateway", gateway), ("d-engine", engine)):
        assert settings.host == "0.0.0.0"
        probe = COMPOSE["services"][name]["healthcheck"]["test"][-1]
        assert f"http://127.0.0.1:{settings.port}/health" in probe


def test_compose_engines_and_agents_share_the_socket_that_both_name() -> None:
    for side in "pd":
        engine = load_settings(DEPLOY / "compose" / f"{side}-engine.yaml").engine
        settings = load_settings(DEPLOY / "compose" / f"{side}-agent.yaml")
        agent = settings.prefill if side == "p" else settings.agent
        assert engine.port_socket == agent.socket
        mount = f"{side}-socket:{agent.socket.parent}"
        for name in (f"{side}-engine", f"{side}-agent"):
            assert mount in COMPOSE["services"][name]["volumes"]


def test_compose_makes_the_certificates_that_processes_read() -> None:
    (command,) = [s["command"] for n, s in COMPOSE["services"].items() if n == "certs"]
    out = Path(command[command.index("--out") + 1])
    names = {name for flag, name in pairwise(command) if flag == "--name"}
    for name, section in (("gateway", "gateway"), ("d-agent", "agent"), ("p-agent", "prefill")):
        tls = getattr(load_settings(DEPLOY / "compose" / f"{name}.yaml"), section).tls
        assert name in names
        assert (tls.cert, tls.key) == (out / name / "cert.pem", out / name / "key.pem")
        assert tls.ca == out / "ca.pem"
        assert f"tls:{out}:ro" in COMPOSE["services"][name]["volumes"]


def test_compose_services_dial_each_other_by_their_names() -> None:
    gateway = load_settings(DEPLOY / "compose" / "gateway.yaml").gateway
    agent = load_settings(DEPLOY / "compose" / "d-agent.yaml").agent
    prefill = load_settings(DEPLOY / "compose" / "p-agent.yaml").prefill
    dialled = [gateway.engines[0].agent, gateway.peers[0].watch]
    dialled += [agent.peers[0].instances[0].address]
    for address in dialled:
        assert address is not None
        assert address.partition(":")[0] in COMPOSE["services"]
    assert dialled == [f"d-agent:{agent.port}", *2 * [f"p-agent:{prefill.port}"]]
    assert (gateway.peers[0].peer, gateway.peers[0].instance) == (prefill.peer, prefill.instance)
    assert agent.peers[0].name == prefill.peer


@pytest.mark.parametrize("site", SITES)
def test_probes_ask_ports_that_the_configuration_opens(site: str) -> None:
    for of, _, container in our_containers():
        if of != site:
            continue
        command = container["args"][0]
        config = DEPLOY / "kubernetes" / site
        (file,) = [
            each
            for each in config.glob("*.config.yaml")
            if command in yaml.safe_load(each.read_text())
        ]
        settings = getattr(load_settings(file), SECTION[command])
        ports = {each["name"]: each["containerPort"] for each in container["ports"]}
        if command == "gateway":
            assert ports == {"http": settings.port}
            assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
            assert container["livenessProbe"]["httpGet"]["path"] == "/health"
        else:
            assert ports == {"grpc": settings.port, "metrics": settings.metrics_port}
            assert settings.metrics_host == "0.0.0.0"  # probes and Prometheus come from outside
        assert settings.tls is not None
        assert {"startupProbe", "livenessProbe"} <= container.keys()


def test_pods_have_time_to_drain() -> None:
    for _, pod, container in containers():
        pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
        assert pod["terminationGracePeriodSeconds"] > pause + Limits().drain_timeout_s


def test_engine_and_agent_share_the_socket_that_both_name() -> None:
    for site, pod, container in our_containers():
        if container["args"][0] == "gateway":
            continue
        (vllm,) = [each for each in pod["containers"] if each["image"] == "prfaas-vllm"]
        words = " ".join(vllm["args"])
        (file,) = [
            each
            for each in (DEPLOY / "kubernetes" / site).glob("*.config.yaml")
            if container["args"][0] in yaml.safe_load(each.read_text())
        ]
        settings = getattr(load_settings(file), SECTION[container["args"][0]])
        assert str(settings.socket) in words
        assert settings.vllm.kv_events in words
        assert settings.vllm.kv_events_replay in words
        for each in (vllm, container):
            mounts = {mount["mountPath"]: mount["name"] for mount in each["volumeMounts"]}
            assert mounts[str(settings.socket.parent)] == "socket"


def test_the_gateway_of_the_decode_site_names_its_pods_and_the_other_sites() -> None:
    gateway = load_settings(DEPLOY / "kubernetes/decode-site/gateway.config.yaml").gateway
    agent = load_settings(DEPLOY / "kubernetes/decode-site/agent.config.yaml").agent
    prefill = load_settings(DEPLOY / "kubernetes/prefill-site/prefill.config.yaml").prefill
    (decode,) = [each for each in objects("decode-site") if each["kind"] == "StatefulSet"]
    name, service = decode["metadata"]["name"], decode["spec"]["serviceName"]
    pods = [f"{name}-{at}.{service}:{agent.port}" for at in range(decode["spec"]["replicas"])]
    assert [engine.agent for engine in gateway.engines] == pods
    assert {peer.peer for peer in gateway.peers} == {prefill.peer}
    known = {(p.name, i.name, i.address) for p in agent.peers for i in p.instances}
    assert {(p.peer, p.instance, p.watch) for p in gateway.peers} == known
    (remote,) = [each for each in objects("prefill-site") if each["kind"] == "StatefulSet"]
    names = {f"{remote['metadata']['name']}-{at}" for at in range(remote["spec"]["replicas"])}
    assert {peer.instance for peer in gateway.peers} == names


def test_secrets_and_config_maps_that_pods_mount_are_made_or_explained() -> None:
    for site in SITES:
        text = (DEPLOY / "kubernetes" / site / "kustomization.yaml").read_text()
        for each in objects(site):
            if each["kind"] not in ("Deployment", "StatefulSet"):
                continue
            for volume in each["spec"]["template"]["spec"]["volumes"]:
                if "configMap" in volume:
                    assert volume["configMap"]["name"] in text
                if "secret" in volume:
                    assert volume["secret"]["secretName"] in text


def test_images_copy_only_what_exists() -> None:
    root = DEPLOY.parent
    for name in ("Dockerfile", "vllm.Dockerfile"):
        for line in (DEPLOY / "docker" / name).read_text().splitlines():
            if line.startswith("COPY ") and "--from" not in line:
                source = line.split()[1]
                assert (root / source).exists(), line
    for line in (root / ".dockerignore").read_text().splitlines():
        if line.startswith("!"):
            assert (root / line[1:]).exists(), line


def test_every_metric_of_the_grafana_dashboard_exists() -> None:
    page = metrics_page()
    known = set(re.findall(r"^\| `([a-z_:]+)`", page, re.MULTILINE))
    histograms = set(re.findall(r"^\| `([a-z_:]+)` \| histogram", page, re.MULTILINE))
    known |= {f"{name}_bucket" for name in histograms}
    dashboard = json.loads((DEPLOY / "grafana" / "prfaas.json").read_text())
    queries = [t["expr"] for panel in dashboard["panels"] for t in panel.get("targets", ())]
    used = {name for query in queries for name in re.findall(r"\b(?:prfaas|vllm)[a-z_:]+", query)}
    assert len(used) > 30
    assert used - known == set()
    labels = {
        name: set(re.findall(r"`([a-z_]+)`", row))
        for name, row in re.findall(r"^\| `([a-z_:]+)` \| \w+ \| ([^|]*) \|", page, re.MULTILINE)
    }
    for query in queries:
        (first, *_) = re.findall(r"\b(?:prfaas|vllm)[a-z_:]+", query)
        mine = labels[first.removesuffix("_bucket")] | {"le", "job", "instance"}
        for group in re.findall(r"by \(([^)]*)\)", query):
            assert set(re.split(r", *", group)) <= mine, query
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)


def test_panels_of_the_grafana_dashboard_lie_beside_each_other() -> None:
    panels = json.loads((DEPLOY / "grafana" / "prfaas.json").read_text())["panels"]
    taken: dict[tuple[int, int], str] = {}
    for panel in panels:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24, panel["title"]
        for x in range(at["x"], at["x"] + at["w"]):
            for y in range(at["y"], at["y"] + at["h"]):
                assert taken.setdefault((x, y), panel["title"]) == panel["title"]
        targets = panel.get("targets", [])
        assert len({target["refId"] for target in targets}) == len(targets)
        assert all(target["datasource"]["uid"] == "${datasource}" for target in targets)
