"""`make soak ARGS="--minutes N"`: mixed load and random faults on the tiny model; nothing may show.

Every completed answer is compared with what D's engine alone says. Between rounds, and at the end,
everything is whole and idle for a moment: then all counts must be back at zero and no process may
have grown. Exit status 0: requests and faults there were, and no wrong token, leak or hang.
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import click
import torch

from local_engine.testing_gap import top_two_gap
from prfaas.settings import load_settings
from prfaas.testing.footprint import ProcessSize, growth, sizes, wait_nothing_held
from prfaas.testing.link import LinkShape
from prfaas.testing.soak_faults import Faults
from prfaas.testing.soak_load import Load, Tally, make_cases
from prfaas.testing.stack import RunningStack, running_stack
from prfaas.testing.tinymodel import make_tiny_model
from prfaas.tokens import Tokenizer

ROUND_S = 60.0
RECOVERY_S = 30.0
"""From the last fault until everything is whole, connected and idle."""
GROWTH_BYTES = 64 << 20
"""What a process may grow after its first round: records, caches and the allocator's slack."""
LINK = LinkShape(30e6, 0.02)
LIMITS = {
    "connect_timeout_s": 1.5,
    "first_frame_timeout_s": 4.0,
    "progress_timeout_s": 2.0,
    "control_timeout_s": 2.0,
    "staging_timeout_s": 2.0,
    "lease_s": 5.0,
    "drain_timeout_s": 6.0,
    "slow_client_timeout_s": 10.0,
}
ENGINE = {
    "chunk_tokens": 64,
    "kv_memory_bytes": 24 << 20,
    "max_context": 4096,
    "max_batch": 8,
    "kv_dtype": "float32",
}
PROCESSES = ("gateway", "d-engine", "d-agent", "p-engine", "p-agent")


@dataclass(slots=True)
class Findings:
    """What checkpoints and the end of processes brought to light."""

    leaks: list[str] = field(default_factory=list)
    hangs: list[str] = field(default_factory=list)
    crashes: list[str] = field(default_factory=list)
    rss: list[dict[str, ProcessSize]] = field(default_factory=list)
    transfers: dict[str, int] = field(default_factory=dict)
    """By how they ended, as the gateway counted them."""


class Checkpoint:
    """Load and faults held back, everything whole again: what is held, and who has grown?"""

    def __init__(self, stack: RunningStack, load: Load, faults: Faults, findings: Findings) -> None:
        self._stack = stack
        self._load = load
        self._faults = faults
        self._findings = findings
        self._first: dict[int, ProcessSize] = {}
        """Size of each process at its first checkpoint but the first of all, by pid."""

    def run(self) -> None:
        found = self._findings
        with self._faults.quiet:
            self._load.pause()
            try:
                self._stack.wait_link_ready(RECOVERY_S)
            except AssertionError as exc:
                found.hangs.append(f"not whole again after {RECOVERY_S:g} s: {exc}")
            try:
                wait_nothing_held(self._stack, RECOVERY_S)
            except AssertionError as exc:
                found.leaks.append(str(exc))
            now, pids = sizes(self._stack), self._stack.pids
            if found.rss:
                self._compare(now, pids)
            found.rss.append(now)
            self._load.resume()

    def _compare(self, now: dict[str, ProcessSize], pids: dict[str, int]) -> None:
        before = {name: self._first.setdefault(pids[name], size) for name, size in now.items()}
        grown = growth(before, now, spare_fds=12, spare_bytes=GROWTH_BYTES)
        self._findings.leaks.extend(grown)


