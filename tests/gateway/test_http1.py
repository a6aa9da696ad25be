"""HTTP/1.1 without I/O: any cut of an answer reads the same, an ambiguous one is not read."""

import random

import pytest

from gateway.http1 import MAX_KNOWN, Headers, KnownHeads, ResponseParser, request_head
from prfaas.errors import InvalidRequest, ProtocolError
from prfaas.testing.raw_http import OK

LIMIT = 4096
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"


def read(
    *pieces: bytes,
    method: str = "POST",
    eof: bool = False,
    limit: int = LIMIT,
    known: KnownHeads | None = None,
):
    parser = ResponseParser(method, limit, known)
    for piece in pieces:
        parser.feed(piece)
    if eof:
        parser.eof()
    return parser


def told(parser: ResponseParser) -> tuple[object, ...]:
    headers = None if parser.headers is None else dict(parser.headers)
    body = b"".join(parser.body)
    return parser.status, headers, body, parser.complete, parser.reusable, parser.excess


# answer, method, connection ends, status, body, reusable
ANSWERS = {
    "length": (OK + b"Content-Length: 5\r\n\r\nhello", "POST", False, 200, b"hello", True),
    "empty": (OK + b"content-length: 0\r\n\r\n", "POST", False, 200, b"", True),
    "chunks": (CHUNKED + b"5\r\nhello\r\n1\r\n!\r\n0\r\n\r\n", "POST", False, 200, b"hello!", True),
    "chunk extensions": (
        CHUNKED + b'5;a=1;b="x;y"\r\nhello\r\n0;last\r\n\r\n', "POST", False, 200, b"hello", True,
    ),
    "trailers": (
        CHUNKED + b"5\r\nhello\r\n0\r\nx-sum: 1\r\ncontent-type: evil/x\r\n\r\n",
        "POST", False, 200, b"hello", True,
    ),
    "upper case": (
        OK + b"TRANSFER-ENCODING: Chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        "POST", False, 200, b"hello", True,
    ),
    "to the end": (OK + b"server: x\r\n\r\nhello", "POST", True, 200, b"hello", False),
    "1.0": (b"HTTP/1.0 200 OK\r\n\r\nhello", "POST", True, 200, b"hello", False),
    "1.0 length": (
        b"HTTP/1.0 200 OK\r\ncontent-length: 5\r\n\r\nhello", "POST", False, 200, b"hello", False,
    ),
    "close": (
        OK + b"connection: close\r\ncontent-length: 5\r\n\r\nhello",
        "POST", False, 200, b"hello", False,
    ),
    "continue": (
        b"HTTP/1.1 100 Continue\r\nx: y\r\n\r\n" + OK + b"content-length: 5\r\n\r\nhello",
        "POST", False, 200, b"hello", True,
    ),
    "hints": (
        b"HTTP/1.1 103 Early Hints\r\nlink: a\r\n\r\nHTTP/1.1 102 Processing\r\n\r\n"
        + OK + b"content-length: 5\r\n\r\nhello",
        "POST", False, 200, b"hello", True,
    ),
    "204": (b"HTTP/1.1 204 No Content\r\n\r\n", "POST", False, 204, b"", True),
    "304": (b"HTTP/1.1 304 Same\r\ncontent-length: 5\r\n\r\n", "GET", False, 304, b"", True),
    "head": (OK + b"content-length: 5\r\n\r\n", "HEAD", False, 200, b"", True),
    "no reason": (b"HTTP/1.1 413\r\ncontent-length: 0\r\n\r\n", "POST", False, 413, b"", True),
    "503": (
        b"HTTP/1.1 503 Busy\r\nretry-after: 7\r\ncontent-length: 2\r\n\r\n{}",
        "POST", False, 503, b"{}", True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_reads_the_same_however_it_is_cut(name: str) -> None:
    data, method, eof, status, body, reusable = ANSWERS[name]
    whole = read(data, method=method, eof=eof)
    assert (whole.status, b"".join(whole.body), whole.complete) == (status, body, True)
    assert (whole.reusable, whole.excess) == (reusable, False)
    bytewise = read(*(data[i : i + 1] for i in range(len(data))), method=method, eof=eof)
    assert told(bytewise) == told(whole)
    for cut in range(1, len(data)):
        parser = read(data[:cut], method=method)
        assert not parser.complete or method == "HEAD"
        parser.feed(data[cut:])
        if eof:
            parser.eof()
        assert told(parser) == told(whole), cut


@pytest.mark.parametrize("name", ANSWERS)
def test_a_head_that_was_read_before_reads_the_same(name: str) -> None:
    """Also by a parser that reads answer after answer, and with anything behind."""
    data, method, eof, _, _, _ = ANSWERS[name]
    known = KnownHeads()
    first, whole = (read(data, method=method, eof=eof, known=each) for each in (known, None))
    assert told(first) == told(whole)
    again = read(data, method=method, eof=eof, known=known)
    assert told(again) == told(whole)
    if again.rearmable:
        for follows, reads in ((data, whole), (b"HTTP/1.1 204 Other\r\n\r\n", None), (data, whole)):
            again.body.clear()
            again.rearm(method)
            again.feed(follows)
            assert reads is None or told(again) == told(reads)
    for cut in range(1, len(data)):
        parser = read(data[:cut], data[cut:], method=method, eof=eof, known=known)
        assert told(parser) == told(whole), cut
    longer = read(data + b"x", method=method, known=known)
    assert told(longer) == told(read(data + b"x", method=method))


def test_a_head_that_was_read_before_is_no_way_round_the_rules() -> None:
    known = KnownHeads()
    head = OK + b"content-length: 5\r\n\r\n"
    read(head + b"hello", known=known)
    assert len(known) == 1
    short = read(head + b"hell", known=known)
    assert not short.complete
    with pytest.raises(ProtocolError, match="middle of an answer"):
        short.eof()
    assert read(head, method="HEAD", known=known).complete
    assert not read(head, method="HEAD", known=known).body


def outcome(pieces: list[bytes], known: KnownHeads | None) -> tuple[object, ...]:
    """What comes of an answer that ends with its connection."""
    parser = ResponseParser("POST", 4096, known)
    try:
        for piece in pieces:
            parser.feed(piece)
        parser.eof()
    except ProtocolError as exc:
        return (exc.message, *told(parser)[:4])
    return told(parser)


def test_chunks_after_a_head_that_was_read_before_read_the_same() -> None:
    """Whatever they are, and however they come."""
    rng = random.Random(11)
    parts = [
        b"5\r\nhello\r\n", b"00A\r\nhellohello\r\n", b"1;a=b\r\n!\r\n", b"0\r\n\r\n",
        b"0\r\nx: y\r\n\r\n", b"5\r\nhell", b"zz\r\n", b"1\nx\n", b"\r\n", b"x",
    ]  # fmt: skip
    known = KnownHeads()
    read(CHUNKED + b"1\r\na\r\n0\r\n\r\n", known=known)
    for _ in range(500):
        rest = b"".join(rng.choices(parts, [6, 4, 1, 3, 1, 1, 1, 1, 1, 1], k=rng.randrange(6)))
        data = CHUNKED + rest
        cuts = sorted(rng.sample(range(len(CHUNKED), len(data) + 1), min(len(rest), 3)))
        ends = zip([0, *cuts], [*cuts, len(data)], strict=True)
        pieces = [data[a:b] for a, b in ends if a < b]
        assert outcome(pieces, known) == outcome(pieces, None), pieces


def test_few_heads_are_remembered() -> None:
    known = KnownHeads()
    for number in range(3 * MAX_KNOWN):
        read(OK + b"x: %d\r\ncontent-length: 2\r\n\r\n{}" % number, known=known)
        assert 1 <= len(known) <= MAX_KNOWN
    before = len(known)
    read(OK + b"x: " + b"y" * 2000 + b"\r\ncontent-length: 2\r\n\r\n{}", known=known)
    assert len(known) == before


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_cut_short_is_never_complete(name: str) -> None:
    data, method, eof, _, _, _ = ANSWERS[name]
    for cut in range(len(data)):
        if eof and cut >= data.index(b"\r\n\r\n") + 4:
            continue  # nobody can tell
        with pytest.raises(ProtocolError, match="closed"):
            read(data[:cut], method=method, eof=True)


@pytest.mark.parametrize("tail", [b"x", b"\r\n\r\nHTTP", b"HTTP/1.1 200 OK\r\n\r\n", b"\x00" * 9])
@pytest.mark.parametrize("name", [n for n, a in ANSWERS.items() if not a[2]])
def test_what_follows_an_answer_is_not_part_of_it(name: str, tail: bytes) -> None:
    data, method, _, status, body, _ = ANSWERS[name]
    for pieces in ([data + tail], [data, tail]):
        parser = read(*pieces, method=method)
        assert (parser.status, b"".join(parser.body)) == (status, body)
        assert parser.complete
        assert parser.excess
        assert not parser.reusable


REFUSED = {
    "both lengths": OK + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "both lengths, reversed": OK
    + b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n",
    "two lengths": OK + b"content-length: 5\r\ncontent-length: 6\r\n\r\nhello",
    "the same length twice": OK + b"content-length: 5\r\ncontent-length: 5\r\n\r\nhello",
    "a list of lengths": OK + b"content-length: 5, 5\r\n\r\nhello",
    "negative": OK + b"content-length: -5\r\n\r\nhello",
    "plus": OK + b"content-length: +5\r\n\r\nhello",
    "hexadecimal": OK + b"content-length: 0x5\r\n\r\nhello",
    "empty length": OK + b"content-length: \r\n\r\nhello",
    "huge": OK + b"content-length: 18446744073709551616\r\n\r\nhello",
    "no digit": OK + "content-length: ٥\r\n\r\nhello".encode(),
    "huge chunk": CHUNKED + b"10000000000000000\r\nhello",
    "negative chunk": CHUNKED + b"-1\r\nhello",
    "spaced chunk": CHUNKED + b"5 \r\nhello\r\n0\r\n\r\n",
    "chunk without CR": CHUNKED + b"5\nhello\n0\n\n",
    "chunk too short": CHUNKED + b"5\r\nhellohello\r\n0\r\n\r\n",
    "folded": OK + b"a: b\r\n c\r\ncontent-length: 5\r\n\r\nhello",
    "bare LF": OK + b"a: b\ncontent-length: 5\r\n\r\nhello",
    "bare LF status": b"HTTP/1.1 200 OK\ncontent-length: 5\r\n\r\nhello",
    "bare CR": OK + b"a: b\rcontent-length: 5\r\n\r\nhello",
    "NUL": OK + b"a: b\x00c\r\ncontent-length: 5\r\n\r\nhello",
    "space before colon": OK + b"content-length : 5\r\n\r\nhello",
    "no name": OK + b": x\r\ncontent-length: 5\r\n\r\nhello",
    "no colon": OK + b"content-length\r\n\r\nhello",
    "gzip": OK + b"transfer-encoding: gzip\r\n\r\nhello",
    "gzip, chunked": OK + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "chunked twice": OK
    + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "xchunked": OK + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
    "an encoding not asked for": OK + b"content-encoding: gzip\r\ncontent-length: 5\r\n\r\nhello",
    "switching": b"HTTP/1.1 101 Go\r\nupgrade: x\r\nconnection: upgrade\r\n\r\nraw",
    "2.0": b"HTTP/2.0 200 OK\r\ncontent-length: 5\r\n\r\nhello",
    "1.9": b"HTTP/1.9 200 OK\r\ncontent-length: 5\r\n\r\nhello",
    "0.9": b"hello\r\n",
    "another protocol": b"SSH-2.0-x\r\n",
    "TLS": b"\x15\x03\x01\x00\x02\x02\x28",
    "a request": b"POST / HTTP/1.1\r\ncontent-length: 0\r\n\r\n",
    "status 99": b"HTTP/1.1 99 X\r\ncontent-length: 5\r\n\r\nhello",
    "status 2000": b"HTTP/1.1 2000 X\r\ncontent-length: 5\r\n\r\nhello",
    "no status": b"HTTP/1.1 OK\r\ncontent-length: 5\r\n\r\nhello",
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_answer_with_two_readings_is_refused(name: str) -> None:
    data = REFUSED[name]
    with pytest.raises(ProtocolError):
        read(data)
    with pytest.raises(ProtocolError):
        read(*(data[i : i + 1] for i in range(len(data))))


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_answer_is_never_complete(name: str) -> None:
    parser = ResponseParser("POST", LIMIT)
    for at in range(len(REFUSED[name])):
        try:
            parser.feed(REFUSED[name][at : at + 1])
        except ProtocolError:
            break
    assert not parser.complete


@pytest.mark.parametrize(
    "data",
    [
        OK + b"a: " + b"x" * 5000 + b"\r\n\r\n",
        OK + b"a: b\r\n" * 2000 + b"\r\n",
        OK + b"a: " + b"x" * 100_000,
        OK + b"x" * 100_000,
        b"HTTP/1.1 200 " + b"x" * 100_000,
        b"\r\n" * 100_000,
        b"HTTP/1.1 100 Continue\r\n\r\n" * 10_000,
        CHUNKED + b"5;" + b"x" * 100_000,
        CHUNKED + b"5\r\nhello\r\n0\r\n" + b"a: b\r\n" * 20_000,
        CHUNKED + b"0" * 100_000,
    ],
    ids=lambda data: repr(data[:40]) + str(len(data)),
)
@pytest.mark.parametrize("size", [1000, 65536, 1 << 20])
def test_what_is_no_body_is_bounded(data: bytes, size: int) -> None:
    with pytest.raises(ProtocolError):
        read(*(data[i : i + size] for i in range(0, len(data), size)))


def test_a_large_body_in_small_chunks_is_not_taken_for_headers() -> None:
    parser = ResponseParser("POST", LIMIT)
    parser.feed(CHUNKED)
    for _ in range(3000):
        parser.feed(b"1;ext=0123456789\r\nx\r\n")
    assert parser.body_bytes == 3000
    assert not parser.complete


def test_trailers_and_interim_heads_change_no_header() -> None:
    parser = read(*(ANSWERS["trailers"][:1]), method="POST")
    assert parser.headers is not None
    assert dict(parser.headers) == {"transfer-encoding": "chunked"}
    assert dict(read(ANSWERS["continue"][0]).headers or {}) == {"content-length": "5"}


def test_headers_are_found_in_any_case_and_joined() -> None:
    parser = read(OK + b"X-A: 1\r\nx-a: 2\r\nContent-Length: 0\r\nX-E: \xe9\r\n\r\n")
    headers = parser.headers
    assert isinstance(headers, Headers)
    assert headers["X-a"] == headers["x-a"] == "1, 2"
    assert headers["X-E"] == "é"
    assert headers.get("nothing") is None
    assert "CONTENT-LENGTH" in headers
    assert len(headers) == 3
    assert parser.content_length == 0


def test_a_closed_parser_takes_nothing() -> None:
    parser = read(OK)
    parser.close()
    parser.feed(b"content-length: 0\r\n\r\n")
    assert not parser.complete
    assert parser.excess


def test_a_request_head_is_what_was_asked() -> None:
    head = request_head(
        "POST", "/v1/x?a=b", "d:80", {"Accept": "a/b", "x-ü".replace("ü", "u"): "ü"}, 3
    )
    assert (
        head
        == (
            "POST /v1/x?a=b HTTP/1.1\r\nhost: d:80\r\ncontent-length: 3\r\n"
            "Accept: a/b\r\nx-u: ü\r\n\r\n"
        ).encode()
    )
    assert request_head("GET", "/", "d", {}, 0) == b"GET / HTTP/1.1\r\nhost: d\r\n\r\n"
    assert b"content-length: 0\r\n" in request_head("POST", "/", "d", {}, 0)


@pytest.mark.parametrize("value", ["a\r\nx: y", "a\nb", "a\rb", "a\x00", "\x7f"])
def test_a_header_value_cannot_end_its_line(value: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        request_head("POST", "/", "d", {"authorization": value}, 0)
    assert caught.value.param == "authorization"


@pytest.mark.parametrize("name", ["", "a b", "a:", "a\r\n", "Content-Length", "host", "é"])
def test_framing_belongs_to_the_client_itself(name: str) -> None:
    with pytest.raises(ValueError):
        request_head("POST", "/", "d", {name: "1"}, 0)


@pytest.mark.parametrize("target", ["", "/a b", "/a\r\n", "/é"])
def test_a_target_is_one_word(target: str) -> None:
    with pytest.raises(ValueError):
        request_head("POST", target, "d", {}, 0)
