"""KV over a WAN against raw sockets and plain gRPC, on an emulated link with real TCP.

Agents with TLS, integrity and the lossless codec stand at both ends; replayers stand for engines,
but for the last row, which has real ones. Goodput counts wire bytes after the codec.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.harness import Report, Samples, run_interleaved
from bench.record_kv import tape_file
from bench.wan_measure import MIB, Conditions, Measuring
from bench.wan_site import WanSite, baseline
from bench.wan_ttft import add_ttft
from bench.wanlink import TcpSettings, WanLink, available
from prfaas.errors import ConfigError
from prfaas.testing.kv_tape import KvTape

ROUNDS, QUICK_ROUNDS = 5, 1
CONNECTIONS = (1, 4, 8)
SESSION_BYTES = 50 * MIB
FIRST_BYTES = 10 * MIB
CPU_SESSIONS = 4
SEED = 30

STOCK_WMEM = (4096, 16384, 4 << 20)
WARM = Conditions("warm_50MiB_40ms", rate_bits=300e6, rtt_ms=40)
LOSSY = Conditions("loss_0.1", rate_bits=300e6, rtt_ms=40, loss=0.001)
LONG = Conditions("80ms_4MB_buffers", rate_bits=1e9, rtt_ms=80)
CPU = Conditions("cpu", rate_bits=300e6, rtt_ms=40)

Act = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Run:
    """What all parts of one run share."""

    report: Report
    rounds: int
    tape_path: Path
    tape: KvTape


def run(quick: bool) -> None:
    """Run it, print the table, write the file. Raises ConfigError where no link can be made."""
    missing = available()
    if missing is not None:
        raise ConfigError(f"bench wan needs an emulated link: {missing}")
    report = Report("wan", quick=quick)
    path, tape = tape_file(report.say)
    plan = Run(report, QUICK_ROUNDS if quick else ROUNDS, path, tape)
    _goodput(plan, WARM, first=True)
    _goodput(plan, LOSSY)
    _goodput(plan, LONG)
    _cpu(plan)
    asyncio.run(add_ttft(report, quick=quick))
    try:
        _resume(plan)
    finally:
        report.finish()


@contextmanager
def _measuring(plan: Run, conditions: Conditions, *, plain: bool = False) -> Iterator[Measuring]:
    """A link with the baselines and the system at its ends, warmed up."""
    report = plan.report
    settings = TcpSettings(congestion_control="bbr", wmem=STOCK_WMEM)
    with (
        tempfile.TemporaryDirectory(prefix="prfaas-wan-") as name,
        WanLink(
            conditions.rate_bits, conditions.rtt_ms, loss=conditions.loss, tcp_settings=settings
        ) as link,
    ):
        directory = Path(name)
        report.say(f"{conditions}: {link.measure(1.0, (1, 4))}")
        with (
            baseline(link, "raw", directory) as raw,
            baseline(link, "grpc", directory) as grpc,
            baseline(link, "aio", directory) as aio,
            WanSite(link, directory, plan.tape_path, plain=plain) as site,
        ):
            found = Measuring(conditions, link, site, raw, grpc, aio)
            found.warm_up(CONNECTIONS)
            yield found


def _goodput(plan: Run, conditions: Conditions, *, first: bool = False) -> None:
    """Goodput over that of the best raw arrangement, and of the first bytes over plain gRPC."""
    with _measuring(plan, conditions) as at:
        arms: dict[str, Act] = {"ours": partial(at.ours, "ours", SESSION_BYTES)}
        for count in CONNECTIONS:
            arms[f"raw{count}"] = partial(at.raw, f"raw{count}", SESSION_BYTES, count)
        if first:
            arms["first.ours"] = partial(at.ours, "first.ours", FIRST_BYTES, warm=False)
            arms["first.grpc"] = partial(at.plain_grpc, "first.grpc", FIRST_BYTES, fresh=True)
        samples = _interleave(plan, arms)
        best = max((f"raw{n}" for n in CONNECTIONS), key=lambda name: samples[name].median)
        others = [f"raw{n}" for n in CONNECTIONS if f"raw{n}" != best]
        _add_ratio(plan, at, f"goodput_over_raw.{conditions.name}", "ours", best, samples, others)
        if first:
            name = "goodput_over_plain_grpc.first_10MiB"
            _add_ratio(plan, at, name, "first.ours", "first.grpc", samples)


def _cpu(plan: Run) -> None:
    """CPU of both ends for a GB on the wire, no codec and no TLS, over that of plain gRPC."""
    with _measuring(plan, CPU, plain=True) as at:
        plain = partial(at.plain_grpc_cpu, nbytes=SESSION_BYTES, transfers=CPU_SESSIONS)
        arms: dict[str, Act] = {
            "cpu.ours": partial(at.ours_cpu, "cpu.ours", SESSION_BYTES, CPU_SESSIONS),
            "cpu.grpc": partial(plain, "cpu.grpc"),
            "cpu.grpc_threads": partial(plain, "cpu.grpc_threads", threads=True),
        }
        samples = _interleave(plan, arms)
        ours = samples["cpu.ours"]
        for row, arm, kind in (
            ("cpu_per_GB_over_plain_grpc", "cpu.grpc", "on asyncio, as ours is"),
            ("cpu_per_GB_over_threaded_grpc", "cpu.grpc_threads", "with threads"),
        ):
            grpc = samples[arm]
            ratios = zip(ours.values, grpc.values, strict=True)
            by_round = Samples(tuple(a / b for a, b in ratios))
            plan.report.add(
                row,
                ours.median / grpc.median,
                "ratio",
                f"by round {by_round.spread}; ours {ours.median:.2f} s/GB ({ours.spread}): P's "
                f"agent, D's agent and KvPort in the engines {at.cpu_parts()}; plain gRPC {kind} "
                f"{grpc.median:.2f} s/GB ({grpc.spread}); kernel receive path in neither; "
                f"{at.conditions_note()}",
            )


def _resume(plan: Run) -> None:
    """Share of a session's bytes that a cut connection makes P send again."""
    with _measuring(plan, WARM) as at:
        arms: dict[str, Act] = {
            "resume_extra": partial(at.resume_extra, "resume_extra", SESSION_BYTES)
        }
        samples = _interleave(plan, arms)
        found = samples["resume_extra"]
        plan.report.add(
            "resume_extra_bytes",
            found.median,
            "share",
            f"{found.spread}; bytes on the line, {SESSION_BYTES // MIB} MiB, P's busiest "
            f"connection reset when half had crossed, against the same session uncut just before; "
            f"all came whole and right; "
            f"{at.conditions_note()}",
        )


