"""What a gateway's settings name: engines, their agents, peers, tokenizer, policies, keys."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from prfaas.check.dial import Answered, Heard, Refused, ask
from prfaas.check.files import (
    gateway_places,
    policy_files,
    redis_files,
    tenant_file,
    tokenizer_file,
)
from prfaas.check.findings import Findings
from prfaas.check.tls_part import clock, own_files, watch
from prfaas.errors import ConfigError, PrfaasError
from prfaas.settings import (
    EngineEndpoint,
    GatewaySettings,
    PeerEndpoint,
    PolicySettings,
    Settings,
    StateSettings,
)
from prfaas.tls_files import TlsFiles
from prfaas.tokens import Tokenizer
from prfaas.transfer import key_id

SAMPLE = "What does a prefill cost? Über 2.000 Tokens, naïvely: 例えば 12 ms."
"""Text that tokenizers are compared with."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What the composition root brings of the other parts; each raises ConfigError."""

    check_gateway: Callable[[Settings], None]
    make_policy: Callable[[PolicySettings], Any]
    reach_state: Callable[[StateSettings], Awaitable[None]] | None = None


async def check_gateway(settings: Settings, parts: Parts, timeout_s: float) -> Findings:
    """Everything that a gateway of these settings would need."""
    findings = Findings()
    gateway = settings.gateway
    try:
        parts.check_gateway(settings)
    except ConfigError as exc:
        findings.fail(exc.field or "gateway", exc.message, "docs/configuration.md has every key")
    policy_files(gateway, parts.make_policy, findings)
    _tenants(gateway, findings)
    gateway_places(gateway, findings)
    redis_files(gateway.state, findings)
    tokenizer = await asyncio.to_thread(_tokenizer, gateway, findings)
    files = own_files(gateway.tls, "client", "gateway.tls", findings)
    checks = [_engine(gateway, each, files, tokenizer, timeout_s) for each in gateway.engines]
    checks += [_peer(gateway, each, files, timeout_s) for each in gateway.peers]
    checks.append(_state(gateway, parts))
    for found in await asyncio.gather(*checks):
        findings.add(found)
    return findings


def _tenants(gateway: GatewaySettings, findings: Findings) -> None:
    found = tenant_file(gateway.tenants, findings)
    if found is None:
        return
    if not any(tenant.admin for tenant in found.tenants):
        findings.warn(
            "gateway.tenants.file",
            "no tenant is an admin: nobody can read /prfaas/ and the dashboard",
            "give one of them `admin: true`",
        )
    known = {peer.peer for peer in gateway.peers} | {"*"}
    for tenant in found.tenants:
        unknown = sorted(set(tenant.peers) - known)
        if unknown:
            findings.warn(
                f"tenant {tenant.name}",
                f"peers that gateway.peers does not name: {', '.join(unknown)}",
                "correct one of the two",
            )


def _tokenizer(gateway: GatewaySettings, findings: Findings) -> Tokenizer | None:
    if gateway.tokenizer is None and gateway.peers and gateway.offload:
        findings.warn(
            "gateway.tokenizer",
            "not set: only prompts that are token arrays can be offloaded",
            "name the model's directory or GGUF file",
        )
    return tokenizer_file(gateway.tokenizer, findings)


async def _engine(
    gateway: GatewaySettings,
    engine: EngineEndpoint,
    files: TlsFiles | None,
    tokenizer: Tokenizer | None,
    timeout_s: float,
) -> Findings:
    findings = Findings()
    what, key = f"engine {engine.name}", f"gateway.engines {engine.name}"
    if await _serves(what, f"{key} url", engine.url, timeout_s, findings):
        await _serves_model(what, engine.url, gateway.model, timeout_s, findings)
        if tokenizer is not None:
            await _same_tokens(what, engine.url, gateway.model, tokenizer, timeout_s, findings)
    if engine.agent is None:
        if gateway.peers:
            findings.warn(what, "has no agent: it never offloads", f"name it as {key} agent")
        return findings
    what = f"agent of {engine.name}"
    heard = await watch(
        what, engine.agent, gateway.tls, files, engine.tls_name, f"{key} agent", "gateway",
        timeout_s, findings,
    )  # fmt: skip
    if heard is not None:
        _agent(gateway, what, heard, findings)
        _links(gateway, what, heard, findings)
    return findings


