"""Who may go to the engines and who waits, in virtual time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from gateway.turns import Turns
from prfaas.errors import Overloaded
from prfaas.testing.virtual_time import run_virtually, virtual_clock


@asynccontextmanager
async def all_over(turns: Turns) -> AsyncIterator[None]:
    yield
    assert (turns.active, turns.waiting) == (0, 0)


@asynccontextmanager
async def turn(turns: Turns, key: float = 0.0) -> AsyncIterator[None]:
    await turns.enter(lambda: key)
    try:
        yield
    finally:
        turns.leave()


async def serve(turns: Turns, name: str, log: list[str], seconds: float = 1.0) -> None:
    try:
        async with turn(turns):
            log.append(name)
            await asyncio.sleep(seconds)
    except Overloaded as exc:
        log.append(f"{name} {exc.phase or 'full'}")


def test_they_go_in_order_and_never_more_than_there_is_room_for() -> None:
    async def main() -> None:
        turns, log, most = Turns(lambda: 2, 100, 60.0), [], 0

        async def one(name: str) -> None:
            nonlocal most
            async with turn(turns):
                most = max(most, turns.active)
                log.append(name)
                await asyncio.sleep(1.0)

        async with all_over(turns):
            await asyncio.gather(*(one(str(n)) for n in range(9)))
        assert log == [str(n) for n in range(9)]
        assert most == 2
        assert turns.refused == 0

    run_virtually(main())


def test_too_many_are_refused_at_once_and_too_late_ones_after_their_wait() -> None:
    async def main() -> None:
        turns, log = Turns(lambda: 1, 2, 5.0), []
        async with all_over(turns):
            started = virtual_clock().now()
            await asyncio.gather(*(serve(turns, str(n), log, 4.0) for n in range(4)))
            assert virtual_clock().now() - started == pytest.approx(8.0)
        assert log == ["0", "3 full", "1", "2 turn"]
        assert turns.refused == 2

    run_virtually(main())


def test_a_refusal_says_when_to_come_back() -> None:
    async def main() -> None:
        turns = Turns(lambda: 0, 1, 5.0)
        task = asyncio.create_task(serve(turns, "first", []))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="1 requests wait already") as caught:
            await turns.enter(lambda: 0.0)
        assert (caught.value.http_status, caught.value.retry_after_s) == (503, 1.0)
        await task

    run_virtually(main())


@pytest.mark.parametrize("late", [False, True])
def test_whoever_leaves_while_waiting_takes_no_turn(late: bool) -> None:
    """Also where the turn has just been given."""

    async def main() -> None:
        turns, log = Turns(lambda: 1, 10, 60.0), []
        async with all_over(turns):
            first = asyncio.create_task(serve(turns, "first", log))
            gone = asyncio.create_task(serve(turns, "gone", log))
            last = asyncio.create_task(serve(turns, "last", log))
            await asyncio.sleep(0.5)
            if late:
                await first
                assert turns.active == 1
            gone.cancel()
            await asyncio.gather(first, last)
            with pytest.raises(asyncio.CancelledError):
                await gone
        assert log[0] == "first"
        assert log[-1] == "last"

    run_virtually(main())


def test_engines_that_come_back_are_used_at_once() -> None:
    async def main() -> None:
        room, log = 1, []
        turns = Turns(lambda: room, 10, 60.0)
        async with all_over(turns):
            tasks = [asyncio.create_task(serve(turns, str(n), log, 30.0)) for n in range(4)]
            await asyncio.sleep(1.0)
            assert log == ["0"]
            room = 3
            turns.look()
            await asyncio.sleep(1.0)
            assert log == ["0", "1", "2"]
            room = 1  # one is lost: who is there stays, nobody comes
            await asyncio.sleep(30.0)
            assert (turns.active, log[-1]) == (1, "3")
            await asyncio.gather(*tasks)

    run_virtually(main())


def test_the_smallest_key_goes_first_and_overtakes_are_counted() -> None:
    async def main() -> None:
        turns, log = Turns(lambda: 1, 100, 60.0), []

        async def one(key: float) -> None:
            async with turn(turns, key):
                log.append(key)
                await asyncio.sleep(1.0)

        async with all_over(turns):
            await asyncio.gather(*(one(key) for key in (5.0, 3.0, 1.0, 3.0, 2.0)))
        assert log == [5.0, 1.0, 2.0, 3.0, 3.0]
        assert turns.overtakes == 2

    run_virtually(main())


def test_who_leaves_while_waiting_holds_nobody_up() -> None:
    async def main() -> None:
        turns, log = Turns(lambda: 1, 100, 60.0), []

        async def one(key: float) -> None:
            async with turn(turns, key):
                log.append(key)
                await asyncio.sleep(1.0)

        async with all_over(turns):
            tasks = [asyncio.create_task(one(key)) for key in (9.0, 1.0, 2.0, 3.0)]
            await asyncio.sleep(0.5)
            tasks[1].cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        assert log == [9.0, 2.0, 3.0]
        assert turns.overtakes == 0

    run_virtually(main())
