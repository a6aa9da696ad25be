"""Metrics follow the names of the project and are served where the settings say."""

from __future__ import annotations

import re
import socket
import urllib.request

import pytest
from prometheus_client import generate_latest

from prfaas.errors import ConfigError
from remote_prefill.metrics import AgentMetrics, PrefillMetrics, metrics_server


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def test_every_name_has_its_agents_prefix_and_help() -> None:
    for metrics, prefix in (
        (PrefillMetrics(), "prfaas_prefill_"),
        (AgentMetrics(), "prfaas_agent_"),
    ):
        text = generate_latest(metrics.registry).decode()
        names = re.findall(r"^# HELP (\S+) (.+)$", text, re.M)
        assert len(names) >= 4
        assert all(name.startswith(prefix) and help_ for name, help_ in names)


def test_two_agents_in_one_process_count_apart() -> None:
    one, other = PrefillMetrics(), PrefillMetrics()
    one.raw_bytes.inc(5)
    assert other.raw_bytes._value.get() == 0


def test_gauges_are_read_when_asked() -> None:
    metrics, sessions = PrefillMetrics(), [0]
    metrics.gauges(
        sessions=lambda: sessions[0],
        queued=lambda: 1,
        retention_used=lambda: 2,
        ring_records=lambda: 3,
        engine_connected=lambda: 1,
    )
    sessions[0] = 4
    assert b"prfaas_prefill_open_sessions 4.0" in generate_latest(metrics.registry)


def test_they_are_served_and_the_port_is_free_again() -> None:
    metrics, port = PrefillMetrics(), free_port()
    for _ in range(2):
        with metrics_server("127.0.0.1", port, metrics.registry):
            url = f"http://127.0.0.1:{port}/metrics"
            with urllib.request.urlopen(url, timeout=5) as reply:
                assert b"prfaas_prefill_raw_bytes_total" in reply.read()
    with metrics_server("127.0.0.1", 0, metrics.registry) as served:
        assert served == 0


def test_a_port_that_is_taken_is_a_config_error() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(ConfigError, match="metrics_port"),
        metrics_server("127.0.0.1", taken.getsockname()[1], PrefillMetrics().registry),
    ):
        pass
