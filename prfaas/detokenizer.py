"""Token ids to text, one id at a time, never showing half a character."""

from __future__ import annotations

import codecs
from typing import Protocol

import tokenizers

# What an unfinished or invalid UTF-8 sequence decodes to.
_REPLACEMENT = "\ufffd"
# A character has at most four bytes, so more tokens than this without one are not on the way to it.
_MAX_HELD_TOKENS = 4


def _byte_level_alphabet() -> dict[str, int]:
    """Byte-level BPE's spelling: printable Latin-1 stands for itself, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    spelling = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(0x100) if chr(byte) not in spelling)
    return spelling | {chr(0x100 + index): byte for index, byte in enumerate(others)}


BYTE_OF_CHAR = _byte_level_alphabet()
CHAR_OF_BYTE = {byte: char for char, byte in BYTE_OF_CHAR.items()}


def token_bytes(token: str) -> bytes:
    """The bytes a byte-level token stands for; one spelled in other characters is plain text."""
    try:
        return bytes(BYTE_OF_CHAR[char] for char in token)
    except KeyError:
        return token.encode()


class _Stream(Protocol):
    """Text that is certain after each token, and the rest at the end."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class IncrementalDetokenizer:
    """Owns the decoding state of one answer; nothing to close.

    The pieces, `flush` included, concatenate to what decoding all ids at once gives (vocabularies
    that are not byte-level: as long as that is valid text). A piece never ends inside a character:
    its bytes are held back until they are whole or proven invalid.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, special_ids: frozenset[int], skip_special: bool = True
    ) -> None:
        self._skipped = special_ids if skip_special else frozenset()
        byte_level = isinstance(backend.decoder, tokenizers.decoders.ByteLevel)
        self._stream: _Stream = _ByteLevelStream(backend) if byte_level else _WindowStream(backend)

    def push(self, token_id: int) -> str:
        """Text that became certain with this token, often "" or more than the token's own."""
        if token_id in self._skipped:
            return ""
        return self._stream.push(token_id)

    def flush(self) -> str:
        """What is still held back, unfinished bytes as U+FFFD; call once, at the end."""
        return self._stream.flush()


class _ByteLevelStream:
    """Byte-level vocabularies: tokens are bytes, and UTF-8 says which of them make a character."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        token = self._backend.id_to_token(token_id)
        return "" if token is None else self._decoder.decode(token_bytes(token))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _WindowStream:
    """Any other decoder: decode a few tokens back, so spaces and byte runs come out in context."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._window: list[int] = []
        # Tokens of the window whose text has been given out; they stay as context for the next.
        self._shown = 0

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._pending()
        held = len(self._window) - self._shown
        if text.endswith(_REPLACEMENT) and held < _MAX_HELD_TOKENS:
            return ""
        if not text:
            return ""
        self._window = self._window[self._shown :]
        self._shown = len(self._window)
        return text

    def flush(self) -> str:
        return self._pending()

    def _pending(self) -> str:
        shown = self._decode(self._window[: self._shown])
        return self._decode(self._window)[len(shown) :]

    def _decode(self, ids: list[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=False)
