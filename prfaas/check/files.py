"""The files that a configuration names, opened as the processes would open them."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prfaas.agent_peers import read_peers
from prfaas.check.findings import Findings
from prfaas.check.tls_part import own_files
from prfaas.codecs.calibration import Calibration
from prfaas.codecs.gate import why_not
from prfaas.errors import ConfigError, PrfaasError
from prfaas.profile import load_profile
from prfaas.settings import (
    EngineSettings,
    GatewaySettings,
    PolicySettings,
    Settings,
    StateSettings,
    TenancySettings,
)
from prfaas.tenants import TenantFile, load_tenants
from prfaas.tokens import Tokenizer
from prfaas.whole_file import can_hold_files


def named_files(
    settings: Settings,
    make_policy: Callable[[PolicySettings], Any],
    check_gateway: Callable[[Settings], None],
) -> Findings:
    """All of them, and nothing but files. `check_gateway` reads what the gateway discovers; it is
    asked where there are engines, listed or found. Both callables raise ConfigError.
    """
    findings = Findings()
    gateway = settings.gateway
    found = gateway.discovery
    if gateway.engines or found.engines or found.file is not None:
        try:
            check_gateway(settings)
        except ConfigError as exc:
            findings.fail(exc.field or "gateway", exc.message, "docs/configuration.md has all keys")
    policy_files(gateway, make_policy, findings)
    tenant_file(gateway.tenants, findings)
    tokenizer_file(gateway.tokenizer, findings)
    gateway_places(gateway, findings)
    redis_files(gateway.state, findings)
    own_files(gateway.tls, "client", "gateway.tls", findings)
    engine_files(settings.engine, findings)
    agent = settings.agent
    if agent.discovery.file is not None:
        try:
            read_peers(agent.discovery.file)
        except ConfigError as exc:
            findings.fail("agent.discovery.file", exc.message, "correct the file")
    own_files(agent.tls, "both", "agent.tls", findings)
    calibration_file("agent", agent.codec_calibration, findings)
    own_files(settings.prefill.tls, "both", "prefill.tls", findings)
    calibration_file("prefill", settings.prefill.codec_calibration, findings)
    return findings


def policy_files(
    gateway: GatewaySettings, make_policy: Callable[[PolicySettings], Any], findings: Findings
) -> None:
    """The policies, each with its file if it has one."""
    for role in ("policy", "canary", "shadow"):
        chosen: PolicySettings | None = getattr(gateway, role)
        if chosen is None:
            continue
        key = f"gateway.{role}"
        try:
            policy = make_policy(chosen)
        except ConfigError as exc:
            findings.fail(key, exc.message, "`prfaas tune` writes policy files that load")
        else:
            findings.ok(key, f"{policy.name} loads")


def tenant_file(tenancy: TenancySettings, findings: Findings) -> TenantFile | None:
    """None where there is none, or it does not load."""
    if tenancy.file is None:
        return None
    try:
        found = load_tenants(tenancy.file)
    except ConfigError as exc:
        findings.fail("gateway.tenants.file", exc.message, "see docs/tenants.md")
        return None
    findings.ok("gateway.tenants.file", f"{len(found.tenants)} tenants")
    return found


def tokenizer_file(path: Path | None, findings: Findings) -> Tokenizer | None:
    """None where there is none, or it does not load."""
    return _tokenizer("gateway.tokenizer", path, findings)


def gateway_places(gateway: GatewaySettings, findings: Findings) -> None:
    """Where the gateway writes: its audit log, and its workers' sockets. Makes neither."""
    log = gateway.tenants.audit_log
    if log is not None:
        key = "gateway.tenants.audit_log"
        place_of = log if os.path.exists(log) else log.parent
        if os.path.isdir(log) or not os.access(place_of, os.W_OK):
            findings.fail(key, f"cannot write {log}", "let this user write there")
        else:
            findings.ok(key, f"{log} can be written")
    place = gateway.worker_dir
    if place is not None:
        key = "gateway.worker_dir"
        if not can_hold_files(place):
            findings.fail(key, f"cannot make a directory in {place}", "let this user write there")
        else:
            findings.ok(key, f"{place} can be had")


