"""Trace readers: streams in order, malformed rows counted and named, errors that say why."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import msgspec
import pytest

from policies.workload.request import Request, between, scaled
from policies.workload.traces import open_trace, spread_ticks
from prfaas.errors import ConfigError

MOONCAKE = [
    {"timestamp": 27000, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]},
    {"timestamp": 30000, "input_length": 512, "output_length": 0, "hash_ids": [0]},
]
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
"""


def mooncake(path: Path, lines: list[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in lines))
    return path


def test_mooncake_rows_become_requests_from_time_zero(tmp_path: Path) -> None:
    reader = open_trace(mooncake(tmp_path / "t.jsonl", MOONCAKE))
    assert list(reader) == [
        Request(1, 0.0, 600, 5, (0, 1)),
        Request(2, 3.0, 512, 1, (0,)),
    ]
    assert reader.counts.to_text() == "2 rows"
    assert list(reader) == list(reader)  # each pass reads anew


def test_azure_rows_have_seven_digits_of_a_second(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(AZURE.replace("\n", "\r\n").encode())
    first, second = open_trace(path)
    assert (first.prompt_tokens, first.output_tokens, first.blocks) == (4808, 10, ())
    assert second.arrival_s == pytest.approx(0.052, abs=1e-6)


def test_the_gateways_own_log_is_a_trace(tmp_path: Path) -> None:
    from prfaas.snapshot import RequestFacts
    from prfaas.testing.contracts import busy_snapshot, with_local

    rows = []
    for number in range(2):
        snapshot = with_local(busy_snapshot(), matched_tokens=100)
        rows.append(
            b"2026-01-01 INFO gateway.requests: "
            + msgspec.json.encode(
                {
                    "request_id": f"r{number}",
                    "received": 1e9 + number,
                    "events": 7,
                    "facts": RequestFacts("r", 900, max_tokens=50),
                    "snapshot": snapshot,
                }
            )
        )
    path = tmp_path / "log"
    path.write_bytes(b"\n".join([*rows, b"started", b'{"request_id": "x", "facts": null}']))
    reader = open_trace(path)
    wanted = [
        Request(1, 0.0, 900, 7, cached_tokens=100),
        Request(2, 1.0, 900, 7, cached_tokens=100),
    ]
    assert list(reader) == wanted
    assert reader.counts.skipped == 1
    bare = [row[row.index(b"{") :] for row in rows]
    in_json = [b'{"logger":"gateway.request","request":%b}' % row for row in bare]
    other = b'{"logger": "gateway.app", "message": "started"}'
    broken = b'{"logger": "gateway.request", "request": 5}'
    path.write_bytes(b"\n".join([*in_json, other, broken]))
    reader = open_trace(path)
    assert list(reader) == wanted
    assert reader.counts.skipped == 1


@pytest.mark.parametrize("name", ["a.csv.gz", "a.csv", "a"])
@pytest.mark.parametrize("packed", [True, False])
def test_gzip_is_told_by_what_it_holds(tmp_path: Path, name: str, packed: bool) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(AZURE.encode()) if packed else AZURE.encode())
    assert len(list(open_trace(path))) == 2


