"""Interleaved rounds, medians with their spread, one table and one JSON file for each benchmark."""

from __future__ import annotations

import json
import os
import platform
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from prfaas.up.report import percentile

__all__ = ["RESULTS", "Report", "Row", "Samples", "machine", "percentile", "run_interleaved"]

RESULTS = Path(__file__).parent / "results"

Arm = Callable[[], Awaitable[float]]


@dataclass(frozen=True, slots=True)
class Row:
    """One figure as it is written: `note` has spread, rounds, command and machine."""

    name: str
    value: float
    unit: str
    note: str


@dataclass(frozen=True, slots=True)
class Samples:
    """What one arm gave in all rounds, in order."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def spread(self) -> str:
        """Smallest to largest, and how many rounds."""
        low, high = min(self.values), max(self.values)
        rounds = len(self.values)
        return f"{low:.4g} to {high:.4g} in {rounds} round{'s' if rounds > 1 else ''}"


async def run_interleaved(
    arms: Mapping[str, Arm], rounds: int, say: Callable[[str], None], *, seed: int = 0
) -> dict[str, Samples]:
    """Run every arm once in each round, each round in another (seeded) order.

    So what changes slowly on a shared machine hits all arms alike.
    """
    order = list(arms)
    values: dict[str, list[float]] = {name: [] for name in arms}
    rng = random.Random(seed)
    for number in range(1, rounds + 1):
        rng.shuffle(order)
        for name in order:
            started = time.perf_counter()
            value = await arms[name]()
            values[name].append(value)
            took_s = time.perf_counter() - started
            say(f"round {number}/{rounds}  {name:<34} {value:10.4f}   ({took_s:.1f} s)")
    return {name: Samples(tuple(found)) for name, found in values.items()}


def machine() -> str:
    """What this ran on; no host names."""
    model = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    memory_gib = psutil.virtual_memory().total / 2**30
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{model}, {cores} cores, {memory_gib:.0f} GiB, Python {platform.python_version()}"


class Report:
    """Collects the rows of one benchmark, then prints and writes them."""

    def __init__(self, name: str, *, quick: bool = False, command: str = "") -> None:
        self._name = name
        self._quick = quick
        self._command = command or f"make bench NAME={name}" + (" QUICK=1" if quick else "")
        self._rows: list[Row] = []
        self.console = Console(highlight=False)

    def say(self, text: str) -> None:
        """A line of progress."""
        self.console.print(text, markup=False)

    def add(self, name: str, value: float, unit: str, note: str) -> None:
        """A figure; `note`: its spread and what it was measured on or against."""
        marks = ["quick: not for comparison"] if self._quick else []
        full = "; ".join([*marks, note, self._command, machine()])
        self._rows.append(Row(name, float(f"{value:.6g}"), unit, full))

    def finish(self, *, directory: Path = RESULTS) -> Path:
        """Print the table and write NAME.json; its path."""
        table = Table(title=f"bench {self._name}" + (" (quick)" if self._quick else ""))
        table.add_column("row")
        table.add_column("value", justify="right")
        table.add_column("unit")
        for row in self._rows:
            table.add_row(row.name, f"{row.value:.4g}", row.unit)
        self.console.print(table)
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{self._name}.json"
        path.write_text(json.dumps([asdict(row) for row in self._rows], indent=2) + "\n")
        self.say(f"written: {path}")
        return path
