"""CPU time of a process's descendants, from what the scheduler counts for each thread."""

from __future__ import annotations

from pathlib import Path

import psutil


def descendants_cpu_s(pid: int) -> float:
    """CPU seconds so far of all threads that live now in the descendants of `pid`.

    Differences are exact as long as no thread has ended in between; servers' threads do not.
    """
    return sum(_cpu_s(child.pid) for child in psutil.Process(pid).children(recursive=True))


def process_cpu_s(pid: int) -> float:
    """The same of `pid` alone."""
    return _cpu_s(pid)


def _cpu_s(pid: int) -> float:
    total_ns = 0
    for task in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        try:
            total_ns += int(task.read_text().split()[0])
        except (FileNotFoundError, ProcessLookupError):  # the thread ended while we look
            continue
    return total_ns / 1e9