@pytest.mark.parametrize("text", [AZURE, "\n".join(json.dumps(row) for row in MOONCAKE)])
def test_a_byte_order_mark_costs_no_row(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t"
    path.write_text(text, encoding="utf-8-sig")
    reader = open_trace(path)
    assert len(list(reader)) == 2
    assert not reader.counts.skipped


def test_columns_are_found_by_the_names_in_the_header(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(
        "id,GeneratedTokens,TIMESTAMP,ContextTokens\n"
        "7,10,2024-05-10 00:00:00.009930+00:00,4808\n"
        "8,12,2024-05-10 02:00:01.009930+02:00,480\n"
    )
    first, second = open_trace(path)
    assert (first.prompt_tokens, first.output_tokens) == (4808, 10)
    assert second.arrival_s == pytest.approx(1.0)
    path.write_text("when,ContextTokens\n2024-05-10 00:00:00,5\n")
    with pytest.raises(ConfigError) as caught:
        list(open_trace(path))
    assert caught.value.message == (
        f"{path}, line 1: no column TIMESTAMP and no GeneratedTokens among when, ContextTokens"
    )


def test_malformed_rows_are_counted_and_named(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    good = json.dumps(MOONCAKE[0])
    bad = [
        "{",
        "[]",
        json.dumps({**MOONCAKE[0], "input_length": -5}),
        json.dumps({**MOONCAKE[0], "input_length": True}),
        json.dumps({**MOONCAKE[0], "hash_ids": [0]}),
        json.dumps({**MOONCAKE[0], "hash_ids": ["a", "b"]}),
        json.dumps({**MOONCAKE[0], "timestamp": "now"}),
        '{"timestamp": 1e999}',
    ]
    path.write_text("\n".join([good, *bad, "", good]) + "\n")
    reader = open_trace(path)
    assert len(list(reader)) == 2
    assert reader.counts.skipped == len(bad)
    text = reader.counts.to_text()
    assert "2 rows, 8 malformed ones left out" in text
    assert "2 x input_length is not a count of tokens of at least 1 (lines 4, 5)" in text
    assert "2 x not JSON (lines 2, 9)" in text


@pytest.mark.parametrize(
    ("cells", "problem"),
    [
        ("2023-11-16 18:17:03,1", "fewer columns than there should be"),
        ("2023-11-16 18:17:03,x,1", "ContextTokens is not a count"),
        ("2023-11-16 18:17:03,0,1", "ContextTokens is zero"),
        ("2023-11-16 18:17:03,1,-1", "GeneratedTokens is not a count"),
        ("yesterday,1,1", "TIMESTAMP is not a time"),
        ("2023-11-16 18:17:03.x,1,1", "TIMESTAMP is not a time"),
        ("2023-11-16 18:17:03.1e999,1,1", "TIMESTAMP is not a time"),
        (f"2023-11-16 18:17:03,{'9' * 5000},1", "ContextTokens is not a count"),
    ],
)
def test_a_bad_cell_is_named(tmp_path: Path, cells: str, problem: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(AZURE + cells + "\n")
    reader = open_trace(path)
    assert len(list(reader)) == 2
    assert problem in reader.counts.to_text()


def test_a_trace_without_usable_rows_is_an_error_that_says_why(tmp_path: Path) -> None:
    path = mooncake(tmp_path / "t.jsonl", [{"input_length": 0}, {"input_length": 0}])
    with pytest.raises(ConfigError) as caught:
        list(open_trace(path))
    assert "has no usable row" in caught.value.message
    assert "2 x input_length is not a count of tokens" in caught.value.message


def test_rows_a_little_out_of_order_are_put_in_order_and_late_ones_named(tmp_path: Path) -> None:
    def rows(order: list[int]) -> list[object]:
        return [{**MOONCAKE[0], "timestamp": at} for at in order]

    mixed = open_trace(mooncake(tmp_path / "a.jsonl", rows([2000, 1000, 3000])))
    assert [r.arrival_s for r in mixed] == [0.0, 1.0, 2.0]
    late = open_trace(mooncake(tmp_path / "b.jsonl", rows([*range(10, 3000), 0])))
    assert len(list(late)) == 2990
    assert "rows out of order, sort the file (line 2991)" in late.counts.to_text()


def test_files_that_are_no_traces_are_errors(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("hello\n")
    with pytest.raises(ConfigError, match="looks like none of mooncake, azure, request-log"):
        open_trace(path)
    with pytest.raises(ConfigError, match="no trace format 'csv'"):
        open_trace(path, "csv")
    with pytest.raises(ConfigError, match=r"cannot read .*none: No such file or directory"):
        open_trace(tmp_path / "none")
    path.write_text("\n\n")
    with pytest.raises(ConfigError, match="it is empty"):
        open_trace(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="it is not text"):
        open_trace(path)
    broken = tmp_path / "t.jsonl.gz"
    broken.write_bytes(gzip.compress(b"x" * 100)[:20])
    with pytest.raises(ConfigError, match="cannot read"):
        open_trace(broken)


def test_reading_takes_no_memory_for_what_was_read(tmp_path: Path) -> None:
    import tracemalloc

    path = tmp_path / "t.jsonl"
    with path.open("w") as out:
        for at in range(20_000):
            out.write(json.dumps({**MOONCAKE[0], "timestamp": at}) + "\n")
    reader = open_trace(path)
    tracemalloc.start()
    count = sum(1 for _ in reader)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 20_000
    assert peak < 2_000_000


def test_ticks_are_spread_within_themselves_the_same_way_each_time() -> None:
    ticks = [Request(n, 3.0 * (n // 10), 10, 1) for n in range(40)]
    spread = list(spread_ticks(ticks, seed=1))
    assert spread == list(spread_ticks(ticks, seed=1))
    assert spread != list(spread_ticks(ticks, seed=2))
    assert [r.number for r in spread] == [r.number for r in ticks]
    times = [r.arrival_s for r in spread]
    assert times == sorted(times)
    assert all(int(t // 3) == n // 10 for n, t in enumerate(times))
    assert len(set(times)) == 40


def test_scaling_and_cutting_keep_the_rest() -> None:
    ticks = [Request(n, float(n), 10, 1) for n in range(10)]
    assert [r.arrival_s for r in scaled(ticks, 2.0)] == [n / 2 for n in range(10)]
    assert [r.number for r in between(ticks, 3, 5)] == [3, 4]
