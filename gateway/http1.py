"""HTTP/1.1 from the client's side without I/O: a request as bytes, and the answer to it read.

llhttp (through httptools, no leniency) does the grammar: it refuses both lengths at once, folded
headers, bare line feeds and lengths that are no numbers. What an exchange with an engine may be
beyond that, and how large, is decided here (RFC 9112).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeVar, overload

import httptools

from gateway.events import Chunks, native
from prfaas.errors import InvalidRequest, ProtocolError

T = TypeVar("T")

FRAMING = frozenset({"host", "content-length", "transfer-encoding", "connection", "expect"})
"""Header fields that only this module writes."""
PLAIN = frozenset({"content-type", "x-request-id", "traceparent", "accept", "user-agent"})
"""Names known to be names, which need no look."""
NO_BODY = frozenset({204, 304})
LAST_CHUNK = b"0\r\n\r\n"
"""Without extensions and trailers."""
MAX_KNOWN, MAX_KNOWN_BYTES = 64, 1024
"""So many heads are remembered of an engine, and none that is longer."""

_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_NOT_IN_TARGET = re.compile(r"[^!-~]")
_NOT_IN_VALUE = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_ONCE = frozenset({"content-length", "transfer-encoding"})


class Headers(Mapping[str, str]):
    """Header fields by name in any case; a field sent several times is one list of values."""

    __slots__ = ("_fields",)

    def __init__(self, fields: dict[str, str]) -> None:
        self._fields = fields

    def __getitem__(self, name: str) -> str:
        found = self._fields.get(name)
        return self._fields[name.lower()] if found is None else found

    @overload
    def get(self, name: str, /) -> str | None: ...

    @overload
    def get(self, name: str, /, default: str | T) -> str | T: ...

    def get(self, name: str, /, default: object = None) -> object:
        """Mapping's own finds out by an exception that a field is not there."""
        found = self._fields.get(name)
        return self._fields.get(name.lower(), default) if found is None else found

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)


def request_head(
    method: str, target: str, host: str, headers: Mapping[str, str], body_bytes: int
) -> bytes:
    """The head of a request with a body of so many bytes.

    Raises InvalidRequest for a header value that would end its line; ValueError for a method,
    target or name that no caller may come with.
    """
    return RequestLine(method, target, host).head(headers, body_bytes)


class RequestLine:
    """The part of a request's head that is the same each time, checked once."""

    __slots__ = ("_method", "_start")

    def __init__(self, method: str, target: str, host: str) -> None:
        """Raises ValueError for a method or target that no caller may come with."""
        if not _TOKEN.fullmatch(method) or _NOT_IN_TARGET.search(target) or not target:
            raise ValueError(f"not a request line: {method!r} {target!r}")
        self._method = method
        self._start = f"{method} {target} HTTP/1.1\r\nhost: {host}\r\n"

    def head(self, headers: Mapping[str, str], body_bytes: int) -> bytes:
        """As `request_head`, with the same errors for names and values."""
        text = self._start
        if body_bytes or self._method == "POST":
            text += f"content-length: {body_bytes}\r\n"
        for name, value in headers.items():
            if name not in PLAIN and (not _TOKEN.fullmatch(name) or name.lower() in FRAMING):
                raise ValueError(f"not a header to send: {name!r}")
            if not value.isprintable() and _NOT_IN_VALUE.search(value):
                raise InvalidRequest(f"header {name} holds control characters", param=name)
            text += f"{name}: {value}\r\n"
        return (text + "\r\n").encode()


class KnownHead(NamedTuple):
    """What llhttp made of the head of an answer with a length, or in chunks."""

    status: int
    headers: Headers
    content_length: int | None
    keep_alive: bool


class KnownHeads:
    """Heads that llhttp has read before, byte for byte: most answers of an engine begin with one of
    a few, and reading one is most of what reading a short answer costs. Nothing to close.
    """

    def __init__(self) -> None:
        self._heads: dict[bytes, KnownHead] = {}

    def __len__(self) -> int:
        return len(self._heads)

    def get(self, head: bytes) -> KnownHead | None:
        return self._heads.get(head)

    def keep(self, head: bytes, known: KnownHead) -> None:
        """The latest few; none that is long."""
        if len(head) > MAX_KNOWN_BYTES:
            return
        if len(self._heads) >= MAX_KNOWN:
            self._heads.clear()
        self._heads[head] = known


