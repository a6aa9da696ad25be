"""Events come out whole however the bytes were cut, and nothing is changed."""

import pytest

from gateway.sse import SseSplitter, data_payloads
from prfaas.errors import ProtocolError

STREAM = (
    b": hello\n\n"
    b'data: {"a":"data: [DONE]"}\n\n'
    b'data: {"text":"\\n\\ndata: {\\"error\\":1}"}\n\n'
    b"data: [DONE]\n\n"
)


@pytest.mark.parametrize("size", range(1, len(STREAM) + 1))
def test_any_cut_gives_the_same_events(size: int) -> None:
    splitter = SseSplitter(1000)
    pieces = [splitter.feed(STREAM[i : i + size]) for i in range(0, len(STREAM), size)]
    assert b"".join(pieces) == STREAM
    assert all(piece.endswith(b"\n\n") for piece in pieces if piece)
    assert (splitter.events, splitter.done, splitter.failed) == (2, True, False)


@pytest.mark.parametrize("size", range(1, 60))
def test_carriage_returns_are_line_ends_too(size: int) -> None:
    stream = b'data: {"a":1}\r\n\r\ndata: [DONE]\r\n\r\n'
    splitter = SseSplitter(1000)
    out = b"".join(splitter.feed(stream[i : i + size]) for i in range(0, len(stream), size))
    assert out == stream
    assert (splitter.events, splitter.done) == (1, True)


def test_half_an_event_is_held_back() -> None:
    splitter = SseSplitter(1000)
    assert splitter.feed(b'data: {"a":1}\n\ndata: {"b"') == b'data: {"a":1}\n\n'
    assert splitter.feed(b":2}\n") == b""
    assert splitter.feed(b"\n") == b'data: {"b":2}\n\n'
    assert splitter.events == 2


def test_comments_are_not_events() -> None:
    splitter = SseSplitter(1000)
    assert splitter.feed(b": keep-alive\n\n") == b": keep-alive\n\n"
    assert splitter.events == 0


def test_an_error_event_is_noticed() -> None:
    splitter = SseSplitter(1000)
    splitter.feed(b'data: {"a":1}\n\ndata: {"error":{"message":"x"}}\n\n')
    assert splitter.failed
    assert not splitter.done


def test_an_event_without_end_is_refused() -> None:
    splitter = SseSplitter(100)
    splitter.feed(b"data: " + b"x" * 90)
    with pytest.raises(ProtocolError, match="over 100 bytes"):
        splitter.feed(b"x" * 90)


def test_payloads_are_found_between_other_lines() -> None:
    found = list(data_payloads(b': c\n\nevent: m\ndata:  {"a":1} \n\ndata: 2\n\n'))
    assert found == [b'{"a":1}', b"2"]
    assert list(data_payloads(b": c\n\n")) == []
