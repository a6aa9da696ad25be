"""The trace formats we read: Mooncake's JSONL, Azure's CSV, and our gateway's request log."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from policies.workload.request import BLOCK_TOKENS, Request
from policies.workload.rows import UNREADABLE, MalformedRow, RowReader, open_text, unreadable
from prfaas.errors import ConfigError

MAX_TOKENS = 1 << 31
"""No prompt or answer is longer than this; a row that says so is malformed."""
MAX_DIGITS = len(str(MAX_TOKENS))
TIMESTAMP = re.compile(r"([^.Zz+]*?)(\.[0-9]{1,12})?([Zz]|[+-][0-9]{2}:?[0-9]{2})?")
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def open_trace(path: Path, kind: str | None = None) -> RowReader:
    """A reader of the trace at `path`; its kind is seen in the first lines unless named.

    Raises ConfigError for an unknown kind or a file that looks like none.
    """
    if kind is None:
        kind = _sniff(path)
    make = TRACE_KINDS.get(kind)
    if make is None:
        raise ConfigError(f"no trace format {kind!r}: there are {', '.join(TRACE_KINDS)}")
    return RowReader(path, make())


def spread_ticks(requests: Iterable[Request], seed: int = 0) -> Iterator[Request]:
    """Requests that share a timestamp, spread at random over the time to the next one.

    For traces whose clock ticks every few seconds, so that ten requests come "at once". The last
    tick is taken to be as long as the one before it.
    """
    rng = random.Random(seed)
    group: list[Request] = []
    tick_s = 0.0
    for request in requests:
        if group and request.arrival_s > group[0].arrival_s:
            tick_s = request.arrival_s - group[0].arrival_s
            yield from _spread(group, tick_s, rng)
            group = []
        group.append(request)
    yield from _spread(group, tick_s, rng)


def _spread(group: list[Request], tick_s: float, rng: random.Random) -> Iterator[Request]:
    if len(group) == 1:
        yield group[0]
        return
    offsets = sorted(rng.random() * tick_s for _ in group)
    for request, offset in zip(group, offsets, strict=True):
        yield replace(request, arrival_s=request.arrival_s + offset)


def _mooncake() -> Callable[[str, int], Request | None]:
    """{"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [512-token blocks]}."""

    def parse(line: str, number: int) -> Request | None:
        row = _json(line)
        if row is None:
            return None
        blocks = row.get("hash_ids", [])
        if not isinstance(blocks, list) or not all(type(b) is int for b in blocks):
            raise MalformedRow("hash_ids is not a list of integers")
        prompt = _count(row, "input_length", 1)
        if blocks and not prompt <= len(blocks) * BLOCK_TOKENS < prompt + BLOCK_TOKENS:
            raise MalformedRow(f"hash_ids are not the {BLOCK_TOKENS}-token blocks of input_length")
        return Request(
            number,
            _seconds(row, "timestamp") / 1e3,
            prompt,
            max(1, _count(row, "output_length", 0)),
            tuple(blocks),
        )

    return parse


def _azure() -> Callable[[str, int], Request | None]:
    """TIMESTAMP,ContextTokens,GeneratedTokens; a header may name them in another order, among
    others."""
    at = {name: position for position, name in enumerate(AZURE_COLUMNS)}

    def parse(line: str, number: int) -> Request | None:
        line = line.strip()
        if not line:
            return None
        cells = [cell.strip() for cell in line.split(",")]
        if "ContextTokens" in cells:
            missing = [name for name in AZURE_COLUMNS if name not in cells]
            if missing:
                raise ConfigError(f"no column {' and no '.join(missing)} among {', '.join(cells)}")
            at.update((name, cells.index(name)) for name in AZURE_COLUMNS)
            return None
        if len(cells) <= max(at.values()):
            raise MalformedRow("fewer columns than there should be")
        counts = []
        for name in AZURE_COLUMNS[1:]:
            cell = cells[at[name]]
            digits = cell.isascii() and cell.isdigit() and len(cell) <= MAX_DIGITS
            if not digits or int(cell) > MAX_TOKENS:
                raise MalformedRow(f"{name} is not a count of tokens")
            counts.append(int(cell))
        if counts[0] == 0:
            raise MalformedRow("ContextTokens is zero")
        when = _timestamp(cells[at["TIMESTAMP"]])
        return Request(number, when, counts[0], max(1, counts[1]))

    return parse


def _request_log() -> Callable[[str, int], Request | None]:
    """One line for each request of our gateway; anything before the JSON object is passed over, and
    so are a JSON log's lines of other things."""

    def parse(line: str, number: int) -> Request | None:
        start = line.find("{")
        if not line.strip() or start < 0:
            return None
        row = _json(line[start:])
        if row is not None and "logger" in row:
            row = row.get("request")
            if row is None:
                return None
        if not isinstance(row, dict) or "request_id" not in row:
            raise MalformedRow("not a request's line")
        facts, snapshot = row.get("facts"), row.get("snapshot")
        if not isinstance(facts, dict):
            raise MalformedRow("facts are missing: the request never got as far as a decision")
        local = snapshot.get("local") if isinstance(snapshot, dict) else None
        prompt = _count(facts, "prompt_tokens", 1)
        cached = _count(local, "matched_tokens", 0) if isinstance(local, dict) else 0
        output = row.get("events") or facts.get("max_tokens") or 1
        if type(output) is not int:
            raise MalformedRow("events is not a number of tokens")
        return Request(
            number,
            _seconds(row, "received"),
            prompt,
            max(1, output),
            cached_tokens=min(cached, prompt),
        )

    return parse


TRACE_KINDS: Mapping[str, Callable[[], Callable[[str, int], Request | None]]] = MappingProxyType(
    {"mooncake": _mooncake, "azure": _azure, "request-log": _request_log}
)


def _sniff(path: Path) -> str:
    try:
        with open_text(path) as lines:
            head = [lines.readline(1 << 16) for _ in range(20)]
    except UNREADABLE as error:
        raise unreadable(path, error) from error
    text = "\n".join(head)
    if not text.strip():
        raise ConfigError(f"{path} has no usable row: it is empty")
    for mark, kind in (
        ("ContextTokens", "azure"),
        ("input_length", "mooncake"),
        ("request_id", "request-log"),
    ):
        if mark in text:
            return kind
    raise ConfigError(
        f"{path} looks like none of {', '.join(TRACE_KINDS)}: no ContextTokens, input_length or "
        "request_id in its first 20 lines"
    )


def _json(line: str) -> dict[str, Any] | None:
    if not line.strip():
        return None
    try:
        row = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        raise MalformedRow("not JSON") from error
    if not isinstance(row, dict):
        raise MalformedRow("not a JSON object")
    return row


def _count(row: Mapping[str, Any], name: str, least: int) -> int:
    value = row.get(name)
    if type(value) is not int or not least <= value <= MAX_TOKENS:
        raise MalformedRow(f"{name} is not a count of tokens of at least {least}")
    return value


def _seconds(row: Mapping[str, Any], name: str) -> float:
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e15:
        raise MalformedRow(f"{name} is not a time")
    return float(value)


def _timestamp(text: str) -> float:
    # Azure's first traces have seven digits of a second, of which fromisoformat reads six; its
    # later ones a time zone.
    found = TIMESTAMP.fullmatch(text)
    if found is None:
        raise MalformedRow("TIMESTAMP is not a time")
    whole, fraction, zone = found.groups()
    try:
        at = datetime.fromisoformat(whole + (zone or "+00:00"))
        return at.timestamp() + float(fraction or 0)
    except (ValueError, OverflowError) as error:
        raise MalformedRow("TIMESTAMP is not a time") from error
