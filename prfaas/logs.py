"""The log of a process on stderr: lines for people, or JSON for what collects logs."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Literal

LogFormat = Literal["text", "json"]
TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_SHOWN = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if code != ord("\t")}
"""What others wrote may hold line ends and escape codes: on a terminal they would be obeyed."""
REQUESTS = "gateway.request"
"""Its messages are JSON objects already."""


class TextFormatter(logging.Formatter):
    """One line for people, whatever is in it; the lines of an exception follow it."""

    def __init__(self) -> None:
        super().__init__(TEXT)

    def formatMessage(self, record: logging.LogRecord) -> str:
        return super().formatMessage(record).translate(_SHOWN)


class JsonFormatter(logging.Formatter):
    """One object a line, in ASCII: `time` (UTC), `level`, `logger`, `message` or `request`, and
    `exception`.
    """

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": at, "level": record.levelname, "logger": record.name}
        if record.name == REQUESTS:
            return f'{json.dumps(line)[:-1]},"request":{record.getMessage()}}}'
        line["message"] = record.getMessage()
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def start_logging(form: LogFormat) -> None:
    """Before anything is said."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
