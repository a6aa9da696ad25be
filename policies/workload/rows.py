"""Rows of trace files as a stream: opens plain and gzip files, counts and names malformed rows."""

from __future__ import annotations

import gzip
import heapq
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from policies.workload.request import Request
from prfaas.errors import ConfigError

NAMED_LINES = 3
"""Line numbers kept for each kind of problem."""
REORDER_ROWS = 1024
"""A row may come this many rows late and is still put in its place."""
MAX_LINE_CHARS = 16 << 20
GZIP_MAGIC = b"\x1f\x8b"


class MalformedRow(ValueError):
    """A row that cannot be used; its text is the kind of problem that is counted."""


@dataclass(slots=True)
class RowCounts:
    """Rows of one pass over a file. Belongs to the reader that counts."""

    used: int = 0
    malformed: dict[str, int] = field(default_factory=dict)
    lines: dict[str, list[int]] = field(default_factory=dict)
    """First line numbers of each kind."""

    def skip(self, line: int, problem: str) -> None:
        self.malformed[problem] = self.malformed.get(problem, 0) + 1
        named = self.lines.setdefault(problem, [])
        if len(named) < NAMED_LINES:
            named.append(line)

    @property
    def skipped(self) -> int:
        return sum(self.malformed.values())

    def to_text(self) -> str:
        """One line: what was used and what was not, and where."""
        if not self.malformed:
            return f"{self.used} rows"
        kinds = "; ".join(
            f"{count} x {problem} (line{'s' if count > 1 else ''} "
            f"{', '.join(map(str, self.lines[problem]))}"
            f"{', ...' if count > len(self.lines[problem]) else ''})"
            for problem, count in sorted(self.malformed.items(), key=lambda item: -item[1])
        )
        return f"{self.used} rows, {self.skipped} malformed ones left out: {kinds}"


Parse = Callable[[str, int], Request | None]
"""Line and number of the row to a request; None for a header or an empty line."""


class RowReader:
    """Requests of one trace file in order of arrival; each iteration reads the file anew.

    Arrivals are counted from the first one. Nothing to close: a pass closes its file.
    """

    def __init__(self, path: Path, parse: Parse) -> None:
        self.path = path
        self.counts = RowCounts()
        """Of the latest pass, complete when it has ended."""
        self._parse = parse

    def __iter__(self) -> Iterator[Request]:
        self.counts = RowCounts()
        counts = self.counts
        first: float | None = None
        for request in _reordered(self._rows(counts), counts):
            if first is None:
                first = request.arrival_s
            counts.used += 1
            yield _moved(request, first)
        if counts.used == 0:
            raise ConfigError(f"{self.path} has no usable row: {counts.to_text()}")

    def _rows(self, counts: RowCounts) -> Iterator[tuple[int, Request]]:
        try:
            with open_text(self.path) as lines:
                for number, line in enumerate(_bounded(lines), 1):
                    try:
                        if len(line) >= MAX_LINE_CHARS:
                            raise MalformedRow(f"line of more than {MAX_LINE_CHARS} characters")
                        request = self._parse(line, number)
                    except MalformedRow as problem:
                        counts.skip(number, str(problem))
                        continue
                    except ConfigError as error:
                        raise ConfigError(f"{self.path}, line {number}: {error.message}") from error
                    if request is not None:
                        yield number, request
        except UNREADABLE as error:
            raise unreadable(self.path, error) from error


UNREADABLE = (OSError, EOFError, UnicodeDecodeError, zlib.error)
"""What opening or reading a trace raises where the file is no trace, or only half of one."""


def unreadable(path: Path, error: Exception) -> ConfigError:
    """What is wrong with a file, for people."""
    if isinstance(error, UnicodeDecodeError):
        return ConfigError(f"cannot read {path}: it is not text: {error.reason}")
    return ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}")


def open_text(path: Path) -> IO[str]:
    """A text file, plain or gzip whatever its name says; a byte order mark is passed over."""
    with path.open("rb") as start:
        packed = start.read(2) == GZIP_MAGIC
    if packed:
        return gzip.open(path, "rt", encoding="utf-8-sig")
    return path.open(encoding="utf-8-sig")


def _bounded(lines: IO[str]) -> Iterator[str]:
    """Lines of bounded length: a longer one comes cut, and its rest is passed over."""
    while line := lines.readline(MAX_LINE_CHARS):
        yield line
        while len(line) >= MAX_LINE_CHARS and not line.endswith("\n"):
            line = lines.readline(MAX_LINE_CHARS)


def _reordered(rows: Iterable[tuple[int, Request]], counts: RowCounts) -> Iterator[Request]:
    """Rows by arrival, as far as a bounded window allows; what comes later still is malformed."""
    waiting: list[tuple[float, int, Request]] = []
    last = float("-inf")
    for line, request in rows:
        if request.arrival_s < last:
            counts.skip(
                line, f"timestamp more than {REORDER_ROWS} rows out of order, sort the file"
            )
            continue
        heapq.heappush(waiting, (request.arrival_s, line, request))
        if len(waiting) > REORDER_ROWS:
            last, _, found = heapq.heappop(waiting)
            yield found
    while waiting:
        yield heapq.heappop(waiting)[2]


def _moved(request: Request, first_s: float) -> Request:
    return Request(
        request.number,
        request.arrival_s - first_s,
        request.prompt_tokens,
        request.output_tokens,
        request.blocks,
        request.cached_tokens,
    )