async def _serves(what: str, key: str, url: str, timeout_s: float, findings: Findings) -> bool:
    try:
        answer = await ask(f"{url.rstrip('/')}/health", timeout_s)
    except Refused as exc:
        findings.fail(what, f"{url}: {exc}", f"start the engine, or correct {key}")
        return False
    if answer.status != 200:
        findings.fail(what, f"{url}/health answers {answer.status}", "see the engine's log")
        return False
    findings.ok(what, f"{url} answers in {answer.took_s * 1e3:.0f} ms")
    clock(what, answer.ahead_s, 0.5 + answer.took_s, findings)
    return True


async def _serves_model(
    what: str, url: str, model: str, timeout_s: float, findings: Findings
) -> None:
    answer = await _asked(what, f"{url.rstrip('/')}/v1/models", timeout_s, findings)
    if answer is None:
        return
    if answer.status == 401:
        findings.warn(
            what, "asks for an API key, so its models are not known", "clients must bring that key"
        )
        return
    names = _model_names(answer.body)
    if model in names:
        findings.ok(what, f"serves {model}")
    else:
        findings.fail(
            what,
            f"serves {', '.join(names) or 'nothing'}, not {model}",
            "set gateway.model to the name that the engine serves, or the engine's to this one",
        )


def _model_names(body: object) -> list[str]:
    data = body.get("data") if isinstance(body, dict) else None
    return [str(card["id"]) for card in data or () if isinstance(card, dict) and "id" in card]


async def _same_tokens(
    what: str, url: str, model: str, tokenizer: Tokenizer, timeout_s: float, findings: Findings
) -> None:
    body = {"model": model, "prompt": SAMPLE}
    answer = await _asked(what, f"{url.rstrip('/')}/tokenize", timeout_s, findings, json=body)
    if answer is None or answer.status != 200 or not isinstance(answer.body, dict):
        return  # it has no such route: nothing to compare
    theirs = answer.body.get("tokens")
    ours = tokenizer.encode(SAMPLE, add_special=True)
    if theirs == ours:
        findings.ok(what, "its tokenizer agrees with gateway.tokenizer")
    else:
        findings.fail(
            what,
            "its tokenizer differs from gateway.tokenizer: prefix matches and estimates are off",
            "set gateway.tokenizer to the model that the engine serves",
        )


async def _asked(
    what: str, url: str, timeout_s: float, findings: Findings, json: object | None = None
) -> Answered | None:
    try:
        return await ask(url, timeout_s, json=json)
    except Refused as exc:
        findings.warn(what, f"{url}: {exc}", "see the engine's log")
        return None


def _agent(gateway: GatewaySettings, what: str, heard: Heard, findings: Findings) -> None:
    """Engine, cache events and keys of a decode engine's agent."""
    _model(gateway, what, heard, "decode", findings)
    if heard.update.engines and not heard.update.kv:
        findings.fail(
            what,
            "its engine publishes no cache events, so nothing is offloaded (no_cache_info)",
            "vLLM: --kv-events-config and agent.vllm.kv_events (docs/vllm.md)",
        )
    ours = gateway.transfer_key.get_secret_value()
    if heard.key_ids is not None and ours and gateway.offload and gateway.peers:
        if key_id(ours.encode()) in heard.key_ids:
            findings.ok(what, "knows gateway.transfer_key")
        else:
            findings.fail(
                what,
                "does not know gateway.transfer_key: all that it should offload stays local",
                "put the same key among its agent.transfer_keys, and restart it",
            )