def soak(directory: Path, minutes: float, seed: int, workers: int) -> bool:
    """Run it; True where nothing was found. The stack's logs stay in `directory`."""
    torch.set_num_threads(1)
    model = make_tiny_model(directory / "model")
    decode = Tokenizer.load(model).decode
    with running_stack(
        directory / "stack",
        model,
        base=load_settings(overrides={"limits": LIMITS}),
        gateway={"policy": {"name": "always_remote"}, "short_body_bytes": 0},
        agent={"verify_import": True, "staging_bytes": 8 << 20},
        prefill={"retention_bytes": 12 << 20},
        d_engine={**ENGINE, "block_tokens": 64},
        p_engine={**ENGINE, "block_tokens": 16},
        link=LINK,
    ) as stack:
        click.echo(f"seed {seed}, {workers} clients, {minutes:g} minutes; logs: {directory}/stack")
        cases = make_cases(stack, seed, 80)
        tally = Tally(top_two_gap(model), lambda ids: decode(ids))
        load = Load(stack, cases, tally, seed=seed, workers=workers)
        faults = Faults(stack, LINK, seed=seed)
        findings = Findings()
        checkpoint = Checkpoint(stack, load, faults, findings)
        load.start()
        faults.start()
        ends_at = time.monotonic() + minutes * 60
        try:
            while (left := ends_at - time.monotonic()) > 0 and not faults.failure:
                time.sleep(min(ROUND_S, left))
                checkpoint.run()
                progress(tally, faults, findings)
        finally:
            faults.stop()
            load.stop()
        end_of(stack, findings)
    return verdict(tally, faults, findings)


def end_of(stack: RunningStack, findings: Findings) -> None:
    """What became of the transfers, and what the logs tell of errors that nobody saw."""
    prefix = "prfaas_gateway_outcomes_total"
    for sample, value in stack.metrics("gateway").items():
        if sample.startswith(prefix):
            findings.transfers[sample.removeprefix(prefix)] = int(value)
    for name in PROCESSES:
        log = stack.log(name)
        findings.leaks += [line for line in log.splitlines() if "integrity check:" in line]
        crashes = log.count("Traceback (most recent call last)")
        if crashes:
            findings.crashes.append(f"{name}: {crashes} tracebacks in its log")
        if "digest_mismatch" in log or "read back other bytes" in log:
            findings.crashes.append(f"{name}: an import read back other bytes than were staged")


def progress(tally: Tally, faults: Faults, findings: Findings) -> None:
    """One line for each round."""
    megabytes = {n: s.rss_bytes >> 20 for n, s in findings.rss[-1].items() if n in PROCESSES}
    click.echo(
        f"{tally.requests.total()} requests, {faults.counts.total()} faults, "
        f"{len(tally.wrong)} wrong, {len(findings.leaks)} leaks, "
        f"{len(tally.hangs) + len(findings.hangs)} hangs; MB {megabytes}"
    )


def verdict(tally: Tally, faults: Faults, findings: Findings) -> bool:
    """Print everything; whether it is as it must be."""
    hangs = [*tally.hangs, *findings.hangs]
    crashes = [*findings.crashes, *([f"faults: {faults.failure}"] if faults.failure else [])]
    wrong = list(tally.wrong)
    near = len(tally.comparison.near_ties)
    try:
        tally.comparison.verdict()
    except AssertionError as exc:
        wrong.append(str(exc)[:500])
    for title, counts in (
        ("requests", tally.requests),
        ("transfers", findings.transfers),
        ("faults", faults.counts),
    ):
        click.echo(f"{title}: {sum(counts.values())}")
        for name, count in sorted(counts.items()):
            click.echo(f"  {name:<24}{count:>7}")
    click.echo(f"tokens compared: {tally.comparison.positions}, near ties: {near}")
    for title, found in (
        ("wrong tokens", wrong),
        ("leaks", findings.leaks),
        ("hangs", hangs),
        ("internal errors", crashes),
    ):
        click.echo(f"{title}: {len(found)}")
        for line in found[:20]:
            click.echo(f"  {line}")
    there_was_something = bool(tally.requests.total() and faults.counts.total())
    return there_was_something and not (wrong or findings.leaks or hangs or crashes)


@click.command()
@click.option("--minutes", default=5.0, help="How long, apart from start and end.")
@click.option("--seed", default=0, help="Of prompts, clients and faults.")
@click.option("--workers", default=6, help="Clients at once.")
@click.option("--keep", type=click.Path(path_type=Path), help="Directory for logs; default: new.")
def main(minutes: float, seed: int, workers: int, keep: Path | None) -> None:
    """Break a small system at random for some minutes; see that nothing shows."""
    directory = keep or Path(tempfile.mkdtemp(prefix="prfaas-soak-"))
    directory.mkdir(mode=0o700, exist_ok=True)
    sys.exit(0 if soak(directory, minutes, seed, workers) else 1)


if __name__ == "__main__":
    main()