def _interleave(plan: Run, arms: dict[str, Act]) -> dict[str, Samples]:
    def arm(act: Act) -> Callable[[], Awaitable[float]]:
        async def run_it() -> float:
            return act()

        return run_it

    asked = {name: arm(act) for name, act in arms.items()}
    return asyncio.run(run_interleaved(asked, plan.rounds, plan.report.say, seed=SEED))


def _add_ratio(
    plan: Run,
    at: Measuring,
    row: str,
    ours: str,
    baseline_arm: str,
    samples: dict[str, Samples],
    others: list[str] | None = None,
) -> None:
    mine, theirs = samples[ours], samples[baseline_arm]
    by_round = Samples(tuple(a / b for a, b in zip(mine.values, theirs.values, strict=True)))
    rest = "".join(f", {name} {samples[name].median:.1f}" for name in others or [])
    plan.report.add(
        row,
        mine.median / theirs.median,
        "ratio",
        f"by round {by_round.spread}; Mbit/s: ours {mine.median:.1f} ({mine.spread}), "
        f"{baseline_arm} {theirs.median:.1f} ({theirs.spread}){rest}; {at.arm_note(ours)}, "
        f"{at.arm_note(baseline_arm)}; KV: {plan.tape.source}; {at.conditions_note()}",
    )
