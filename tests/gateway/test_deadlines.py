"""Tasks that run out of time are cancelled, by one timer, and only those."""

import asyncio

import pytest

from gateway.deadlines import Deadlines
from prfaas.testing.virtual_time import run_virtually


async def under(deadlines: Deadlines, seconds: float, name: str, log: list[str]) -> None:
    task = asyncio.current_task()
    assert task is not None
    deadlines.begin(task)
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        if not deadlines.expired(task):
            log.append(f"{name} cancelled")
            raise
        await asyncio.sleep(0)  # it may go on
        log.append(f"{name} late")
    else:
        log.append(f"{name} done")
    finally:
        deadlines.end(task)


def test_only_what_is_late_is_cancelled_in_its_order() -> None:
    deadlines, log = Deadlines(0.05), []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        first = asyncio.create_task(under(deadlines, 5, "a", log))
        await asyncio.sleep(0.02)
        second = asyncio.create_task(under(deadlines, 5, "b", log))
        quick = asyncio.create_task(under(deadlines, 0, "c", log))
        await asyncio.gather(first, second, quick)
        assert loop.time() - started == pytest.approx(0.07)

    run_virtually(main())
    assert log == ["c done", "a late", "b late"]
    assert len(deadlines) == 0
    assert deadlines._running._timer is None


def test_a_task_may_come_under_it_again() -> None:
    deadlines, log = Deadlines(0.02), []

    async def twice() -> None:
        await under(deadlines, 5, "first", log)
        await under(deadlines, 0, "second", log)
        await under(deadlines, 5, "third", log)

    run_virtually(twice())
    assert log == ["first late", "second done", "third late"]


async def test_who_is_cancelled_by_another_stays_cancelled() -> None:
    deadlines, log = Deadlines(0.02), []
    task = asyncio.create_task(under(deadlines, 5, "a", log))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    both = asyncio.create_task(under(deadlines, 5, "b", log))
    await asyncio.sleep(0)
    deadlines._running._until[both] = 0.0
    deadlines._running._sweep(asyncio.get_running_loop())
    both.cancel()
    with pytest.raises(asyncio.CancelledError):
        await both
    assert log == ["a cancelled", "b cancelled"]


async def test_one_timer_for_many_and_none_after_close() -> None:
    deadlines, log = Deadlines(60), []
    tasks = [asyncio.create_task(under(deadlines, 0, str(i), log)) for i in range(3)]
    await asyncio.sleep(0)
    timer = deadlines._running._timer
    assert timer is not None
    await asyncio.gather(*tasks)
    assert deadlines._running._timer is timer
    deadlines.close()
    assert timer.cancelled()
