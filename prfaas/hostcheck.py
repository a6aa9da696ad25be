"""Which settings of this host keep KV from filling a WAN, and the commands that mend them."""

from __future__ import annotations

import math
import os
import platform
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType

from prfaas.errors import ConfigError
from prfaas.limits import Limits

Readings = Mapping[str, str]
"""Setting to the text the kernel gives: sysctl names, `kernel.release`, `page.bytes` and
`ulimit.nofile` ("soft hard"). What could not be read is missing."""

_CC = "net.ipv4.tcp_congestion_control"
_AVAILABLE = "net.ipv4.tcp_available_congestion_control"
_ALLOWED = "net.ipv4.tcp_allowed_congestion_control"
_MEM = "net.ipv4.tcp_mem"
_IDLE = "net.ipv4.tcp_slow_start_after_idle"
_MTU = "net.ipv4.tcp_mtu_probing"
_QDISC = "net.core.default_qdisc"
_NOFILE = "ulimit.nofile"
_RELEASE = "kernel.release"
_PAGE = "page.bytes"

_BUFFERS = MappingProxyType({"net.ipv4.tcp_wmem": "send", "net.ipv4.tcp_rmem": "receive"})
_CORE = MappingProxyType({"net.core.wmem_max": "SO_SNDBUF", "net.core.rmem_max": "SO_RCVBUF"})
_SWITCHES = MappingProxyType(
    {
        "net.ipv4.tcp_window_scaling": "without it no connection has more than 64 KiB under way",
        "net.ipv4.tcp_sack": "without it each packet lost of one window costs a round trip",
        "net.ipv4.tcp_moderate_rcvbuf": "without it receive buffers stay at their default size",
    }
)
_SYSCTLS = (_CC, _AVAILABLE, _ALLOWED, _MEM, _IDLE, _MTU, _QDISC, *_BUFFERS, *_CORE, *_SWITCHES)

_BUFFER_FACTOR = 2
"""Buffer for each byte in flight: packets take more room than their payload, and bbr probes with
twice what the path holds. Measured: a 4 MiB send buffer kept 2.9 MB under way."""
_PACED_INSIDE_TCP = (4, 13)
"""Since this kernel TCP paces itself where the queue does not."""
_FILES_BESIDE_REQUESTS = 1024
_FILES_SUGGESTED = 65536


class Level(StrEnum):
    """How a setting stands; only WEAK makes the check fail."""

    WEAK = "weak"
    NOTE = "note"
    UNKNOWN = "unknown"
    GOOD = "good"


@dataclass(frozen=True, slots=True)
class Link:
    """The link a host is to fill, and over how many connections at once."""

    rate_bits_per_s: float
    rtt_s: float
    connections: int

    @property
    def in_flight_bytes(self) -> int:
        """Rate times round trip: what is under way when the link is full."""
        return math.ceil(self.rate_bits_per_s / 8 * self.rtt_s)

    @property
    def buffer_bytes(self) -> int:
        """Buffer that one connection needs at each end, in whole MiB."""
        share = _BUFFER_FACTOR * self.in_flight_bytes / self.connections
        return max(1, math.ceil(share / (1 << 20))) << 20


