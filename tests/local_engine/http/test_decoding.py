from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from local_engine.http.decoding import decode_body
from local_engine.http.schema import ChatRequest, CompletionRequest, TokenizeRequest
from prfaas.errors import InvalidRequest

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)  # JSON has neither
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"nonsense", b'{"model": NaN}', b"\xff\xfe"])
async def test_a_body_that_is_no_json_object_is_a_400(server, body) -> None:
    status, answer, _ = await server.post(CHAT, data=body)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")


async def test_a_body_nested_without_end_is_a_400(server) -> None:
    body = b'{"messages":[],"tools":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    status, answer, _ = await server.post(CHAT, data=body)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")


async def test_a_body_over_the_limit_is_a_413_declared_or_not(serve) -> None:
    async def trickle():
        for _ in range(10):
            yield b"x" * 200

    async with serve(max_body_bytes=1000) as server:
        for data in (b"x" * 2000, trickle()):
            status, answer, headers = await server.post(CHAT, data=data)
            assert (status, answer["error"]["type"]) == (413, "request_too_large")
            assert headers["Connection"] == "close"


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_a_request_or_an_invalid_one(body: bytes) -> None:
    for kind in (ChatRequest, TokenizeRequest):
        try:
            request = decode_body(body, kind)
        except InvalidRequest:
            continue
        assert isinstance(request, kind)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(CompletionRequest.__struct_fields__), json_values)
def test_any_value_of_a_field_is_taken_or_refused_under_its_name(field: str, value: object) -> None:
    body = json.dumps({"prompt": "x", field: value}).encode()
    param: str | None = field
    try:
        decode_body(body, CompletionRequest)
    except InvalidRequest as error:
        param = error.param
    assert param is not None
    assert param.startswith(field)


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"max_tokens": "5"}, "max_tokens", "max_tokens: expected `int | null`, got `str`"),
        ({"messages": [{"role": "x"}]}, "messages[0].role", "invalid enum value 'x'"),
        ({"messages": [{"role": "user", "ttl": 1}]}, "messages[0].ttl", "unrecognized field"),
        ({"stream_options": {"x": 1}}, "stream_options.x", "unrecognized field"),
        ({}, "messages", "missing required field: messages"),
    ],
)
def test_errors_say_where_and_what(body: dict, param: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode_body(json.dumps(body).encode(), ChatRequest)
    assert caught.value.param == param
    assert message in caught.value.message


def test_a_huge_value_is_not_repeated_in_the_error() -> None:
    body = json.dumps({"messages": [{"role": "x" * 100_000}]}).encode()
    with pytest.raises(InvalidRequest) as caught:
        decode_body(body, ChatRequest)
    assert len(caught.value.message) < 1000
