"""Certificates: our own files, and what others show."""

from __future__ import annotations

from datetime import UTC, datetime

from prfaas.check.dial import Heard, Refused, Shown, hear, reach, shake
from prfaas.check.findings import Findings
from prfaas.dialling import checked_endpoint, open_files
from prfaas.errors import ConfigError
from prfaas.settings import TlsSettings
from prfaas.tls_files import TlsFiles, Use

SOON_S = 7 * 86400
CLOCK_WARN_S, CLOCK_FAIL_S = 1.0, 10.0
"""Signed transfers live for `gateway.transfer_ttl_s`, which clocks that differ shorten."""


def own_files(tls: TlsSettings | None, use: Use, key: str, findings: Findings) -> TlsFiles | None:
    """Ours, said to be well or not."""
    if tls is None:
        return None
    try:
        files = open_files(tls, use, key)
    except ConfigError as exc:
        findings.fail(key, exc.message, "`prfaas certs` makes pairs that work, to compare with")
        return None
    assert files is not None
    material = files.current()
    left_s = (material.not_after - datetime.now(UTC)).total_seconds()
    text = f"certificate of {', '.join(material.names)}, valid for {left_s / 86400:.0f} more days"
    if left_s < SOON_S:
        findings.warn(key, text, "renew it and replace its files; nothing needs a restart")
    else:
        findings.ok(key, text)
    return files


async def watch(
    what: str,
    address: str,
    tls: TlsSettings | None,
    files: TlsFiles | None,
    tls_name: str | None,
    key: str,
    section: str,
    timeout_s: float,
    findings: Findings,
) -> Heard | None:
    """Dial an agent's Watch step by step: address, TCP, TLS, telemetry, clock. None where one of
    them fails, which is then said.
    """
    try:
        endpoint = checked_endpoint(address, files, tls_name, key)
    except ConfigError as exc:
        findings.fail(what, exc.message, f"correct {key}, or set {section}.tls")
        return None
    if not await certified(what, address, tls, tls_name, key, section, timeout_s, findings):
        return None
    try:
        heard = await hear(endpoint, timeout_s)
    except Refused as exc:
        names = ", ".join(files.current().names) if files is not None else "this process"
        findings.fail(what, str(exc), _mend(exc.word, address, key, section, names))
        return None
    clock(what, heard.ahead_s, heard.took_s / 2, findings)
    return heard


async def certified(
    what: str,
    address: str,
    tls: TlsSettings | None,
    tls_name: str | None,
    key: str,
    section: str,
    timeout_s: float,
    findings: Findings,
) -> bool:
    """Whether it is reached, with TLS where we have that; said where not."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    try:
        if tls is None:
            await reach(host, int(port), timeout_s)
            return True
        shown = await shake(host, int(port), tls, tls_name, timeout_s)
    except Refused as exc:
        findings.fail(what, str(exc), _mend(exc.word, address, key, section, tls_name or host))
        return False
    except OSError as exc:  # our own files, of which `own_files` has told
        findings.fail(what, f"not dialled: {exc}", f"correct {section}.tls first")
        return False
    _ending(what, shown, findings)
    return True


def _ending(what: str, shown: Shown, findings: Findings) -> None:
    if shown.left_s() < SOON_S:
        days = shown.left_s() / 86400
        findings.warn(what, f"its certificate ends in {days:.1f} days", "renew it over there")


def clock(what: str, ahead_s: float | None, within_s: float, findings: Findings) -> None:
    """Say where a clock differs from ours by more than can be the way's doing."""
    if ahead_s is None or abs(ahead_s) - within_s < CLOCK_WARN_S:
        return
    text = f"its clock is {abs(ahead_s):.1f} s {'ahead of' if ahead_s > 0 else 'behind'} this one"
    mend = "let a time daemon (chrony, systemd-timesyncd) set both clocks"
    (findings.fail if abs(ahead_s) > CLOCK_FAIL_S else findings.warn)(what, text, mend)


def _mend(word: str, address: str, key: str, section: str, name: str) -> str:
    theirs = f"that its tls.ca holds the CA of {section}.tls.cert"
    return {
        "address": f"correct the host in {key}, or let DNS know it",
        "refused": f"start what should listen at {address}, or correct {key}",
        "timeout": f"see whether {address} is right, and whether a firewall is between",
        "name": f"issue its certificate for {name}, or set the name it carries as {key} tls_name",
        "authority": f"add the CA of its certificate to {section}.tls.ca",
        "expired": "renew its certificate over there",
        "tls": f"see that both sides have tls settings, and {theirs}",
        "permission": f"add {name} to tls.peers over there",
    }.get(word, f"see the log of what listens at {address}")
