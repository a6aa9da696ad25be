"""Waiting in tests for what other tasks, threads and processes bring about."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable

_POLL_S = 0.002


async def eventually(
    holds: Callable[[], object | Awaitable[object]], *, within_s: float = 5.0
) -> None:
    """Poll until `holds()` is true or passes its assertions; raises TimeoutError or the assertion
    error of the last try.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_s
    while True:
        try:
            result = holds()
            if inspect.isawaitable(result):
                result = await result
            if result or result is None:
                return
        except AssertionError:
            if loop.time() > deadline:
                raise
        if loop.time() > deadline:
            raise TimeoutError(f"{holds} did not hold within {within_s} s")
        await asyncio.sleep(_POLL_S)
