"""What an agent's settings name, at D and at P: memory, sockets, vLLM, peers, keys."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import psutil

from prfaas.agent_peers import find_peers, read_peers
from prfaas.check.dial import Refused, ask, reach
from prfaas.check.files import calibration_file, engine_files
from prfaas.check.findings import Findings
from prfaas.check.tls_part import certified, own_files
from prfaas.dialling import checked_endpoint
from prfaas.dns_names import Names
from prfaas.errors import ConfigError, PeerUnavailable
from prfaas.settings import (
    AgentPeer,
    AgentSettings,
    EngineSettings,
    InstanceAddress,
    PrefillSettings,
    VllmSettings,
)
from prfaas.tls import require_tls_or_loopback
from prfaas.tls_files import TlsFiles

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
MAX_SOCKET_PATH = 107
"""Bytes that the kernel takes of a unix socket's path."""
CONGESTION = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")


async def check_agent(agent: AgentSettings, timeout_s: float) -> Findings:
    """Everything that `prfaas agent` of these settings would need."""
    findings = Findings()
    _listens(agent, "agent", findings)
    _memory("agent.staging_bytes", agent.staging_bytes + agent.ring_bytes, findings)
    if not any(key.get_secret_value() for key in agent.transfer_keys):
        findings.fail(
            "agent.transfer_keys",
            "there is none: every signed transfer is refused",
            "put the gateways' transfer_key here",
        )
    files = own_files(agent.tls, "both", "agent.tls", findings)
    peers = [*agent.peers, *await _found(agent, timeout_s, findings)]
    checks = [
        _instance(agent, peer.name, instance, files, timeout_s)
        for peer in peers
        for instance in peer.instances
    ]
    if agent.engine == "vllm":
        checks.append(_vllm("agent", agent.vllm, timeout_s))
    for found in await asyncio.gather(*checks):
        findings.add(found)
    if not peers:
        findings.warn("agent.peers", "there is none: nothing is offloaded", "name the peers")
    return findings


async def check_prefill(prefill: PrefillSettings, timeout_s: float) -> Findings:
    """Everything that `prfaas prefill` of these settings would need."""
    findings = Findings()
    _listens(prefill, "prefill", findings)
    wanted_bytes = prefill.ring_bytes + prefill.retention_bytes
    _memory("prefill.retention_bytes", wanted_bytes, findings)
    own_files(prefill.tls, "both", "prefill.tls", findings)
    if prefill.tls is not None and not prefill.authorised:
        findings.fail(
            "prefill.authorised",
            "nobody may open sessions",
            "name the certificates of D's agents, with the models they may have prefilled",
        )
    _congestion(prefill.congestion, findings)
    if prefill.engine == "vllm":
        findings.add(await _vllm("prefill", prefill.vllm, timeout_s))
    return findings


def check_engine(engine: EngineSettings) -> Findings:
    """The files that `prfaas engine` of these settings would read."""
    findings = Findings()
    if engine.model is None and engine.paced is None:
        findings.fail("engine.model", "not set", "name a Hugging Face directory or a GGUF file")
    engine_files(engine, findings)
    if engine.port_socket is None:
        findings.warn("engine.port_socket", "not set: it offloads nothing", "name its agent's")
    else:
        _socket("engine.port_socket", engine.port_socket, findings)
    return findings


def _listens(settings: AgentSettings | PrefillSettings, section: str, findings: Findings) -> None:
    try:
        require_tls_or_loopback(settings.host, settings.tls, f"{section}.host")
    except ConfigError as exc:
        findings.fail(f"{section}.host", exc.message, f"set {section}.tls; see docs/operations.md")
    _socket(f"{section}.socket", settings.socket, findings)
    if settings.metrics_port == 0:
        findings.warn(
            f"{section}.metrics_port", "0: no metrics of it", "set a port that Prometheus reaches"
        )
    calibration_file(section, settings.codec_calibration, findings)


def _congestion(wanted: str, findings: Findings) -> None:
    try:
        available = CONGESTION.read_text().split()
    except OSError:  # another kernel
        return
    if wanted and wanted not in available:
        findings.warn(
            "prefill.congestion",
            f"this kernel has no {wanted} ({', '.join(available)})",
            f"modprobe tcp_{wanted}; `prfaas check-host` has the rest",
        )


