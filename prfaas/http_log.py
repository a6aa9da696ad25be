"""What our HTTP servers log of clients that do it wrong: a line, no traceback, not their bytes."""

from __future__ import annotations

import logging

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

_NAME = "prfaas.http"


class ClientsDoing(logging.Filter):
    """Shortens what aiohttp says of a client that does not speak HTTP, or has left while it was
    answered; the rest passes as it is.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        malformed = isinstance(error, HttpProcessingError) and error.code < 500
        if malformed or isinstance(error, ConnectionError | web.RequestPayloadError):
            # It comes from whoever finds the port, as often as they like: no error of ours.
            record.levelno, record.levelname = logging.INFO, logging.getLevelName(logging.INFO)
            record.msg = f"{record.msg}: {type(error).__name__}"
            record.exc_info = record.exc_text = None
        return True


def server_logger() -> logging.Logger:
    """The logger to give to aiohttp's server."""
    logger = logging.getLogger(_NAME)
    if not logger.filters:
        logger.addFilter(ClientsDoing())
    return logger
