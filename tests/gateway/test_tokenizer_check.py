"""The gateway's tokenizer is held against the engine's, at start and now and then."""

import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from gateway.schema import Api, parse
from gateway.tokenise import Tokeniser
from gateway.tokenizer_check import SAMPLE, TokenizerCheck
from gateway.upstream import HttpUpstream
from prfaas.limits import Limits
from prfaas.testing.gateway_setup import MODEL, ByteTokenizer, until
from prfaas.testing.scripted_engine import scripted_engine


def request(**fields: object):
    body = {"model": MODEL, "prompt": "some text", **fields}
    return parse(Api.COMPLETIONS, json.dumps(body).encode())


@asynccontextmanager
async def check_against(
    tokenize: Callable[[str], list[int]] | None = None,
    tokenizer: ByteTokenizer | None = None,
    every: int = 3,
    path: str = "",
) -> AsyncIterator[TokenizerCheck]:
    async with scripted_engine(MODEL, tokenize) as engine:
        upstream = HttpUpstream(engine.url + path, "d-0", Limits())
        tokeniser = Tokeniser(tokenizer or ByteTokenizer(), 1000)
        check = TokenizerCheck(tokeniser, lambda: upstream, every, Limits())
        try:
            yield check
        finally:
            await check.close()
            await upstream.close()
            tokeniser.close()


async def compared(check: TokenizerCheck) -> float:
    await until(lambda: check._task is not None and check._task.done(), "the comparison")
    assert check.difference is not None
    return check.difference


async def test_equal_tokenizers_differ_in_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with check_against() as check:
        assert check.difference is None
        check.start(MODEL)
        assert await compared(check) == 0.0
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


async def test_a_difference_is_measured_and_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    async with check_against(lambda text: list(text.encode())[:-1]) as check:
        check.start(MODEL)
        assert await compared(check) == pytest.approx(1 / len(SAMPLE.encode()))
        check.start(MODEL)
        await compared(check)
    warnings = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "differs from the engine's in 1 of" in warnings[0]


async def test_every_so_many_requests_are_compared() -> None:
    async with check_against(every=3) as check:
        for expected in (False, False, True):
            check.saw(request())
            assert (check._task is not None) is expected
        assert await compared(check) == 0.0


async def test_never_but_at_start_when_so_configured() -> None:
    async with check_against(every=0) as check:
        for _ in range(10):
            check.saw(request())
        assert check._task is None


async def test_chats_are_compared_through_the_template() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    body = json.dumps({"model": MODEL, "messages": messages}).encode()
    async with check_against(every=1) as check:
        check.saw(parse(Api.CHAT, body))
        assert await compared(check) == 0.0


@pytest.mark.parametrize("fields", [{"prompt": [1, 2]}, {"tools": []}])
async def test_what_cannot_be_compared_is_left_alone(fields: dict[str, object]) -> None:
    async with check_against(every=1) as check:
        check.saw(request(**fields))
        assert check._task is None


async def test_an_engine_without_tokenize_is_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    async with check_against(path="/elsewhere") as check:
        with caplog.at_level(logging.INFO):
            check.start(MODEL)
            await until(lambda: check._task.done(), "the comparison")
        assert check.difference is None
    assert "cannot be compared: /tokenize answers 404" in caplog.text