def _socket(key: str, path: Path, findings: Findings) -> None:
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        findings.fail(key, f"{path} is longer than {MAX_SOCKET_PATH} bytes", "use a shorter one")
    elif not path.parent.is_dir():
        findings.fail(key, f"{path.parent} does not exist", "make that directory")
    elif not os.access(path.parent, os.W_OK):
        findings.fail(key, f"{path.parent} cannot be written to", "let this user write there")
    else:
        findings.ok(key, f"{path} can be made")


def _memory(key: str, wanted_bytes: int, findings: Findings) -> None:
    """Memory that it takes when its engine connects, all at once."""
    memory = psutil.virtual_memory()
    most = min(memory.total, _own_limit() or memory.total)
    text = f"{wanted_bytes / 2**20:.0f} MiB"
    if wanted_bytes > most:
        findings.fail(
            key,
            f"{text} of memory, of which {most / 2**20:.0f} MiB may be had",
            "make it smaller, or give the machine or container more",
        )
    elif wanted_bytes > memory.available:
        findings.warn(
            key,
            f"{text} of memory, of which {memory.available / 2**20:.0f} MiB are free now",
            "see what else takes memory here, if this process does not run already",
        )
    else:
        findings.ok(key, f"{text} of memory can be had")


def _own_limit() -> int | None:
    """Bytes that this process's container may take; None: no limit, or not known."""
    try:
        return int(CGROUP_LIMIT.read_text())
    except (OSError, ValueError):
        return None


async def _found(agent: AgentSettings, timeout_s: float, findings: Findings) -> list[AgentPeer]:
    """Peers of the file and behind DNS names."""
    found: list[AgentPeer] = []
    chosen, what = agent.discovery, "agent.discovery"
    if chosen.file is not None:
        try:
            found += read_peers(chosen.file).peers
        except ConfigError as exc:
            findings.fail(f"{what}.file", exc.message, "correct the file; the agent starts with it")
    for asked in chosen.peers:
        try:
            names = Names(chosen.dns_server, timeout_s, what)
            part, _ = await find_peers(names, asked, agent.tls is not None)
        except ConfigError as exc:
            findings.fail(f"{what}.dns_server", exc.message, "give host:port with an IP address")
        except PeerUnavailable as exc:
            mend = "correct the name, or start what it stands for; the agent goes on asking"
            findings.warn(f"{what}.peers", exc.message, mend)
        else:
            findings.ok(f"{what}.peers", f"{asked.name}: {part}")
            found += part.peers
    return found


async def _instance(
    agent: AgentSettings,
    peer: str,
    instance: InstanceAddress,
    files: TlsFiles | None,
    timeout_s: float,
) -> Findings:
    findings = Findings()
    name = f"{peer}/{instance.name}"
    what, key = f"peer {name}", f"agent.peers {name} address"
    try:
        checked_endpoint(instance.address, files, instance.tls_name, key)
    except ConfigError as exc:
        findings.fail(what, exc.message, f"correct {key}, or set agent.tls")
        return findings
    if await certified(
        what, instance.address, agent.tls, instance.tls_name, key, "agent", timeout_s, findings
    ):
        findings.ok(what, f"{instance.address} is reached{' with TLS' if agent.tls else ''}")
    return findings


async def _vllm(section: str, vllm: VllmSettings, timeout_s: float) -> Findings:
    findings = Findings()
    what = f"{section}.vllm"
    url = vllm.url.rstrip("/")
    try:
        answer = await ask(f"{url}/v1/models", timeout_s, api_key=vllm.api_key.get_secret_value())
    except Refused as exc:
        findings.fail(f"{what}.url", f"{url}: {exc}", f"start vLLM, or correct {what}.url")
    else:
        if answer.status == 200:
            findings.ok(f"{what}.url", f"{url} answers in {answer.took_s * 1e3:.0f} ms")
        else:
            mend = f"set {what}.api_key" if answer.status == 401 else "see vLLM's log"
            findings.fail(f"{what}.url", f"{url}/v1/models answers {answer.status}", mend)
    key = f"{what}.kv_events"
    if not vllm.kv_events:
        findings.warn(key, "not set: vLLM's prefix cache is unknown", "see docs/vllm.md")
    elif vllm.kv_events.startswith("tcp://"):
        host, _, port = vllm.kv_events.removeprefix("tcp://").rpartition(":")
        try:
            await reach(host, int(port), timeout_s)
        except (Refused, ValueError) as exc:
            findings.fail(
                key, f"{vllm.kv_events}: {exc}", "start vLLM with --kv-events-config, or correct it"
            )
        else:
            findings.ok(key, f"{vllm.kv_events} is reached")
    return findings
