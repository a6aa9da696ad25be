"""Only heads without anything unusual take the short way."""

import pytest

from gateway.client_head import (
    MAX_FIELDS,
    MAX_HEAD_BYTES,
    MAX_KNOWN,
    ClientHead,
    KnownClientHeads,
    may_become_head,
    plain_head,
    request_id_of,
)
from gateway.ids import Ids
from gateway.schema import Api

LINE = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
LENGTH = b"content-length: 5\r\n"


def head_of(*fields: bytes, line: bytes = LINE) -> object:
    """As it is read, and as one that was read before is."""
    data = line + b"".join(fields) + b"\r\n"
    head, known = plain_head(data + b"hello", len(data)), KnownClientHeads()
    for _ in range(2):
        assert seen(known.read(data + b"hello", len(data))) == seen(whole(head))
    return head


def whole(head: ClientHead | None) -> tuple[ClientHead, int] | None:
    return head and (head, head.body_bytes)


def seen(read: tuple[ClientHead, int] | None) -> object:
    return read and (read[0].api, read[0].fields, read[0].passed, read[0].usable, read[1])


def test_a_known_head_comes_with_any_length_and_nothing_else_different() -> None:
    known = KnownClientHeads()
    others = [
        (b"content-length: %d\r\n", b"accept: b\r\n"),
        (b"content-length:  %d\r\n", b"accept: a\r\n"),
        (b"content-length: 0%d\r\n", b"content-length: %d\r\n"),
        (b"accept: a\r\n", b"content-length: %d\r\n"),
    ]
    for length in (5, 17, 123_456):
        for one, other in [(b"Content-Length: %d\r\n", b"accept: a\r\n"), *others]:
            text = LINE + one + other + b"\r\n"
            data = text % ((length,) * text.count(b"%d"))
            assert seen(known.read(data, len(data))) == seen(whole(plain_head(data, len(data))))
    assert len(known) == 3  # two spaces are rare, and two lengths are no head


def test_few_heads_are_kept_and_none_that_comes_once() -> None:
    known = KnownClientHeads()
    for at in range(3 * MAX_KNOWN):
        data = LINE + LENGTH + b"accept: %d\r\n\r\n" % at
        assert known.read(data, len(data)) is not None
    assert 0 < len(known) <= MAX_KNOWN
    before = len(known)
    for field in (b"x-request-id: a\r\n", b"Traceparent: 00\r\n", b"x: " + b"y" * 2000 + b"\r\n"):
        data = LINE + LENGTH + field + b"\r\n"
        assert known.read(data, len(data)) is not None
    assert len(known) == before


def test_a_plain_head_has_what_we_act_on() -> None:
    head = head_of(
        b"Authorization:  Bearer k \r\n", LENGTH, b"X-Request-ID: a\r\n",
        b"x-request-id: b\r\n", b"Cookie: c\r\n", b"Connection: Keep-Alive\r\n",
        b"user-agent: \xc3\xa9\r\n",
    )  # fmt: skip
    assert head is not None
    assert head.api is Api.COMPLETIONS
    assert head.body_bytes == 5
    assert head.fields == {
        "authorization": "Bearer k", "x-request-id": "a", "user-agent": "é"
    }  # fmt: skip
    assert head.passed == {"authorization": "Bearer k", "user-agent": "é"}
    chat = head_of(LENGTH, line=LINE.replace(b"/comp", b"/chat/comp"))
    assert chat.api is Api.CHAT


@pytest.mark.parametrize(
    "line",
    [
        b"GET /v1/completions HTTP/1.1\r\n",
        b"POST /v1/completions HTTP/1.0\r\n",
        b"POST /v1/completions?x=1 HTTP/1.1\r\n",
        b"POST /v1/models HTTP/1.1\r\n",
        b"POST  /v1/completions HTTP/1.1\r\n",
        b"POST /v1/completions HTTP/1.1\n",
        b"post /v1/completions HTTP/1.1\r\n",
        b"\r\nPOST /v1/completions HTTP/1.1\r\n",
    ],
)
def test_another_line_takes_the_long_way(line: bytes) -> None:
    assert head_of(b"host: x\r\n", LENGTH, line=line) is None


@pytest.mark.parametrize(
    "fields",
    [
        (),
        (LENGTH, LENGTH),
        (LENGTH, b"content-length: 6\r\n"),
        (b"content-length: 5, 5\r\n",),
        (b"content-length: +5\r\n",),
        (b"content-length: 5x\r\n",),
        (b"content-length: -1\r\n",),
        (b"content-length: 9999999999999\r\n",),
        (LENGTH, b"transfer-encoding: chunked\r\n"),
        (b"transfer-encoding: chunked\r\n",),
        (LENGTH, b"expect: 100-continue\r\n"),
        (LENGTH, b"connection: close\r\n"),
        (LENGTH, b"connection: upgrade\r\n", b"upgrade: h2c\r\n"),
        (LENGTH, b"content-encoding: gzip\r\n"),
        (LENGTH, b"Host: y\r\n"),
        (LENGTH, b" folded: x\r\n"),
        (LENGTH, b"bad name: x\r\n"),
        (LENGTH, b"x: a\rb\r\n"),
        (LENGTH, b"x: \x00\r\n"),
        (LENGTH, b"content-length : 5\r\n"),
        (LENGTH, b"user-agent: \xff\r\n"),
        (LENGTH, b"x: " + b"y" * MAX_HEAD_BYTES + b"\r\n"),
        (LENGTH, b"x: y\r\n" * (MAX_FIELDS - 1)),
    ],
    ids=lambda fields: b"".join(fields)[:40].decode("latin-1"),
)
def test_anything_unusual_takes_the_long_way(fields: tuple[bytes, ...]) -> None:
    assert head_of(*fields) is None


def test_so_many_fields_are_not_too_many() -> None:
    assert head_of(LENGTH, b"x: y\r\n" * (MAX_FIELDS - 2)) is not None


def test_a_request_without_a_host_takes_the_long_way() -> None:
    assert head_of(LENGTH, line=b"POST /v1/completions HTTP/1.1\r\n") is None


@pytest.mark.parametrize(
    "whole", [b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n\r\n", b"\r\nGET / HTTP/1.0\r\n\r\n"]
)
def test_any_start_of_a_head_may_become_one(whole: bytes) -> None:
    assert all(may_become_head(whole[:end]) for end in range(len(whole)))


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x00\xc8\x01",
        b"SSH-2.0-OpenSSH_9.0\r\n",
        b"get / HTTP/1.1",
        b"\xff",
        b"GET /\xff",
        b"GET / HTTP/2.0\r\n",
        b"GET / HTTP/1.1\n",
        b"GET /\r\n",
        b"GET / HTTP/1.1\r\na: b\n\n",
        b"EHLO x\r\n",
        b"\0",
    ],
)
def test_what_is_no_start_of_a_head_is_not_waited_for(data: bytes) -> None:
    assert not may_become_head(data)


def test_request_ids_are_the_clients_where_they_are_ids() -> None:
    ids = Ids()
    assert request_id_of("abc-1_x.y:z", ids) == "abc-1_x.y:z"
    for given in ("", "a b", "a" * 129, "<", "a\n"):
        assert request_id_of(given, ids).startswith("req-")