def redis_files(state: StateSettings, findings: Findings) -> None:
    """Certificates of the connection to Redis, as OpenSSL reads them."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if state.redis_ca is not None:
        key, path = "gateway.state.redis_ca", state.redis_ca
        _reads(lambda: context.load_verify_locations(path), key, str(path), findings)
    cert, private = state.redis_cert, state.redis_key
    if cert is not None:
        both = str(cert) if private is None else f"{cert} with {private}"
        _reads(
            lambda: context.load_cert_chain(cert, private, password=""),
            "gateway.state.redis_cert", both, findings,
        )  # fmt: skip
    elif private is not None:
        findings.fail(
            "gateway.state.redis_key", f"{private} is a key without redis_cert", "name both"
        )


def engine_files(engine: EngineSettings, findings: Findings) -> None:
    """What an engine of these settings reads, but for a model's weights."""
    if engine.model is not None and engine.paced is not None:
        findings.fail("engine.model", "so is engine.paced", "give one of them, not both")
    if engine.model is not None and _is_there("engine.model", engine.model, findings):
        _tokenizer("engine.model", engine.model, findings)
    if engine.paced is not None:
        _paced(engine.paced, findings)
    calibration_file("engine", engine.codec_calibration, findings)


def calibration_file(section: str, path: Path | None, findings: Findings) -> None:
    """The codecs' calibration of a section, and which lossy codecs it offers."""
    if path is None:
        return
    key = f"{section}.codec_calibration"
    try:
        calibration = Calibration.load(path)
    except (PrfaasError, OSError) as exc:
        findings.fail(key, str(exc), "`prfaas calibrate-kv` makes one, the same for D and P")
    else:
        _rungs(key, calibration, findings)


def _rungs(key: str, calibration: Calibration, findings: Findings) -> None:
    """Which lossy codecs are offered, and why others are not."""
    rungs = calibration.header.rungs
    wrong = {rung.codec: why for rung in rungs if (why := why_not(rung))}
    missing = "; ".join(f"{name} is not: {', '.join(why)}" for name, why in wrong.items())
    if len(wrong) == len(rungs):
        findings.warn(key, missing or "no codec in it", "without a lossy codec it is of no use")
        return
    offered = ", ".join(rung.codec for rung in rungs if rung.codec not in wrong)
    findings.ok(key, f"{offered} offered" + (f"; {missing}" if missing else ""))


def _paced(path: Path, findings: Findings) -> None:
    key = "engine.paced"
    try:
        profile = load_profile(path)
    except ConfigError as exc:
        findings.fail(key, exc.message, "docs/policies.md says what a profile has")
        return
    if profile.tokenizer is None:
        mend = "`prfaas profile show NAME --tokenizer MODEL` prints one that has it"
        findings.fail(key, f"{path}: tokenizer: Field required", mend)
    elif _tokenizer(key, profile.tokenizer, findings) is not None:
        findings.ok(key, f"{profile.name}, {profile.label}")


def _is_there(key: str, path: Path, findings: Findings) -> bool:
    try:
        path.stat()
    except FileNotFoundError:
        findings.fail(key, f"{path} does not exist", "correct the path")
        return False
    except OSError as exc:
        findings.fail(key, f"cannot read {path}: {exc.strerror}", "let this user read it")
        return False
    return True


def _tokenizer(key: str, path: Path | None, findings: Findings) -> Tokenizer | None:
    if path is None:
        return None
    try:
        tokenizer = Tokenizer.load(path)
    except PrfaasError as exc:
        findings.fail(key, exc.message, "name the model's directory or GGUF file")
        return None
    findings.ok(key, f"{path} loads")
    return tokenizer


def _reads(read: Callable[[], object], key: str, what: str, findings: Findings) -> None:
    try:
        read()
    except ssl.SSLError as exc:
        reason = (exc.reason or "not PEM").lower().replace("_", " ")
        findings.fail(key, f"{what}: {reason}", "see docs/state.md")
    except OSError as exc:
        findings.fail(key, f"cannot read {what}: {exc.strerror}", "see docs/state.md")
    else:
        findings.ok(key, f"{what} loads")
