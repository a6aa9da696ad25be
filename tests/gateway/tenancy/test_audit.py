"""The audit log: a line each, rotated by others, and a disk that is full for a while."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.tenancy import audit
from gateway.tenancy.audit import AuditLine, AuditLog


def line(**fields: Any) -> AuditLine:
    return AuditLine(
        **{
            "time": 1.5, "request_id": "r", "trace_id": "t", "tenant": "a", "key_id": "k",
            "api": "chat", "status": "200", "error": "", "limit": "", "engine": "d-0",
            "target": "local", "peers": (), "kv_quality": "exact", "prompt_tokens": 3,
            "completion_tokens": 4, "seconds": 0.5, **fields,
        }
    )  # fmt: skip


def lines_of(path: Path) -> list[Any]:
    return [json.loads(text) for text in path.read_text().splitlines()]


async def test_each_request_is_a_line(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit.log", lambda count: None)
    log.add(line(request_id="r1"))
    log.add(line(request_id="r2", peers=("fra",)))
    log.close()
    first, second = lines_of(tmp_path / "audit.log")
    assert (first["request_id"], second["request_id"], second["peers"]) == ("r1", "r2", ["fra"])


async def test_many_lines_do_not_wait_for_the_timer(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit.log", lambda count: None)
    for _ in range(audit.MAX_LINES):
        log.add(line())
    assert len(lines_of(tmp_path / "audit.log")) == audit.MAX_LINES
    log.close()


async def test_a_log_that_was_moved_away_goes_on_in_a_new_file(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    log = AuditLog(path, lambda count: None)
    log.add(line(request_id="r1"))
    log.flush()
    path.rename(tmp_path / "audit.log.1")
    log.add(line(request_id="r2"))
    log.close()
    assert [each["request_id"] for each in lines_of(path)] == ["r2"]


async def test_lines_are_kept_while_the_file_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lost: list[int] = []
    folder = tmp_path / "logs"
    folder.mkdir()
    log = AuditLog(folder / "audit.log", lost.append)
    folder.rename(tmp_path / "away")
    monkeypatch.setattr(audit, "MAX_HELD", 3)
    for number in range(5):
        log.add(line(request_id=f"r{number}"))
        log.flush()
    assert sum(lost) == 2
    assert caplog.text.count("cannot be written") == 1
    (tmp_path / "away").rename(folder)
    log.close()
    assert [each["request_id"] for each in lines_of(folder / "audit.log")] == ["r2", "r3", "r4"]
    assert sum(lost) == 2


async def test_what_is_lost_at_the_end_is_counted(tmp_path: Path) -> None:
    lost: list[int] = []
    (tmp_path / "logs").mkdir()
    log = AuditLog(tmp_path / "logs" / "audit.log", lost.append)
    (tmp_path / "logs").rename(tmp_path / "away")
    log.add(line())
    log.close()
    assert lost == [1]
