"""Bodies: what is acted on is checked by name, everything else passes byte for byte."""

import json

import pytest

from gateway.schema import Api, parse, rewrite
from prfaas.errors import InvalidRequest


def completions(**fields: object):
    return parse(Api.COMPLETIONS, json.dumps({"prompt": "hi", **fields}).encode())


def chat(**fields: object):
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    return parse(Api.CHAT, json.dumps(body).encode())


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b'{"prompt": "x",}', b'{"prompt": tru}', b'{"prompt": "x"} x', b"\xff\xfe", b"nul"],
)
def test_what_is_not_json_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="not valid JSON"):
        parse(Api.COMPLETIONS, body)


@pytest.mark.parametrize("body", [b"[]", b"1", b'"x"', b"null"])
def test_what_is_not_an_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="must be a JSON object"):
        parse(Api.CHAT, body)


def test_nesting_without_end_is_refused_not_a_crash() -> None:
    body = b'{"prompt":' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    with pytest.raises(InvalidRequest, match="not valid JSON"):
        parse(Api.COMPLETIONS, body)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", 7),
        ("stream", "yes"),
        ("max_tokens", "5"),
        ("max_tokens", 1.5),
        ("cache_salt", ["a"]),
        ("kv_transfer_params", "x"),
        ("echo", 1),
        ("n", "2"),
        ("best_of", []),
        ("prompt_logprobs", "1"),
        ("use_beam_search", 0),
    ],
)
def test_a_wrong_type_names_its_field(name: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        completions(**{name: value})
    assert caught.value.param == name
    assert name in caught.value.message


def test_the_prompt_is_required_by_name() -> None:
    for api, name in ((Api.CHAT, "messages"), (Api.COMPLETIONS, "prompt")):
        with pytest.raises(InvalidRequest) as caught:
            parse(api, b"{}")
        assert caught.value.param == name


def test_null_is_as_good_as_absent() -> None:
    parsed = completions(
        model=None, stream=None, max_tokens=None, cache_salt=None, kv_transfer_params=None, n=None
    )
    assert parsed.model is None
    assert not parsed.stream
    assert parsed.cache_salt == ""
    assert parsed.transfer is None
    assert not parsed.features


def test_the_newer_name_of_max_tokens_wins_in_chats() -> None:
    assert chat(max_tokens=3, max_completion_tokens=5).max_tokens == 5
    assert chat(max_tokens=3).max_tokens == 3
    assert completions(max_tokens=3, max_completion_tokens=5).max_tokens == 3


@pytest.mark.parametrize(
    ("fields", "feature"),
    [
        ({"echo": True}, "echo"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"n": 2}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"use_beam_search": True}, "beam_search"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
    ],
)
def test_what_forbids_offload_is_seen(fields: dict[str, object], feature: str) -> None:
    assert completions(**fields).features == {feature}


def test_ordinary_values_forbid_nothing() -> None:
    fields = {"echo": False, "n": 1, "best_of": 1, "prompt_embeds": None, "logprobs": 1}
    assert not completions(**fields).features


def test_values_not_acted_on_pass_byte_for_byte() -> None:
    body = (
        b'{ "prompt" : "a\\u00e9\\n", "temperature":1.50, "x_new": {"a" : [1,2 ] },\n'
        b'"big":123456789012345678901234567890,"kv_transfer_params":{"remote_host":"evil"}}'
    )
    assert rewrite(parse(Api.COMPLETIONS, body), None, None) == (
        b'{"prompt":"a\\u00e9\\n","temperature":1.50,"x_new":{"a" : [1,2 ] },'
        b'"big":123456789012345678901234567890}'
    )


def test_transfer_fields_of_the_client_never_survive_next_to_ours() -> None:
    """Case 4, also where the field comes twice."""
    body = b'{"prompt":"x","kv_transfer_params":{"a":1},"kv_transfer_params":{"b":2}}'
    sent = json.loads(rewrite(parse(Api.COMPLETIONS, body), {"ours": 1}, None))
    assert sent["kv_transfer_params"] == {"ours": 1}
    assert rewrite(parse(Api.COMPLETIONS, body), None, None) == b'{"prompt":"x"}'


def test_the_salt_replaces_the_clients() -> None:
    parsed = completions(cache_salt="mine")
    assert parsed.cache_salt == "mine"
    assert json.loads(rewrite(parsed, None, "hashed"))["cache_salt"] == "hashed"
    assert json.loads(rewrite(parsed, None, None))["cache_salt"] == "mine"


def test_paths() -> None:
    assert Api.CHAT.path == "/v1/chat/completions"
    assert Api.COMPLETIONS.path == "/v1/completions"


@pytest.mark.parametrize(
    "messages",
    [
        '[{"role": "user", "content": "\u00e9t\\u00e9 \\ud83d\\ude42"}]', "[]", "null",
        '"x"', "{}",
        '[{"content": "\\ud800"}]', "[1e999]", '[{"a": 1' + "0" * 40 + "}]",
    ],
)  # fmt: skip
@pytest.mark.parametrize("more", ["", ', "tools": [{"type": "function"}], "n": 1', ', "n": 2'])
def test_a_chat_read_as_a_whole_says_the_same(messages: str, more: str) -> None:
    body = f'{{"model": "m", "max_tokens": 7, "messages": {messages}{more}}}'.encode()

    def said(whole: bool) -> list[object]:
        try:
            parsed = parse(Api.CHAT, body, whole)
        except InvalidRequest as exc:
            return [str(exc)]
        found: list[object] = [parsed.model, parsed.max_tokens, parsed.features]
        for name in ("messages", "tools", "messages", "absent"):
            try:
                found.append(parsed.decode(name, list))
            except InvalidRequest as exc:
                found.append(str(exc))
        return [*found, bytes(parsed.fields["messages"])]

    assert said(whole=True) == said(whole=False)


def test_a_chat_without_messages_is_refused_however_it_is_read() -> None:
    for whole in (False, True):
        with pytest.raises(InvalidRequest, match="messages: this field is required"):
            parse(Api.CHAT, b'{"model": "m"}', whole)
