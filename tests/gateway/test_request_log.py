"""The lines of many requests at once are those that `logging` would write one by one."""

import asyncio
import io
import json
import logging
from collections.abc import Iterator

import pytest

from gateway import request_log
from gateway.records import RequestRecord
from gateway.request_log import LATE_S, LOGGER, MAX_LINES, RequestLog
from prfaas.snapshot import UNKNOWN_CURVE, EngineLoad, LocalEngine, Snapshot

FORMAT = "%(levelname)s %(name)s: %(message)s"


def record(name: str, snapshot: Snapshot | None = None) -> RequestRecord:
    made = RequestRecord(name, "chat", "t", "k", 0.0, 0.0)
    made.snapshot = snapshot
    return made


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """What a plain handler of this logger writes."""
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.setFormatter(logging.Formatter(FORMAT))
    LOGGER.addHandler(handler)
    level = LOGGER.level
    LOGGER.setLevel(logging.INFO)
    yield text
    LOGGER.setLevel(level)
    LOGGER.removeHandler(handler)


async def test_lines_are_as_logging_writes_them(stream: io.StringIO) -> None:
    log = RequestLog()
    for name in ("a", "%s b"):
        log.add(record(name))
    assert stream.getvalue() == ""
    await asyncio.sleep(3 * LATE_S)
    lines = stream.getvalue().splitlines()
    start = "INFO gateway.request: "
    assert all(line.startswith(start + "{") for line in lines)
    found = [json.loads(line.removeprefix(start)) for line in lines]
    assert [each["request_id"] for each in found] == ["a", "%s b"]


async def test_close_writes_what_waits_and_full_ones_do_not_wait(stream: io.StringIO) -> None:
    log = RequestLog()
    for at in range(MAX_LINES):
        log.add(record(str(at)))
    assert stream.getvalue().count("\n") == MAX_LINES
    log.add(record("last"))
    log.close()
    assert stream.getvalue().count("\n") == MAX_LINES + 1
    assert log._timer is None


async def test_other_handlers_get_a_record_each(
    stream: io.StringIO, caplog: pytest.LogCaptureFixture
) -> None:
    log = RequestLog()
    with caplog.at_level(logging.INFO, LOGGER.name):
        log.add(record("a"))
        log.add(record("b"))
        log.close()
    assert [json.loads(r.message)["request_id"] for r in caplog.records] == ["a", "b"]


async def test_nothing_is_kept_where_the_level_is_off(stream: io.StringIO) -> None:
    LOGGER.setLevel(logging.WARNING)
    log = RequestLog()
    log.add(record("a"))
    log.close()
    assert stream.getvalue() == ""


async def test_a_closed_stream_is_reported_as_logging_does(
    stream: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[logging.LogRecord] = []
    monkeypatch.setattr(
        logging.StreamHandler, "handleError", lambda handler, record: told.append(record)
    )
    log = RequestLog()
    log.add(record("a"))
    stream.close()
    log.close()
    assert len(told) == 1


async def test_the_same_snapshot_is_written_alike_each_time(stream: io.StringIO) -> None:
    log = RequestLog()

    def snapshot(tokens: int) -> Snapshot:
        load = EngineLoad(sent_tokens=tokens)
        return Snapshot(LocalEngine("d", load, UNKNOWN_CURVE, 0), (), 0, 2.0)

    one = snapshot(1)
    for each in (one, one, snapshot(2)):
        log.add(record("r", each))
    for tokens in range(request_log.MAX_SNAPSHOTS):
        log.add(record("many", snapshot(tokens)))
    log.close()
    found = [json.loads(line.split(": ", 1)[1]) for line in stream.getvalue().splitlines()]
    tokens = [each["snapshot"]["local"]["load"]["sent_tokens"] for each in found]
    assert tokens == [1, 1, 2, *range(request_log.MAX_SNAPSHOTS)]
    assert len(log._snapshots) <= request_log.MAX_SNAPSHOTS
