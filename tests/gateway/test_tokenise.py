"""From bodies to token ids and chains, and the prompts that are not plain text."""

import json
import threading
from collections.abc import Iterator

import pytest

from gateway.prompt_memory import PIECE_CHARS
from gateway.schema import Api, ParsedRequest, parse
from gateway.tokenise import BYTES_PER_TOKEN, INLINE_BYTES, Tokeniser
from prfaas.errors import ContextTooLong, InvalidRequest
from prfaas.hashing import block_chain
from prfaas.testing.gateway_setup import ByteTokenizer

SIZES = frozenset({16})


@pytest.fixture
def tokeniser() -> Iterator[Tokeniser]:
    made = Tokeniser(ByteTokenizer(), 20_000)
    yield made
    made.close()


def parsed(api: Api = Api.COMPLETIONS, **fields: object) -> ParsedRequest:
    return parse(api, json.dumps(fields).encode())


def chat(content: object) -> ParsedRequest:
    return parsed(Api.CHAT, messages=[{"role": "user", "content": content}])


async def test_text_is_tokenised_and_hashed_less_its_last_token(tokeniser: Tokeniser) -> None:
    prompt = await tokeniser.prompt(parsed(prompt="a" * 33), frozenset({16, 8}), "salt")
    assert prompt.tokens == 33
    assert prompt.tokenised
    assert prompt.chains == {
        16: block_chain([97] * 32, 16, "salt"),
        8: block_chain([97] * 32, 8, "salt"),
    }
    exact = await tokeniser.prompt(parsed(prompt="a" * 32), SIZES, "")
    assert len(exact.chains[16]) == 1  # 31 tokens have one whole block


async def test_two_salts_share_no_block(tokeniser: Tokeniser) -> None:
    """Case 7."""
    one = await tokeniser.prompt(parsed(prompt="a" * 33), SIZES, "one")
    two = await tokeniser.prompt(parsed(prompt="a" * 33), SIZES, "two")
    assert not set(one.chains[16]) & set(two.chains[16])


async def test_a_chat_is_templated_first(tokeniser: Tokeniser) -> None:
    prompt = await tokeniser.prompt(chat("abc"), SIZES, "")
    assert prompt.tokens == 3


@pytest.mark.parametrize("shape", [[1, 2, 3], [[1, 2, 3]]])
async def test_token_arrays_are_taken_as_they_are(shape: list[object]) -> None:
    tokeniser = Tokeniser(None, 100)
    try:
        prompt = await tokeniser.prompt(parsed(prompt=shape), SIZES, "")
        assert (prompt.tokens, prompt.tokenised) == (3, True)
    finally:
        tokeniser.close()


@pytest.mark.parametrize("token", [-1, 1 << 32, 1.0, True, None, "a"])
async def test_what_cannot_be_a_token_id_is_refused(tokeniser: Tokeniser, token: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await tokeniser.prompt(parsed(prompt=[1, token]), SIZES, "")
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("request_", "feature"),
    [
        (parsed(prompt=["a", "b"]), "batch"),
        (parsed(prompt=[[1], [2]]), "batch"),
        (parsed(prompt=None, prompt_embeds="AA"), "prompt_embeds"),
        (chat([{"type": "image_url", "image_url": {"url": "x"}}]), "multimodal"),
        (chat(["text"]), "multimodal"),
    ],
)
async def test_other_prompts_are_features_with_a_guessed_length(
    tokeniser: Tokeniser, request_: ParsedRequest, feature: str
) -> None:
    prompt = await tokeniser.prompt(request_, SIZES, "")
    assert prompt.features == {feature}
    assert not prompt.tokenised
    assert prompt.tokens == request_.body_bytes // BYTES_PER_TOKEN


async def test_text_parts_are_text(tokeniser: Tokeniser) -> None:
    prompt = await tokeniser.prompt(chat([{"type": "text", "text": "hi"}]), SIZES, "")
    assert prompt.tokenised


