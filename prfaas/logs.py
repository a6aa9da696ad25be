"""The log of a process on stderr: lines for people, or JSON for what collects logs."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Literal

LogFormat = Literal["text", "json"]
TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
REQUESTS = "gateway.request"
"""Its messages are JSON objects already."""


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
    handler.setFormatter(JsonFormatter() if form == "json" else logging.Formatter(TEXT))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