@dataclass(frozen=True, slots=True)
class Finding:
    """One setting: its present value, why it matters, and the command that mends it, if any."""

    setting: str
    level: Level
    present: str
    why: str
    command: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """What `assess` found for a link, for people and for programs."""

    link: Link
    findings: tuple[Finding, ...]

    @property
    def weak(self) -> int:
        """How many settings are weak."""
        return sum(finding.level is Level.WEAK for finding in self.findings)

    def to_text(self) -> str:
        """Weak settings at length, good ones a line each."""
        link = self.link
        lines = [
            f"{link.rate_bits_per_s / 1e9:g} Gbit/s at {link.rtt_s * 1e3:g} ms keep "
            f"{link.in_flight_bytes / 1e6:,.1f} MB under way; with {link.connections} connections "
            f"each needs buffers of {link.buffer_bytes >> 20} MiB.",
            "",
        ]
        for finding in self.findings:
            lines.append(f"{finding.level:<8}{finding.setting} = {finding.present}")
            if finding.level is not Level.GOOD:
                lines.append(f"        {finding.why}")
            if finding.command:
                lines.append(f"        $ {finding.command}")
        lines += ["", f"{self.weak} weak setting{'' if self.weak == 1 else 's'}."]
        if any("sysctl -w" in finding.command for finding in self.findings):
            lines.append("sysctl -w lasts until the next boot: name = value lines in")
            lines.append("/etc/sysctl.d/90-prfaas.conf last longer.")
        return "\n".join(lines)

    def to_json(self) -> dict[str, object]:
        """The same, with the link and the sizes that follow from it."""
        sizes = {
            "in_flight_bytes": self.link.in_flight_bytes,
            "buffer_bytes": self.link.buffer_bytes,
        }
        findings = [asdict(finding) for finding in self.findings]
        return {"link": asdict(self.link) | sizes, "weak": self.weak, "findings": findings}


def assess(readings: Readings, link: Link) -> tuple[Finding, ...]:
    """A finding for every setting, weak ones first."""
    findings = [_judge(readings, setting, rule, link) for setting, rule in _rules().items()]
    order = list(Level)
    return tuple(sorted(findings, key=lambda finding: order.index(finding.level)))


def read_host() -> Readings:
    """The readings of this host. Raises ConfigError where it is not Linux."""
    if platform.system() != "Linux":
        raise ConfigError(f"check-host reads Linux's settings; this is {platform.system()}")
    import resource

    readings = {
        _RELEASE: platform.release(),
        _PAGE: str(os.sysconf("SC_PAGE_SIZE")),
        _NOFILE: " ".join(
            "unlimited" if each == resource.RLIM_INFINITY else str(each)
            for each in resource.getrlimit(resource.RLIMIT_NOFILE)
        ),
    }
    for name in _SYSCTLS:
        try:
            readings[name] = Path("/proc/sys", *name.split(".")).read_text().strip()
        except OSError:
            continue
    return readings


