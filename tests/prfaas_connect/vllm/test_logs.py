"""The connector's lines are seen where vLLM's are, and an operator's own choice is left alone."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from prfaas_connect.vllm.logs import OURS, THEIRS, join_vllm_log


@pytest.fixture
def vllm_log() -> Iterator[io.StringIO]:
    """What vLLM's handler has written; loggers are as they were afterwards."""
    loggers = [logging.getLogger(name) for name in (OURS, THEIRS)]
    before = [(each.handlers[:], each.level) for each in loggers]
    for each in loggers:
        each.handlers, each.level = [], logging.NOTSET
    written = io.StringIO()
    loggers[1].addHandler(logging.StreamHandler(written))
    loggers[1].setLevel(logging.INFO)
    yield written
    for each, (handlers, level) in zip(loggers, before, strict=True):
        each.handlers = handlers
        each.setLevel(level)


def test_our_lines_are_written_once_by_vllm_s_handler(vllm_log: io.StringIO) -> None:
    for _ in range(2):  # a process may hold both halves
        join_vllm_log()
    logging.getLogger(f"{OURS}.vllm.worker_half").info("heads [0, 3) of 3")
    logging.getLogger(f"{OURS}.vllm.worker_half").debug("too much")
    assert vllm_log.getvalue() == "heads [0, 3) of 3\n"


def test_an_operator_s_own_level_stays(vllm_log: io.StringIO) -> None:
    logging.getLogger(OURS).setLevel(logging.ERROR)
    join_vllm_log()
    assert logging.getLogger(OURS).handlers == []


def test_where_vllm_configures_nothing_neither_do_we(vllm_log: io.StringIO) -> None:
    logging.getLogger(THEIRS).handlers = []
    join_vllm_log()
    assert logging.getLogger(OURS).handlers == []
    assert logging.getLogger(OURS).level == logging.NOTSET
