"""The host check: each weak setting is named with a command that really mends it."""

from __future__ import annotations

import json
import shlex

import pytest

from prfaas import hostcheck
from prfaas.errors import ConfigError
from prfaas.hostcheck import Finding, Level, Link, Report, assess, parse_rate, read_host

LINK = Link(rate_bits_per_s=10e9, rtt_s=0.080, connections=4)

GOOD = {
    "net.ipv4.tcp_congestion_control": "bbr",
    "net.ipv4.tcp_available_congestion_control": "reno cubic bbr",
    "net.ipv4.tcp_allowed_congestion_control": "reno cubic bbr",
    "net.ipv4.tcp_wmem": "4096\t16384\t67108864",
    "net.ipv4.tcp_rmem": "4096\t131072\t67108864",
    "net.ipv4.tcp_mem": "287898 383867 575796",
    "net.ipv4.tcp_slow_start_after_idle": "0",
    "net.ipv4.tcp_mtu_probing": "1",
    "net.ipv4.tcp_window_scaling": "1",
    "net.ipv4.tcp_sack": "1",
    "net.ipv4.tcp_moderate_rcvbuf": "1",
    "net.core.wmem_max": "67108864",
    "net.core.rmem_max": "67108864",
    "net.core.default_qdisc": "fq",
    "kernel.release": "6.8.0-31-generic",
    "page.bytes": "4096",
    "ulimit.nofile": "65536 524288",
}

STOCK = GOOD | {
    "net.ipv4.tcp_congestion_control": "cubic",
    "net.ipv4.tcp_available_congestion_control": "reno cubic",
    "net.ipv4.tcp_allowed_congestion_control": "reno cubic",
    "net.ipv4.tcp_wmem": "4096\t16384\t4194304",
    "net.ipv4.tcp_rmem": "4096\t131072\t6291456",
    "net.ipv4.tcp_slow_start_after_idle": "1",
    "net.ipv4.tcp_mtu_probing": "0",
    "net.core.wmem_max": "212992",
    "net.core.rmem_max": "212992",
    "net.core.default_qdisc": "fq_codel",
    "ulimit.nofile": "1024 524288",
}


def found(readings: dict[str, str], link: Link = LINK) -> dict[str, Finding]:
    return {finding.setting: finding for finding in assess(readings, link)}


def one(setting: str, link: Link = LINK, **changes: str) -> Finding:
    """The finding on a setting of a good host with changes (`__` for the dots in names)."""
    readings = GOOD | {name.replace("__", "."): value for name, value in changes.items()}
    return found(readings, link)[setting]


def mended(readings: dict[str, str], findings: tuple[Finding, ...]) -> dict[str, str]:
    """The readings after every command was run."""
    after = dict(readings)
    for finding in findings:
        for command in finding.command.split("&&"):
            match shlex.split(command):
                case ["sysctl", "-w", assignment]:
                    name, _, value = assignment.partition("=")
                    assert name in readings
                    after[name] = value
                case ["modprobe", "tcp_bbr"]:
                    after["net.ipv4.tcp_available_congestion_control"] += " bbr"
                case ["ulimit", "-n", count]:
                    after["ulimit.nofile"] = f"{count} {count}"
                case []:
                    pass
                case other:
                    raise AssertionError(f"not a command: {other}")
    return after


def test_a_good_host_has_nothing_to_mend() -> None:
    findings = assess(GOOD, LINK)
    assert {finding.level for finding in findings} == {Level.GOOD}
    assert not any(finding.command for finding in findings)
    assert Report(LINK, findings).weak == 0


def test_a_stock_host_is_weak_in_what_costs_bandwidth_and_the_commands_mend_all_of_it() -> None:
    findings = assess(STOCK, LINK)
    weak = {finding.setting for finding in findings if finding.level is Level.WEAK}
    assert weak == {
        "net.ipv4.tcp_congestion_control",
        "net.ipv4.tcp_wmem",
        "net.ipv4.tcp_rmem",
        "net.ipv4.tcp_slow_start_after_idle",
        "net.ipv4.tcp_mtu_probing",
        "ulimit.nofile",
    }
    notes = {finding.setting for finding in findings if finding.level is Level.NOTE}
    assert notes == {"net.core.wmem_max", "net.core.rmem_max", "net.core.default_qdisc"}
    again = assess(mended(STOCK, findings), LINK)
    assert {finding.level for finding in again} == {Level.GOOD}


def test_weak_settings_come_first_and_each_says_why() -> None:
    findings = assess(STOCK, LINK)
    levels = [finding.level for finding in findings]
    assert levels == sorted(levels, key=list(Level).index)
    assert all(finding.why for finding in findings)
    assert all(finding.command for finding in findings if finding.level is not Level.GOOD)


def test_buffers_are_held_to_the_link_and_its_connections() -> None:
    wmem = "net.ipv4.tcp_wmem"
    stock = "4096 16384 4194304"
    assert LINK.in_flight_bytes == 100_000_000
    assert LINK.buffer_bytes == 48 << 20
    short = one(wmem, net__ipv4__tcp_wmem=stock)
    assert short.command == "sysctl -w net.ipv4.tcp_wmem='4096 16384 50331648'"
    metro = Link(rate_bits_per_s=1e9, rtt_s=0.010, connections=4)
    assert one(wmem, metro, net__ipv4__tcp_wmem=stock).level is Level.GOOD
    single = Link(rate_bits_per_s=1e9, rtt_s=0.040, connections=1)
    assert one(wmem, single, net__ipv4__tcp_wmem=stock).level is Level.WEAK
    striped = Link(rate_bits_per_s=1e9, rtt_s=0.040, connections=4)
    assert one(wmem, striped, net__ipv4__tcp_wmem=stock).level is Level.GOOD


