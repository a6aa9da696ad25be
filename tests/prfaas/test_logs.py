"""Logs as JSON: each line an object, whatever is said."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from gateway.records import RecordBook
from gateway.request_log import LOGGER, RequestLog
from prfaas.clock import SYSTEM_CLOCK
from prfaas.logs import REQUESTS, JsonFormatter, TextFormatter
from prfaas.settings import load_settings


@pytest.fixture
def stream() -> Iterator[StringIO]:
    """What the root's handler writes as JSON."""
    text = StringIO()
    handler = logging.StreamHandler(text)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    before = LOGGER.level
    root.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    yield text
    LOGGER.setLevel(before)
    root.removeHandler(handler)


def lines(stream: StringIO) -> list[Any]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_each_line_is_an_object_whatever_is_said(stream: StringIO) -> None:
    logger = logging.getLogger("some.part")
    logger.warning('it said "%s"\n%s', "no\x00", "\u00fc\u2028")
    try:
        raise ValueError("odd")
    except ValueError:
        logger.exception("failed")
    said, failed = lines(stream)
    assert said["message"] == 'it said "no\x00"\n\u00fc\u2028'
    assert (said["level"], said["logger"]) == ("WARNING", "some.part")
    assert said["time"].endswith("+00:00")
    assert "ValueError: odd" in failed["exception"]


def test_a_line_for_people_stays_one_whatever_is_said() -> None:
    said = 'it said "a\r\n2026 ERROR b: \x1b[2J\x9b1m\tc \u00fc"'
    record = logging.makeLogRecord({"msg": "%s", "args": (said,), "levelname": "INFO", "name": "x"})
    try:
        raise ValueError("odd")
    except ValueError:
        record.exc_info = sys.exc_info()
    first, *rest = TextFormatter().format(record).split("\n")
    assert first.endswith(r'INFO x: it said "a\x0d\x0a2026 ERROR b: \x1b[2J\x9b1m' + '\tc \u00fc"')
    assert rest[0].startswith("Traceback")


async def test_lines_of_requests_are_written_for_people_too(stream: StringIO) -> None:
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is stream:
            handler.setFormatter(TextFormatter())
    log, book = RequestLog(), RecordBook(10, SYSTEM_CLOCK)
    for number in range(2):
        log.add(book.open(f"r{number}", "chat", "t", "k"))
    log.close()
    found = [line for line in stream.getvalue().splitlines() if REQUESTS in line]
    heads, bodies = zip(*(line.split(f"INFO {REQUESTS}: ", 1) for line in found), strict=True)
    assert [json.loads(body)["request_id"] for body in bodies] == ["r0", "r1"]
    assert all(len(head) == len("2026-01-01 00:00:00,000 ") for head in heads)


def test_what_cannot_be_written_as_utf_8_is_written_all_the_same() -> None:
    record = logging.makeLogRecord({"msg": "a header of \udc80", "name": "x"})
    assert json.loads(JsonFormatter().format(record))["message"] == "a header of \udc80"


async def test_requests_are_objects_within(stream: StringIO) -> None:
    assert LOGGER.name == REQUESTS
    log, book = RequestLog(), RecordBook(10, SYSTEM_CLOCK)
    for number in range(3):
        record = book.open(f'r"{number}', "chat", "t", "k")
        record.status = "200"
        log.add(record)
    log.close()
    found = [line for line in lines(stream) if line["logger"] == REQUESTS]
    assert [line["request"]["request_id"] for line in found] == ['r"0', 'r"1', 'r"2']
    assert {line["request"]["status"] for line in found} == {"200"}
    assert all("message" not in line for line in found)


def test_a_process_logs_as_its_configuration_says(tmp_path: Path) -> None:
    assert load_settings().log_format == "text"
    config = tmp_path / "config.yaml"
    config.write_text("config_version: 1\nlog_format: json\n")
    script = (
        "import sys, logging; from prfaas.logs import start_logging; "
        "from prfaas.settings import load_settings; from pathlib import Path; "
        "start_logging(load_settings(Path(sys.argv[1])).log_format); "
        "logging.getLogger('x').info('hello')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(config)], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stderr)["message"] == "hello"
