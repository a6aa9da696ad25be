"""Server-sent events without I/O: whole events out of whatever pieces arrive."""

from __future__ import annotations

import re
from collections.abc import Iterator

from prfaas.errors import ProtocolError

_ENDS = (b"\n\n", b"\r\n\r\n")
_DONE = (b"data: [DONE]", b"data:[DONE]")
_ERROR = (b'data: {"error"', b'data:{"error"')
_LINE = re.compile(rb"[^\r\n]+")


class SseSplitter:
    """Cuts a stream after whole events and counts them; the bytes themselves stay as they came.

    Quotes and line breaks inside JSON strings are escaped, so the marks looked for cannot be text
    that a model wrote.
    """

    def __init__(self, max_event_bytes: int) -> None:
        self._max_event_bytes = max_event_bytes
        self._partial = b""
        self.events = 0
        """`data:` events seen, without [DONE]."""
        self.done = False
        """[DONE] was seen: the stream is complete."""
        self.failed = False
        """The engine itself sent an error event."""

    @property
    def between(self) -> bool:
        """An event begins next, and neither the end nor an error has been seen."""
        return not (self._partial or self.done or self.failed)

    def feed(self, data: bytes) -> bytes:
        """All events that are whole now. Raises ProtocolError for one over the limit."""
        if self._partial:
            data = self._partial + data
        if data.endswith(_ENDS):  # as nearly always: engines send whole events
            whole, self._partial = data, b""
        else:
            cut = max(at + len(end) if (at := data.rfind(end)) >= 0 else 0 for end in _ENDS)
            whole, self._partial = data[:cut], data[cut:]
            if len(self._partial) > self._max_event_bytes:
                raise ProtocolError(f"the engine sent an event over {self._max_event_bytes} bytes")
        if not whole:
            return whole
        self.events += whole.count(b"\ndata:") + whole.startswith(b"data:")
        if b"[DONE]" in whole and _at_line_start(whole, _DONE):
            self.done = True
            self.events -= 1
        if b'{"error"' in whole and _at_line_start(whole, _ERROR):
            self.failed = True
        return whole


def data_payloads(events: bytes) -> Iterator[bytes]:
    """The payloads of all `data:` events in whole events, in order; found as they are asked for."""
    for line in _LINE.finditer(events):
        if (text := line[0]).startswith(b"data:"):
            yield text[5:].strip()


def _at_line_start(whole: bytes, marks: tuple[bytes, ...]) -> bool:
    return any(whole.startswith(mark) or b"\n" + mark in whole for mark in marks)