@pytest.mark.parametrize("messages", [None, "hi", [1], {"role": "user"}])
async def test_messages_of_the_wrong_type_are_refused_by_name(
    tokeniser: Tokeniser, messages: object
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await tokeniser.prompt(parsed(Api.CHAT, messages=messages), SIZES, "")
    assert caught.value.param == "messages"


async def test_a_chat_the_template_refuses_is_the_engines_to_judge() -> None:
    class Strict(ByteTokenizer):
        def render_chat(self, messages, tools=None):
            raise InvalidRequest("roles must alternate")

    tokeniser = Tokeniser(Strict(), 100)
    try:
        prompt = await tokeniser.prompt(chat("hi"), SIZES, "")
        assert prompt.features == {"template"}
    finally:
        tokeniser.close()


async def test_without_a_tokenizer_text_is_guessed() -> None:
    tokeniser = Tokeniser(None, 100)
    try:
        for request_ in (parsed(prompt="hello"), chat("hi")):
            prompt = await tokeniser.prompt(request_, SIZES, "")
            assert not prompt.tokenised
            assert not prompt.features
    finally:
        tokeniser.close()


async def test_a_prompt_over_the_limit_is_refused_with_both_numbers(tokeniser: Tokeniser) -> None:
    with pytest.raises(ContextTooLong, match="20001 tokens, more than the 20000"):
        await tokeniser.prompt(parsed(prompt="a" * 20_001), SIZES, "")


async def test_long_prompts_leave_the_event_loop() -> None:
    threads: list[threading.Thread] = []

    class Noting(ByteTokenizer):
        def encode(self, text: str, add_special: bool = False) -> list[int]:
            threads.append(threading.current_thread())
            return super().encode(text)

    tokeniser = Tokeniser(Noting(), 100_000)
    threads.clear()
    try:
        await tokeniser.prompt(parsed(prompt="a" * 10), SIZES, "")
        await tokeniser.prompt(parsed(prompt="a" * (INLINE_BYTES + 1)), SIZES, "")
    finally:
        tokeniser.close()
    assert threads[0] is threading.main_thread()
    assert threads[1] is not threading.main_thread()


async def test_add_special_tokens_is_as_the_client_asks() -> None:
    asked: list[bool] = []

    class Noting(ByteTokenizer):
        def encode(self, text: str, add_special: bool = False) -> list[int]:
            asked.append(add_special)
            return super().encode(text)

    tokeniser = Tokeniser(Noting(), 100)
    asked.clear()
    try:
        await tokeniser.prompt(parsed(prompt="a"), SIZES, "")
        await tokeniser.prompt(parsed(prompt="a", add_special_tokens=False), SIZES, "")
    finally:
        tokeniser.close()
    assert asked == [True, False]


@pytest.mark.parametrize("api", [Api.CHAT, Api.COMPLETIONS])
async def test_what_a_prompt_shares_with_an_earlier_one_is_not_tokenised_again(api: Api) -> None:
    encoded: list[str] = []

    class Noting(ByteTokenizer):
        def encode(self, text: str, add_special: bool = False) -> list[int]:
            encoded.append(text)
            return super().encode(text)

    tokeniser = Tokeniser(Noting(), 100_000)
    story = "once upon a time there was " * 1000
    try:
        for end in ("the end", "another end"):
            encoded.clear()
            text = story + end
            asked = chat(text) if api is Api.CHAT else parsed(prompt=text)
            prompt = await tokeniser.prompt(asked, SIZES, "salt")
            ids = list(text.encode())
            assert prompt.tokens == len(ids)
            assert prompt.chains == {16: block_chain(ids[:-1], 16, "salt")}
        assert sum(map(len, encoded)) < 2 * PIECE_CHARS
        with pytest.raises(ContextTooLong, match="108000 tokens"):
            await tokeniser.prompt(parsed(prompt=story * 4), SIZES, "")
    finally:
        tokeniser.close()


async def test_a_text_that_cannot_be_tokenised_is_refused_only_where_it_is_no_chat() -> None:
    class Refusing(ByteTokenizer):
        def encode(self, text: str, add_special: bool = False) -> list[int]:
            if text:
                raise InvalidRequest("text has a lone surrogate")
            return []

    tokeniser = Tokeniser(Refusing(), 100_000)
    try:
        for size in (10, 2 * INLINE_BYTES, 3 * INLINE_BYTES):
            prompt = await tokeniser.prompt(chat("a " * size), SIZES, "")
            assert prompt.features == {"template"}
            with pytest.raises(InvalidRequest):
                await tokeniser.prompt(parsed(prompt="a " * size), SIZES, "")
    finally:
        tokeniser.close()
