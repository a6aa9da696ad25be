"""A caller that leaves costs a line in the log; what a handler raises keeps its traceback."""

from __future__ import annotations

import logging

import pytest

from prfaas.rpc.server_log import quiet_server_log

GRPC = logging.getLogger("grpc._cython.cygrpc")


def fail(text: str) -> None:
    """As gRPC does it."""
    try:
        raise RuntimeError("a batch failed")
    except RuntimeError:
        GRPC.exception(text)


def test_a_call_that_could_not_be_ended_is_a_line_at_info(caplog: pytest.LogCaptureFixture) -> None:
    quiet_server_log()
    quiet_server_log()
    with caplog.at_level(logging.DEBUG):
        fail("ExecuteBatchError raised in core by servicer method [/s/Data]")
    (record,) = caplog.records
    assert (record.levelno, record.exc_info) == (logging.INFO, None)
    assert record.getMessage() == "the caller has left: [/s/Data]"


def test_an_error_of_a_handler_keeps_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    quiet_server_log()
    fail("Unexpected [RuntimeError] raised by servicer method [/s/Data]")
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.exc_info is not None
