"""Bodies that no client library would send: refused by name, or as they came at the engine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from prfaas.testing.gateway_setup import MODEL

LONG = b'"user":"' + b"u" * 300 + b'"'
"""Makes a body long enough to be looked into."""
INNER = b'"prompt":"hi"'


def body(*fields: bytes) -> bytes:
    return b'{"model":"%b",%b}' % (MODEL.encode(), b",".join([*fields, LONG]))


def chat(messages: bytes) -> bytes:
    return body(b'"messages":' + messages)


def said(content: bytes) -> bytes:
    return chat(b'[{"role":"user","content":%b}]' % content)


REFUSED: dict[str, tuple[bytes, str | None]] = {
    "no JSON": (b"{", None),
    "nothing": (b"", None),
    "blanks": (b" \n ", None),
    "null": (b"null", None),
    "text": (b'"x"', None),
    "byte order mark": (b"\xef\xbb\xbf" + body(INNER), None),
    "UTF-16": (body(INNER).decode().encode("utf-16"), None),
    "more behind it": (body(INNER) + b"x", None),
    "two of them": (body(INNER) * 2, None),
    "no number": (body(INNER, b'"temperature":NaN'), None),
    "infinite": (body(INNER, b'"temperature":-Infinity'), None),
    "beyond numbers": (body(INNER, b'"max_tokens":1e400'), "max_tokens"),
    "no integer": (body(INNER, b'"max_tokens":4.5'), "max_tokens"),
    "no integer but true": (body(INNER, b'"max_tokens":true'), "max_tokens"),
    "half a surrogate": (body(b'"prompt":"\\ud800"'), None),
    "half a surrogate in a salt": (body(INNER, b'"cache_salt":"\\udfff"'), None),
    "surrogate as bytes": (body(b'"prompt":"\xed\xa0\x80"'), "prompt"),
    "prompt of other bytes": (body(b'"prompt":"\xff"'), "prompt"),
    "name of other bytes": (body(INNER, b'"\xff":1'), None),
    "control character": (body(b'"prompt":"a\x01"'), None),
    "deep prompt": (body(b'"prompt":' + b"[" * 500 + b"]" * 500), "prompt"),
    "deep without end": (body(b'"prompt":' + b"[" * 100_000), None),
    "deep where nobody looks": (body(INNER, b'"x":' + b'{"a":' * 100_000), None),
    "prompt of objects": (body(b'"prompt":{}'), "prompt"),
    "ids below zero": (body(b'"prompt":[-1]'), "prompt"),
    "ids beyond 32 bits": (body(b'"prompt":[4294967296]'), "prompt"),
    "ids of 30 digits": (body(b'"prompt":[' + b"9" * 30 + b"]"), "prompt"),
    "mixed ids": (body(b'"prompt":[1,"a"]'), "prompt"),
    "messages in one text": (chat(b'"hi"'), "messages"),
    "messages in an object": (chat(b"{}"), "messages"),
    "messages that are none": (chat(b"[null]"), "messages"),
    "messages in messages": (chat(b"[[]]"), "messages"),
    "too many messages": (chat(b"[%b]" % b",".join([b"{}"] * 300_000)), "messages"),
    "salt that is no text": (body(INNER, b'"cache_salt":5'), "cache_salt"),
    "stream that is no truth": (body(INNER, b'"stream":1'), "stream"),
    "tools that are no list": (body(b'"messages":[],"tools":5'), "tools"),
}

TAKEN: dict[str, bytes] = {
    "blanks around it": b" \r\n\t" + body(INNER) + b"\n\t ",
    "a name twice, the last one right": b'{"model":"other",' + body(INNER)[1:],
    "names beyond count": body(INNER, *(b'"k%d":1' % at for at in range(20_000))),
    "huge max_tokens": body(INNER, b'"max_tokens":' + b"9" * 400),
    "huge n": body(INNER, b'"n":' + b"9" * 30),
    "a pair of surrogates": body(b'"prompt":"\\ud83d\\ude00"'),
    "zero escaped": body(b'"prompt":"a\\u0000b"'),
    "no messages": chat(b"[]"),
    "unknown role": chat(b'[{"role":"wizard","content":"hi"}]'),
    "role that is no text": chat(b'[{"role":5,"content":"hi"}]'),
    "no role": chat(b'[{"content":"hi"}]'),
    "no content": chat(b'[{"role":"user"}]'),
    "content null": said(b"null"),
    "content that is none": said(b"5"),
    "content in parts": said(b'[{"type":"text","text":"hi"},{"type":"image_url","image_url":{}}]'),
    "parts that are none": said(b'[5,"a",{"type":"text","text":5},{"type":[]}]'),
    "deep content": said(b"[" * 300 + b"]" * 300),
    "empty prompt": body(b'"prompt":""'),
    "no ids": body(b'"prompt":[]'),
    "several prompts": body(b'"prompt":["a","b"]'),
}


def api(data: bytes) -> str:
    return "chat" if b'"messages"' in data else "completions"


async def test_what_is_wrong_is_refused_by_name(cluster: Any) -> None:
    for name, (data, param) in REFUSED.items():
        status, answer, _ = await cluster.post(data, api(data))
        assert status == 400, name
        assert answer["error"]["param"] == param, name
        assert len(answer["error"]["message"]) < 500, name
    assert not cluster.engine.seen


async def test_what_we_do_not_act_on_reaches_the_engine_as_it_came(cluster: Any) -> None:
    for name, data in TAKEN.items():
        status, answer, _ = await cluster.post(data, api(data))
        assert status == 200, (name, answer)
        assert cluster.engine.seen[-1].raw_body == data, name


@pytest.mark.parametrize(
    "fields",
    [
        b'"kv_transfer_params":{"a":1},"kv_transfer_params":{"b":2}',
        b'"kv_\\u0074ransfer_params":{"address":"evil"}',
        b'"kv_transfer_params":null',
    ],
)
async def test_transfer_fields_are_taken_out_however_they_are_written(
    cluster: Any, fields: bytes
) -> None:
    """Cases 4 and 50."""
    status, _, _ = await cluster.post(body(INNER, fields))
    assert status == 200
    seen = json.loads(cluster.engine.seen[-1].raw_body)
    assert "kv_transfer_params" not in seen
    assert seen["prompt"] == "hi"