class ResponseParser:
    """Reads the one answer to one request from whatever pieces arrive.

    `body` holds what arrived and was not taken yet; the owner empties it. The head, the trailers
    and what lies between pieces of a body (chunk extensions) are each bounded by `max_head_bytes`.
    """

    __slots__ = (
        "_fields",
        "_head_bytes",
        "_interim",
        "_keep_alive",
        "_known",
        "_max_head_bytes",
        "_method",
        "_parser",
        "_quiet_bytes",
        "_unread",
        "_until_eof",
        "body",
        "body_bytes",
        "chunks",
        "complete",
        "content_length",
        "excess",
        "headers",
        "heard",
        "status",
    )

    def __init__(self, method: str, max_head_bytes: int, known: KnownHeads | None = None) -> None:
        """`known` is shared by the connections to one engine."""
        self._method = method
        self._max_head_bytes = max_head_bytes
        self._known = known
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        self._fields: dict[str, str] = {}
        self._head_bytes = self._quiet_bytes = 0
        self._unread = b""
        """The head, where it is known and llhttp has not been told of it."""
        self._interim = self._keep_alive = self._until_eof = False
        self.heard = False
        """At least one byte arrived."""
        self.status = 0
        self.headers: Headers | None = None
        """None until the head is whole; heads of 1xx answers are skipped."""
        self.content_length: int | None = None
        self.body: list[bytes] = []
        self.body_bytes = 0
        """In `body`; the owner sets it back when it takes them."""
        self.chunks: Chunks | None = None
        """Of a chunked body: whether llhttp is where a chunk begins. While it is, whole chunks may
        go past it."""
        self.complete = False
        self.excess = False
        """Something followed the answer that nobody asked for."""

    @property
    def chunked(self) -> bool:
        """The body comes in chunks; False before the head is whole."""
        return self.headers is not None and self.content_length is None and not self._until_eof

    @property
    def reusable(self) -> bool:
        """The connection may carry another request."""
        return self.complete and self._keep_alive and not self.excess

    @property
    def rearmable(self) -> bool:
        """It may read the next answer; after that to HEAD llhttp still waits for its body."""
        return self._method != "HEAD" and self.reusable

    def close(self) -> None:
        """Let go of httptools' half, which holds this one: no garbage in circles."""
        self._parser = None

    def rearm(self, method: str) -> None:
        """Read the next answer, to a request that follows on the same connection, where this one
        is `rearmable`.
        """
        assert self.complete
        self._method = method
        self._head_bytes = self._quiet_bytes = 0
        self._unread = b""
        self._keep_alive = self._until_eof = self.heard = self.complete = False
        self.status = self.body_bytes = 0
        self.headers = self.content_length = self.chunks = None

    def feed(self, data: bytes) -> None:
        """Read a piece. Raises ProtocolError for what is no answer to this request."""
        known, whole = self._known, 0
        if known is not None and not self.heard and self._method != "HEAD":
            # At an interim head, and where there is no head, what follows is no chunk.
            whole = data.find(b"\r\n\r\n") + 4
            head = known.get(data[:whole])
            if head is not None and self._takes_known(head, data, whole):
                if self.complete:
                    return
                data, whole = data[whole:], 0
        self.heard = True
        if self.complete or self._parser is None:
            # Blank lines are nothing, as they are before the next answer (RFC 9112, 2.2).
            self.excess = self.excess or bool(data.strip(b"\r\n"))
            return
        if self.chunks is not None:
            data = self._unpacked(self.chunks, data)
            if not data:
                return
            if self._unread:
                data, self._unread = self._unread + data, b""
        pieces = len(self.body)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as exc:
            cause = exc.__context__
            raise cause if isinstance(cause, ProtocolError) else exc from None
        except httptools.HttpParserError as exc:
            if not self.complete:
                raise ProtocolError(f"not HTTP/1.1: {exc}") from exc
            self.excess = True
        if known is not None and whole:
            self._keep(known, data, whole)
        if len(self.body) > pieces or self.complete:
            self._quiet_bytes = 0
            return
        self._quiet_bytes += len(data)
        if self._quiet_bytes > self._max_head_bytes:
            raise ProtocolError(f"over {self._max_head_bytes} bytes without a byte of a body")

    def _keep(self, known: KnownHeads, data: bytes, whole: int) -> None:
        """The head that `data` begins with, for the next time, and where its chunks are."""
        if self.headers is None:
            return
        length = self.content_length
        if length is None:
            if native is None or not self.chunked:
                return
            self.chunks = native.Chunks()
            self.chunks.seen(data[whole:])
            # Not that of an interim answer, nor one without a body.
            keep = data.startswith(b"HTTP/1.1 %d " % self.status) and self.status not in NO_BODY
        else:
            # Of one that came whole, without an interim one before it.
            keep = self.reusable and length > 0 and len(data) == whole + length
        if keep:
            head = KnownHead(self.status, self.headers, length, self._keep_alive)
            known.keep(data[:whole], head)

    def _takes_known(self, head: KnownHead, data: bytes, whole: int) -> bool:
        """llhttp is not told: it is where an answer begins, before and after. False where it has to
        look after all.
        """
        length = head.content_length
        if length is None:
            assert native is not None
            self.chunks, self._unread = native.Chunks(), data[:whole]
        elif len(data) != whole + length:
            return False
        else:
            self.heard = self.complete = True
            self.body.append(data[whole:])
            self.body_bytes = length
        self.status, self.headers, self.content_length, self._keep_alive = head
        return True

    def _unpacked(self, chunks: Chunks, data: bytes) -> bytes:
        """Take the whole chunks that it begins with; what is left for llhttp."""
        payload, data = chunks.unpack(data)
        if payload:
            self.body.append(payload)
            self.body_bytes += len(payload)
            self._quiet_bytes = 0
        if data == LAST_CHUNK and self._unread and chunks.between:
            self.complete = True
            return b""
        if data:
            chunks.seen(data)
        return data

    def eof(self) -> None:
        """The connection ended. Raises ProtocolError where the answer had not."""
        if self.complete:
            return
        if self.headers is not None and self._until_eof:
            self.complete = True
        elif not self.heard:
            raise ProtocolError("the connection was closed before an answer")
        else:
            raise ProtocolError("the connection was closed in the middle of an answer")

    # --- called by httptools ---

    def on_message_begin(self) -> None:
        if self.complete:
            self.excess = True
        self._fields = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value) + 4
        if self._head_bytes > self._max_head_bytes:
            raise ProtocolError(f"the headers are over {self._max_head_bytes} bytes")
        if self.complete or self.headers is not None:
            return  # trailers say nothing we act on
        key, text = name.decode("ascii").lower(), value.decode("latin-1")
        known = self._fields.get(key)
        if known is not None:
            if key in _ONCE:
                raise ProtocolError(f"{key} came twice")
            text = f"{known}, {text}"
        self._fields[key] = text

    def on_headers_complete(self) -> None:
        parser = self._parser
        if self.complete or self.headers is not None or parser is None:
            return  # it is known
        status = parser.get_status_code()
        if (version := parser.get_http_version()) not in ("1.1", "1.0"):
            raise ProtocolError(f"HTTP version {version}")
        if status == 101:
            raise ProtocolError("the protocol was switched, which nobody asked for")
        if status < 200:
            self._interim = True
            return
        coding = self._fields.get("transfer-encoding")
        if coding is not None and coding.strip().lower() != "chunked":
            raise ProtocolError(f"transfer-encoding {coding[:50]!r}")
        content = self._fields.get("content-encoding", "identity").strip().lower()
        if content not in ("identity", ""):
            raise ProtocolError(f"content-encoding {content[:50]!r}, which nobody asked for")
        length = self._fields.get("content-length")
        self.content_length = None if length is None else int(length)
        self._until_eof = coding is None and length is None
        self._keep_alive = parser.should_keep_alive()
        self.status, self.headers = status, Headers(self._fields)
        if self._method == "HEAD":
            self.complete = True

    def on_body(self, data: bytes) -> None:
        if self.complete:
            self.excess = True
            return
        self.body.append(data)
        self.body_bytes += len(data)

    def on_message_complete(self) -> None:
        if self._interim:
            self._interim = False
        elif self.headers is not None:
            self.complete = True
