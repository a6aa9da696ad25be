"""The head of a client's request, as far as the short way through the gateway takes it."""

from __future__ import annotations

import re

import httptools

from gateway.ids import Ids
from gateway.quality import QUALITY_HEADER
from gateway.schema import Api

LINES = {f"POST {api.path} HTTP/1.1\r\n".encode(): api for api in Api}
"""Request lines of the short way."""
MAX_HEAD_BYTES = 8190
MAX_FIELDS = 128
"""As on the long way, which refuses more."""

PASSED_HEADERS = ("authorization", "accept", "tracestate", "user-agent")
"""Of the client's headers, what goes on to the engine; routing headers and all others do not, nor
does `authorization` where it is a tenant's key."""
_READ = ("traceparent", "x-request-id", "x-cache-salt", QUALITY_HEADER)
_WANTED = frozenset(name.encode() for name in (*PASSED_HEADERS, *_READ))
_NOT_HERE = frozenset({b"transfer-encoding", b"expect", b"upgrade", b"content-encoding"})
"""With one of these a request takes the long way."""
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")
_LENGTH = re.compile(rb"[0-9]{1,12}")
_START = re.compile(rb"[A-Z]+(?: (?:[!-~]+(?: [!-~]*)?)?)?\r?|")
"""Of a request line that has not come whole."""
_LINE = re.compile(rb"[A-Z]+ [!-~]+ HTTP/1\.[01]\r")
_LENGTH_LINE = re.compile(rb"\r\n[Cc]ontent-[Ll]ength: ([0-9]{1,12})\r\n")
_EACH_ITS_OWN = ("x-request-id", "traceparent")
"""With one of these a head does not come again."""
MAX_KNOWN, MAX_KNOWN_BYTES = 64, 1024


class ClientHead:
    """What we act on of one head. `fields` are those that the gateway reads or passes on."""

    __slots__ = ("_complete", "_count", "_hosts", "_plain", "api", "body_bytes", "fields", "passed")

    def __init__(self, api: Api) -> None:
        self.api = api
        self.fields: dict[str, str] = {}
        self.passed: dict[str, str] = {}
        """Those that go on to the engine; heads that are alike share them."""
        self.body_bytes = -1
        self._count = 0
        self._plain = True
        self._complete = False
        self._hosts = 0

    @property
    def usable(self) -> bool:
        return self._plain and self._complete and self._hosts == 1 and self.body_bytes >= 0

    # --- called by httptools ---

    def on_header(self, name: bytes, value: bytes) -> None:
        key = name.lower()
        self._count += 1
        if self._count > MAX_FIELDS:
            self._plain = False
        elif key in _WANTED:
            text = value.strip(b" \t").decode()
            self.fields.setdefault(key.decode(), text)  # the first one, as aiohttp
        elif key == b"content-length":
            if self.body_bytes >= 0 or not _LENGTH.fullmatch(value):
                self._plain = False
            else:
                self.body_bytes = int(value)
        elif key == b"host":
            self._hosts += 1
        elif key in _NOT_HERE or (key == b"connection" and value.lower() != b"keep-alive"):
            self._plain = False

    def on_headers_complete(self) -> None:
        self._complete = True
        self.passed = {name: self.fields[name] for name in PASSED_HEADERS if name in self.fields}


def plain_head(data: bytes, end: int) -> ClientHead | None:
    """The head in `data[:end]`, its blank line included. None where anything about it is not plain:
    another path or version, a body without a length, what llhttp refuses.
    """
    api = LINES.get(data[: data.find(b"\n") + 1])
    if api is None or end > MAX_HEAD_BYTES:
        return None
    head = ClientHead(api)
    try:
        httptools.HttpRequestParser(head).feed_data(data[:end])
    except (httptools.HttpParserError, httptools.HttpParserUpgrade):
        return None
    return head if head.usable else None


class KnownClientHeads:
    """Heads that llhttp has read before, byte for byte but for the length of the body: those of one
    client are alike, and reading one is most of what reading a short request costs. Owns nothing.
    """

    def __init__(self) -> None:
        self._heads: dict[bytes, ClientHead] = {}

    def __len__(self) -> int:
        return len(self._heads)

    def read(self, data: bytes, end: int) -> tuple[ClientHead, int] | None:
        """As `plain_head`, and the bytes of its body: of a head that was read before `body_bytes`
        is what came then.
        """
        length = _LENGTH_LINE.search(data, 0, end)
        if length is None:
            head = plain_head(data, end)
            return None if head is None else (head, head.body_bytes)
        start, stop = length.span(1)
        # No head that was read has a second such line, so it can be put in at one place only.
        key = data[:start] + data[stop:end]
        known = self._heads.get(key)
        if known is not None:
            return known, int(length[1])
        head = plain_head(data, end)
        if head is None:
            return None
        if len(key) <= MAX_KNOWN_BYTES:
            self._keep(key, head)
        return head, head.body_bytes

    def _keep(self, key: bytes, head: ClientHead) -> None:
        """The latest few."""
        if any(name in head.fields for name in _EACH_ITS_OWN):
            return
        if len(self._heads) >= MAX_KNOWN:
            self._heads.clear()
        self._heads[key] = head


def may_become_head(data: bytes) -> bool:
    """Whether more bytes could make a head of this: what cannot be HTTP is not waited for."""
    line, ended, rest = data.lstrip(b"\r\n").partition(b"\n")
    if not ended:
        return _START.fullmatch(line) is not None
    return _LINE.fullmatch(line) is not None and b"\n\n" not in rest


def request_id_of(given: str, ids: Ids) -> str:
    """The client's id where it is one, else a new one."""
    return given if given and _REQUEST_ID.fullmatch(given) else f"req-{ids.hex(12)}"
