"""Where requests come from: a trace file, or a scenario's generator; as often as they are asked."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from policies.workload.generate import Generator
from policies.workload.request import Request, between, scaled
from policies.workload.rows import RowReader
from policies.workload.traces import open_trace, spread_ticks


class Source:
    """Requests that can be read again and again; nothing to close."""

    def __init__(
        self,
        origin: RowReader | Generator,
        *,
        speed: float = 1.0,
        start_s: float = 0.0,
        end_s: float = float("inf"),
    ) -> None:
        """`start_s`, `end_s`: of the workload's own time, before `speed` compresses it."""
        self._origin = origin
        self._speed, self._start_s, self._end_s = speed, start_s, end_s

    def __iter__(self) -> Iterator[Request]:
        origin = self._origin
        rows = spread_ticks(origin) if isinstance(origin, RowReader) else origin.stream()
        if self._start_s > 0 or self._end_s < float("inf"):
            rows = between(rows, self._start_s, self._end_s)
        return scaled(rows, self._speed) if self._speed != 1.0 else rows

    def note(self) -> str:
        """What the latest pass over a trace left out; empty where nothing was."""
        if isinstance(self._origin, RowReader) and self._origin.counts.skipped:
            return f"{self._origin.path}: {self._origin.counts.to_text()}"
        return ""


def traces_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where traces are: PRFAAS_TRACES, or `traces` in the folder `shared` beside the project."""
    given = environ.get("PRFAAS_TRACES")
    if given:
        return Path(given)
    return Path(__file__).parents[3] / "shared" / "traces"


def open_source(
    path: Path | None,
    kind: str | None,
    generator: Generator,
    *,
    speed: float = 1.0,
    start_s: float = 0.0,
    end_s: float = float("inf"),
) -> Source:
    """The trace at `path`, or the generator where there is none. Raises ConfigError."""
    origin = generator if path is None else open_trace(path, kind)
    return Source(origin, speed=speed, start_s=start_s, end_s=end_s)