def parse_rate(text: str) -> float:
    """Bits per second of `10G`, `300M`, `1.5Gbit/s`. Raises ConfigError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMGT]?)(?:bit/s|bps)?", text)
    rate = (
        float(match[1]) * {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}[match[2]] if match else 0
    )
    if rate <= 0:
        raise ConfigError(f"rate {text!r}: give bits per second, like 300M or 10G")
    return rate


_Verdict = tuple[Level, str, str]
_Rule = Callable[[Readings, str, Link], _Verdict]


def _rules() -> Mapping[str, _Rule]:
    return {
        _CC: _congestion,
        **dict.fromkeys(_BUFFERS, _buffer),
        _MEM: _memory,
        _IDLE: _idle,
        _MTU: _mtu,
        **dict.fromkeys(_SWITCHES, _switch),
        **dict.fromkeys(_CORE, _core),
        _QDISC: _qdisc,
        _NOFILE: _nofile,
    }


def _judge(readings: Readings, setting: str, rule: _Rule, link: Link) -> Finding:
    present = " ".join(readings.get(setting, "").split())
    try:
        if not present:
            raise KeyError(setting)
        level, why, command = rule(readings, setting, link)
    except (KeyError, ValueError, IndexError):
        why = "cannot be read here; look at the host outside this container"
        return Finding(setting, Level.UNKNOWN, present or "?", why)
    return Finding(setting, level, present, why, command)


def _congestion(readings: Readings, setting: str, _: Link) -> _Verdict:
    why = (
        "bbr keeps a link full despite loss: at 1 Gbit/s, 40 ms and 0.1% loss 4 to 8 connections "
        "were measured at 2-12% of the link with cubic, at 52-56% with bbr"
    )
    mend = f"sysctl -w {setting}=bbr"
    if _is_bbr(readings[setting]):
        return Level.GOOD, why, ""
    if "bbr" not in readings[_AVAILABLE].split():
        return Level.WEAK, f"{why}; the module is not loaded", f"modprobe tcp_bbr && {mend}"
    if "bbr" in readings[_ALLOWED].split():
        return Level.NOTE, f"{why}; sockets that ask for bbr get it, others do not", mend
    return Level.WEAK, f"{why}; processes may not even ask for it", mend


def _buffer(readings: Readings, setting: str, link: Link) -> _Verdict:
    low, default, most = (int(each) for each in readings[setting].split())
    need = link.buffer_bytes
    why = (
        f"the largest {_BUFFERS[setting]} buffer bounds what one connection has under way; "
        f"this link needs {need} bytes"
    )
    if most >= need:
        return Level.GOOD, why, ""
    return Level.WEAK, why, f"sysctl -w {setting}='{low} {default} {need}'"


def _memory(readings: Readings, setting: str, link: Link) -> _Verdict:
    low, pressure, most = (int(each) for each in readings[setting].split())
    need = math.ceil(_BUFFER_FACTOR * link.in_flight_bytes / int(readings[_PAGE]))
    why = f"beyond {pressure} pages of all TCP buffers none grows any more; this link needs {need}"
    if pressure >= need:
        return Level.GOOD, why, ""
    return Level.WEAK, why, f"sysctl -w {setting}='{low} {need} {max(most, need * 3 // 2)}'"


def _idle(readings: Readings, setting: str, _: Link) -> _Verdict:
    why = (
        "a warm connection that was idle starts slowly again: cubic after 3 s was measured at 53% "
        "of the link, and at 84% with 0"
    )
    if int(readings[setting]) == 0:
        return Level.GOOD, why, ""
    if _is_bbr(readings[_CC]):
        return Level.GOOD, f"{why}; bbr does not heed it", ""
    return Level.WEAK, why, f"sysctl -w {setting}=0"


def _mtu(readings: Readings, setting: str, _: Link) -> _Verdict:
    why = (
        "where a router on the way drops ICMP, full packets vanish and a transfer hangs that small "
        "messages got through; probing finds the size that passes"
    )
    if int(readings[setting]) > 0:
        return Level.GOOD, why, ""
    return Level.WEAK, why, f"sysctl -w {setting}=1"


def _switch(readings: Readings, setting: str, _: Link) -> _Verdict:
    if int(readings[setting]) > 0:
        return Level.GOOD, _SWITCHES[setting], ""
    return Level.WEAK, _SWITCHES[setting], f"sysctl -w {setting}=1"


def _core(readings: Readings, setting: str, link: Link) -> _Verdict:
    why = (
        f"bounds only buffers that a program sets itself with {_CORE[setting]}; gRPC leaves them "
        "to the kernel, other tools on this link may not"
    )
    if int(readings[setting]) >= link.buffer_bytes:
        return Level.GOOD, why, ""
    return Level.NOTE, why, f"sysctl -w {setting}={link.buffer_bytes}"


def _qdisc(readings: Readings, setting: str, _: Link) -> _Verdict:
    mend = f"sysctl -w {setting}=fq"
    release = re.match(r"(\d+)\.(\d+)", readings[_RELEASE])
    if release is None:
        raise ValueError(readings[_RELEASE])
    if readings[setting] == "fq":
        return Level.GOOD, "fq paces bbr", ""
    if (int(release[1]), int(release[2])) >= _PACED_INSIDE_TCP:
        why = (
            "TCP paces bbr itself where the queue is not fq, at a little more CPU; fq is not needed"
        )
        return Level.NOTE, why, mend
    return Level.WEAK, "before Linux 4.13 bbr is paced by fq only, and bursts without it", mend


def _nofile(readings: Readings, setting: str, _: Link) -> _Verdict:
    soft = readings[setting].split()[0]
    need = 2 * Limits().gateway_max_in_flight + _FILES_BESIDE_REQUESTS
    why = (
        f"a full gateway holds two sockets for each request in flight, {need} files in all; under "
        f"systemd set LimitNOFILE={_FILES_SUGGESTED} instead"
    )
    if soft == "unlimited" or int(soft) >= need:
        return Level.GOOD, why, ""
    return Level.WEAK, why, f"ulimit -n {_FILES_SUGGESTED}"


def _is_bbr(name: str) -> bool:
    return name.startswith("bbr")
