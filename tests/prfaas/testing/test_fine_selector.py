"""It waits for less than a millisecond, and for files beyond select()'s last number."""

from __future__ import annotations

import fcntl
import os
import resource
import select
import selectors
import socket
import time

import pytest

from prfaas.testing.fine_selector import FineSelector

BEYOND = 1100
"""select() takes file numbers below 1,024."""


def test_a_timeout_is_not_rounded_up_to_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    wait = select.select

    def record(readable: list[int], writable: object, other: object, seconds: float) -> object:
        waited.append(seconds)
        return wait(readable, (), (), seconds)

    monkeypatch.setattr(select, "select", record)
    with FineSelector() as selector:
        waited.clear()
        started = time.perf_counter()
        assert selector.select(1e-4) == []
        assert time.perf_counter() - started >= 1e-4
        assert selector.select(0) == []
    assert waited == [1e-4]


def test_a_file_beyond_the_last_one_of_select_is_seen() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard <= BEYOND:
        pytest.skip("this process may not open so many files")
    ours, theirs = socket.socketpair()
    with FineSelector() as selector, ours, theirs:
        if soft <= BEYOND:
            resource.setrlimit(resource.RLIMIT_NOFILE, (BEYOND + 1, hard))
        high = fcntl.fcntl(ours.fileno(), fcntl.F_DUPFD_CLOEXEC, BEYOND - 1)
        try:
            selector.register(high, selectors.EVENT_READ)
            assert selector.select(0) == []
            theirs.send(b"x")
            assert [key.fd for key, _ in selector.select(10)] == [high]
            assert [key.fd for key, _ in selector.select()] == [high]
            selector.unregister(high)
        finally:
            os.close(high)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
