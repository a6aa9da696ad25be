"""What a running stack holds: counts that must be zero when it is idle, and sizes of processes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import astuple, dataclass

import psutil

from prfaas.testing.stack import RunningStack

_AGENT_GAUGES = {
    "d-agent": (
        "prfaas_agent_open_sessions",
        "prfaas_agent_staging_used_bytes",
        "prfaas_agent_staging_waiting",
    ),
    "p-agent": (
        "prfaas_prefill_open_sessions",
        "prfaas_prefill_queued_sessions",
        "prfaas_prefill_retention_used_bytes",
        "prfaas_prefill_ring_records",
    ),
    "gateway": ("prfaas_gateway_in_flight_requests", "prfaas_gateway_fallback_granted_tokens"),
}
_ENGINE_COUNTS = (
    "waiting", "waiting_kv", "running", "exporting", "queue_tokens", "context_tokens",
    "integrity_failures",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ProcessSize:
    """One process as the kernel sees it. `sockets`: TCP connections that are not listening."""

    fds: int
    threads: int
    sockets: int
    rss_bytes: int


def held(stack: RunningStack) -> dict[str, float]:
    """Everything that is not zero and has to be, once nothing runs; processes must be up.

    Runs both engines' pool checks on the way. Raises AssertionError for one that finds something.
    """
    found: dict[str, float] = {}
    for name, url in (("d", stack.stack.d_engine_url), ("p", stack.stack.p_engine_url)):
        counts = stack.integrity(url)
        assert counts["ok"], f"{name}-engine: {counts['problem']}"
        found |= {f"{name}-engine {key}": counts[key] for key in _ENGINE_COUNTS}
        owned = counts["total_blocks"] - counts["free_blocks"]
        found[f"{name}-engine owned blocks"] = owned
        found[f"{name}-engine owned states"] = counts["total_states"] - counts["free_states"]
    for name, gauges in _AGENT_GAUGES.items():
        metrics = stack.metrics(name)
        found |= {gauge: metrics[gauge] for gauge in gauges}
    cluster = stack.get(f"{stack.stack.gateway_url}/prfaas/cluster")
    found["gateway unshown requests"] = cluster["unshown_requests"]
    for remote in cluster["remotes"]:
        found[f"in flight to {remote['peer']}"] = remote["link"]["in_flight_bytes"]
    return {name: value for name, value in found.items() if value}


def wait_nothing_held(stack: RunningStack, timeout_s: float = 10.0) -> None:
    """Until `held` is empty. Raises AssertionError that names what is not back at zero."""
    deadline = time.monotonic() + timeout_s
    while True:
        left = held(stack)
        if not left:
            return
        if time.monotonic() > deadline:
            raise AssertionError(f"still held after {timeout_s:g} s: {left}")
        time.sleep(0.05)


def sizes(stack: RunningStack) -> dict[str, ProcessSize]:
    """Every process that runs, by name."""
    found: dict[str, ProcessSize] = {}
    for name, pid in stack.pids.items():
        process = psutil.Process(pid)
        with process.oneshot():
            connections = process.net_connections("tcp")
            found[name] = ProcessSize(
                fds=process.num_fds(),
                threads=process.num_threads(),
                sockets=sum(c.status != psutil.CONN_LISTEN for c in connections),
                rss_bytes=process.memory_info().rss,
            )
    return found


def most(*measured: Mapping[str, ProcessSize]) -> dict[str, ProcessSize]:
    """Of each process the largest of each size; of those that are in every one of `measured`."""
    common = set.intersection(*map(set, measured))

    def largest(name: str) -> ProcessSize:
        return ProcessSize(*map(max, zip(*(astuple(seen[name]) for seen in measured), strict=True)))

    return {name: largest(name) for name in common}


def growth(
    before: Mapping[str, ProcessSize],
    after: Mapping[str, ProcessSize],
    *,
    spare_fds: int = 4,
    spare_bytes: int = 32 << 20,
) -> list[str]:
    """What each process has more of than before, beyond what caches and pools may take."""
    found: list[str] = []
    for name, then in before.items():
        now = after.get(name)
        if now is None:
            continue
        for what, more, spare in (
            ("descriptors", now.fds - then.fds, spare_fds),
            ("threads", now.threads - then.threads, spare_fds),
            ("sockets", now.sockets - then.sockets, spare_fds),
            ("bytes", now.rss_bytes - then.rss_bytes, spare_bytes),
        ):
            if more > spare:
                found.append(f"{name}: {more} more {what} ({then} before, {now} after)")
    return found
