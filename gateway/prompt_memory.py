"""Tokens and block hashes of texts that begin as earlier ones did, without doing them again.

A text is cut between words, about every PIECE_CHARS, from its beginning on, and its last part
finer: equal beginnings are cut alike. The hashes of a piece depend on all that stands before it,
and its tokens on nothing but itself where the tokenizer keeps words apart (`prfaas.word_bounds`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

import msgspec

from prfaas.hashing import ID_BYTES, BlockHash, chain_on, ids_as_bytes, root_hash
from prfaas.word_bounds import next_cut

PIECE_CHARS = 2048
TAIL_CHARS = (512, 128)
"""Of the pieces of what is left at the end, so that little of it is to be done again."""
MAX_PIECES = 4096
"""Of all texts; with hashes for MAX_SALTS one of English text takes 19 KB, so 77 MB in all."""
MAX_SALTS = 4
"""Hashes that are kept of a piece, by block size and salt."""


class _Piece:
    """One piece after one beginning. `ids` are its tokens as they are hashed."""

    __slots__ = ("chains", "ids", "number", "text")

    def __init__(self, text: str, ids: bytes) -> None:
        self.text = text
        self.ids = ids
        self.number = 0
        self.chains: dict[tuple[int, str], tuple[list[BlockHash], BlockHash, bytes]] = {}
        """Hashes of the blocks that end in it, the last of them, and ids of the block begun."""


class Walk(msgspec.Struct):
    """A text, as far as it is known, and its other pieces in order; the last of them is not kept,
    because what follows may belong to its last word.
    """

    pieces: list[_Piece]
    rest: list[str]
    made: list[_Piece] = []

    @property
    def unknown_chars(self) -> int:
        return sum(map(len, self.rest))

    def work(
        self, encode: Callable[[str], list[int]], block_sizes: Iterable[int], salt: str
    ) -> tuple[int, dict[int, list[BlockHash]]]:
        """Tokenise and hash the rest, on any thread: how many tokens there are, and for each size
        the hashes of the blocks before the last token.
        """
        *kept, last = self.rest
        self.made = [_Piece(text, ids_as_bytes(encode(text))) for text in kept]
        ids = encode(last)
        pieces = [*self.pieces, *self.made]
        count = sum(len(piece.ids) for piece in pieces) // ID_BYTES + len(ids)
        end = ids_as_bytes(ids[:-1])
        return count, {size: _chain(pieces, end, size, salt) for size in block_sizes if size > 0}


class PromptMemory:
    """Owns the pieces of recent texts, the least recently used go first; nothing to close."""

    def __init__(self, max_pieces: int = MAX_PIECES) -> None:
        self._max_pieces = max_pieces
        self._pieces: OrderedDict[tuple[int, str], _Piece] = OrderedDict()
        self._numbers = 0
        self.known_chars = self.new_chars = 0
        """Of all texts so far: what was remembered of them, and what was not."""

    def __len__(self) -> int:
        return len(self._pieces)

    def walk(self, text: str) -> Walk:
        """What is known of its beginning."""
        found: list[_Piece] = []
        rest: list[str] = []
        start, number, known_chars = 0, 0, 0
        for end in _cuts(text):
            piece = text[start:end]
            start = end
            known = None if rest else self._pieces.get((number, piece))
            if known is None:
                rest.append(piece)
                continue
            self._pieces.move_to_end((number, piece))
            found.append(known)
            number, known_chars = known.number, end
        self.known_chars += known_chars
        self.new_chars += len(text) - known_chars
        return Walk(found, [*rest, text[start:]])

    def keep(self, walk: Walk) -> None:
        """What was made of a text's pieces is known from now on."""
        number = walk.pieces[-1].number if walk.pieces else 0
        for piece in walk.made:
            known = self._pieces.setdefault((number, piece.text), piece)
            if known is piece:
                self._numbers += 1
                piece.number = self._numbers
            number = known.number
        while len(self._pieces) > self._max_pieces:
            self._pieces.popitem(last=False)


def _chain(pieces: Sequence[_Piece], end: bytes, size: int, salt: str) -> list[BlockHash]:
    key = (size, salt)
    chain: list[BlockHash] = []
    parent, left = root_hash(salt), b""
    for piece in pieces:
        known = piece.chains.get(key)
        if known is None:
            hashes, left = chain_on(parent, left + piece.ids, size)
            known = piece.chains[key] = (hashes, hashes[-1] if hashes else parent, left)
            if len(piece.chains) > MAX_SALTS:  # another thread may do the same
                piece.chains.pop(next(iter(piece.chains)), None)
        chain += known[0]
        _, parent, left = known
    return chain + chain_on(parent, left + end, size)[0]


def _cuts(text: str) -> Iterable[int]:
    """Where it is cut, which depends on what stands before and the two characters that follow."""
    at = 0
    for size in (PIECE_CHARS, *TAIL_CHARS):
        while (cut := next_cut(text, at + size)) is not None:
            yield cut
            at = cut