def test_the_memory_of_all_connections_is_held_to_the_link() -> None:
    tight = one("net.ipv4.tcp_mem", net__ipv4__tcp_mem="1000 2000 3000")
    assert tight.level is Level.WEAK
    assert tight.command == "sysctl -w net.ipv4.tcp_mem='1000 48829 73243'"
    big_pages = one("net.ipv4.tcp_mem", net__ipv4__tcp_mem="1000 4000 6000", page__bytes="65536")
    assert big_pages.level is Level.GOOD


def test_bbr_that_is_there_for_who_asks_is_a_note_and_one_that_is_not_is_weak() -> None:
    setting = "net.ipv4.tcp_congestion_control"
    asked = one(setting, net__ipv4__tcp_congestion_control="cubic")
    assert asked.level is Level.NOTE
    assert asked.command == f"sysctl -w {setting}=bbr"
    barred = one(
        setting,
        net__ipv4__tcp_congestion_control="cubic",
        net__ipv4__tcp_allowed_congestion_control="reno cubic",
    )
    assert barred.level is Level.WEAK
    assert found(STOCK)[setting].command == f"modprobe tcp_bbr && sysctl -w {setting}=bbr"


def test_slow_start_after_idle_is_weak_only_where_bbr_does_not_rule() -> None:
    setting = "net.ipv4.tcp_slow_start_after_idle"
    assert one(setting, net__ipv4__tcp_slow_start_after_idle="1").level is Level.GOOD
    cubic = {"net__ipv4__tcp_congestion_control": "cubic"}
    assert one(setting, net__ipv4__tcp_slow_start_after_idle="1", **cubic).level is Level.WEAK
    assert one(setting, **cubic).level is Level.GOOD


def test_a_missing_fq_matters_only_to_old_kernels() -> None:
    setting = "net.core.default_qdisc"
    new = one(setting, net__core__default_qdisc="pfifo_fast")
    assert new.level is Level.NOTE
    assert "not needed" in new.why
    old = one(setting, net__core__default_qdisc="pfifo_fast", kernel__release="4.9.337")
    assert old.level is Level.WEAK
    assert old.command == "sysctl -w net.core.default_qdisc=fq"


@pytest.mark.parametrize("name", ["tcp_window_scaling", "tcp_sack", "tcp_moderate_rcvbuf"])
def test_switches_that_are_off_are_weak(name: str) -> None:
    finding = one(f"net.ipv4.{name}", **{f"net__ipv4__{name}": "0"})
    assert (finding.level, finding.command) == (Level.WEAK, f"sysctl -w net.ipv4.{name}=1")


def test_no_limit_on_files_is_good() -> None:
    assert one("ulimit.nofile", ulimit__nofile="unlimited unlimited").level is Level.GOOD


@pytest.mark.parametrize("text", [None, "", "what"])
def test_what_cannot_be_read_is_unknown_and_never_good(text: str | None) -> None:
    """Inside containers some settings of the host do not show."""
    named = {"net.ipv4.tcp_congestion_control", "net.core.default_qdisc"}
    for name in found(GOOD).keys() - (named if text == "what" else set()):
        readings = {key: value for key, value in GOOD.items() if key != name}
        if text is not None:
            readings[name] = text
        assert found(readings)[name].level is Level.UNKNOWN
    assert {finding.level for finding in assess({}, LINK)} == {Level.UNKNOWN}


@pytest.mark.parametrize(
    ("text", "bits"), [("10G", 10e9), ("300M", 3e8), ("1.5Gbit/s", 1.5e9), ("800", 800.0)]
)
def test_rates_have_units(text: str, bits: float) -> None:
    assert parse_rate(text) == bits


@pytest.mark.parametrize("text", ["", "0", "fast", "-1G", "10GB", "1e9", "0G"])
def test_a_rate_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="give bits per second"):
        parse_rate(text)


def test_this_host_can_be_read() -> None:
    readings = read_host()
    assert readings["net.ipv4.tcp_congestion_control"]
    assert len(readings["net.ipv4.tcp_wmem"].split()) == 3
    assert len(readings["ulimit.nofile"].split()) == 2


def test_other_systems_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostcheck.platform, "system", lambda: "Darwin")
    with pytest.raises(ConfigError, match="this is Darwin"):
        read_host()


def test_the_report_says_the_same_to_people_and_programs() -> None:
    report = Report(LINK, assess(STOCK, LINK))
    text, data = report.to_text(), json.loads(json.dumps(report.to_json()))
    assert data["weak"] == report.weak == 6
    assert data["link"]["in_flight_bytes"] == LINK.in_flight_bytes
    assert "6 weak settings." in text
    for finding in data["findings"]:
        assert f"{finding['level']:<8}{finding['setting']} = {finding['present']}\n" in text
        assert finding["command"] in text
