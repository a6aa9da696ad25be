"""Tool calls in an answer, where the model writes them as JSON between two tags.

The form of Hermes, Qwen2.5 and Qwen3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass

import msgspec

OPEN, CLOSE = "<tool_call>", "</tool_call>"
# The same tags with something else between them.
_OTHER_FORM = "<function="


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call; `number` counts those of an answer from 0, `arguments` is JSON as written."""

    number: int
    id: str
    name: str
    arguments: str


class _Written(msgspec.Struct):
    name: str
    arguments: msgspec.Raw


def writes_tool_calls(template: str) -> bool:
    """Whether a model with this chat template is taught to call tools in this form."""
    return OPEN in template and CLOSE in template and _OTHER_FORM not in template


class ToolCallReader:
    """Splits the text of one answer into content and calls as it comes; nothing to close.

    The outcome does not depend on how the text was split. A block that is not a call is content as
    it stands, and so is one that is never closed. White space next to a call belongs to it.
    """

    def __init__(self) -> None:
        self.calls = 0
        """How many so far."""
        self._held = ""
        self._after_call = False

    def push(self, text: str) -> tuple[str, tuple[ToolCall, ...]]:
        """Content and calls that are now certain."""
        self._held += text
        content, calls = "", []
        while (block := self._block()) is not None:
            start, end = block
            call = self._call(self._held[start + len(OPEN) : end - len(CLOSE)])
            if call is None:
                content += self._held[:end]
            else:
                content += self._held[:start].rstrip()
                calls.append(call)
            self._after_call = call is not None
            self._held = self._held[end:]
        self._drop_space()
        certain = self._certain()
        content, self._held = content + self._held[:certain], self._held[certain:]
        return content, tuple(calls)

    def finish(self) -> str:
        """The content still held when the answer ends."""
        held, self._held = self._held, ""
        return held

    def _block(self) -> tuple[int, int] | None:
        """Where the first whole block begins and ends."""
        self._drop_space()
        start = self._held.find(OPEN)
        end = -1 if start < 0 else self._held.find(CLOSE, start)
        return None if end < 0 else (start, end + len(CLOSE))

    def _drop_space(self) -> None:
        if self._after_call:
            self._held = self._held.lstrip()
            self._after_call = not self._held

    def _call(self, written: str) -> ToolCall | None:
        try:
            call = msgspec.json.decode(written, type=_Written)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return None
        arguments = bytes(call.arguments).decode()
        if not arguments.startswith("{"):
            return None
        self.calls += 1
        return ToolCall(self.calls - 1, f"call_{uuid.uuid4().hex[:24]}", call.name, arguments)

    def _certain(self) -> int:
        """Characters that are content whatever follows."""
        start = self._held.find(OPEN)
        if start < 0:
            begun = range(min(len(OPEN) - 1, len(self._held)), 0, -1)
            start = len(self._held) - next((n for n in begun if self._held.endswith(OPEN[:n])), 0)
        return len(self._held[:start].rstrip())
