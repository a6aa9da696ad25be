"""What gRPC's server logs of callers that leave: a line, no traceback."""

from __future__ import annotations

import logging

_NAME = "grpc._cython.cygrpc"
_SAYS = "ExecuteBatchError raised in core by servicer method"


class CallersLeaving(logging.Filter):
    """Shortens what gRPC says when it could not end a call because the caller had left.

    gRPC itself leaves it unsaid where it hears of the leaving first; which comes first is chance.
    What a handler raises is logged otherwise, and passes as it is.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info and str(record.msg).startswith(_SAYS):
            record.levelno, record.levelname = logging.INFO, logging.getLevelName(logging.INFO)
            record.msg = f"the caller has left: {record.msg.removeprefix(_SAYS).strip()}"
            record.exc_info = record.exc_text = None
        return True


def quiet_server_log() -> None:
    """Have gRPC's servers in this process log so; more than once is as good as once."""
    logger = logging.getLogger(_NAME)
    if not any(isinstance(each, CallersLeaving) for each in logger.filters):
        logger.addFilter(CallersLeaving())