def _model(
    gateway: GatewaySettings, what: str, heard: Heard, role: str, findings: Findings
) -> None:
    """Whether an engine is beside it, of our model, in the right role."""
    info = next(iter(heard.update.engines), None)
    if info is None or not info.ready:
        findings.fail(
            what,
            "answers, but no engine is connected to it",
            "start the engine with this agent's socket, and see both logs",
        )
        return
    if info.model != gateway.model:
        findings.fail(
            what,
            f"its engine serves {info.model}, not {gateway.model}",
            "serve one model under one name everywhere",
        )
    if role not in info.roles:
        findings.fail(
            what,
            f"its engine has the roles {', '.join(info.roles) or 'none'}, not {role}",
            "see engine.roles, or which agent is named here",
        )
    if info.draining:
        findings.warn(what, "is draining: it takes nothing new", "wait for its restart")
    speed = "" if info.curve.known else ", its speed not measured yet"
    findings.ok(what, f"hears {info.name}{' (paced)' if info.paced else ''}{speed}")


def _links(gateway: GatewaySettings, what: str, heard: Heard, findings: Findings) -> None:
    """Peers of the gateway's settings as the agent knows them."""
    told = {(link.peer, link.instance): link for link in heard.update.links if not link.agent}
    for peer in gateway.peers:
        name = f"{peer.peer}/{peer.instance}"
        link = told.get((peer.peer, peer.instance))
        if link is None:
            findings.fail(
                what,
                f"knows no {name}",
                "name that peer and instance in its agent.peers, exactly as in gateway.peers",
            )
        elif not link.ready:
            detail = link.detail or "no reason given"
            findings.fail(what, f"its link to {name} is not ready: {detail}", _mend(detail))
        else:
            findings.ok(
                what,
                f"link to {name}: {link.goodput_bytes_per_s / 1e6:.1f} MB/s, "
                f"{link.rtt_s * 1e3:.0f} ms",
            )


def _mend(detail: str) -> str:
    for word, mend in (
        ("permission", "add the agent's name to prefill.authorised over there, with this model"),
        ("authoris", "add the agent's name to prefill.authorised over there, with this model"),
        ("layout", "D and P must run the same model; the detail names what differs"),
        ("fingerprint", "D and P must run the same model; the detail names what differs"),
        ("probe", "D and P compute different KV: compare weights and dtypes"),
    ):
        if word in detail.lower():
            return mend
    return "is P's agent up, with an engine? `prfaas check` with the agent's configuration dials it"


async def _peer(
    gateway: GatewaySettings, peer: PeerEndpoint, files: TlsFiles | None, timeout_s: float
) -> Findings:
    findings = Findings()
    name = f"{peer.peer}/{peer.instance}"
    what, key = f"peer {name}", f"gateway.peers {name}"
    heard = await watch(
        what, peer.watch, gateway.tls, files, peer.tls_name, f"{key} watch", "gateway", timeout_s,
        findings,
    )  # fmt: skip
    if heard is not None:
        _model(gateway, what, heard, "prefill", findings)
    return findings


async def _state(gateway: GatewaySettings, parts: Parts) -> Findings:
    findings, state = Findings(), gateway.state
    if state.redis is None or parts.reach_state is None:
        return findings
    try:
        await parts.reach_state(state)
    except PrfaasError as exc:
        findings.fail("gateway.state.redis", exc.message, "see docs/state.md")
    else:
        findings.ok("gateway.state.redis", "answers")
    untold = len(gateway.engines) > 1 and any(each.agent is None for each in gateway.engines)
    if untold and state.share_prefixes and not gateway.cache_secret.get_secret_value():
        findings.warn(
            "gateway.cache_secret",
            "is not set, so gateways do not tell each other which engine got what",
            "set the same one at all of them, or gateway.state.share_prefixes to false",
        )
    return findings
