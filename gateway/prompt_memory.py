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
from prfaas.word_bounds import LOOK_AHEAD, next_cut

PIECE_CHARS = 2048
TAIL_CHARS = (512, 128, 32)
"""Of the pieces of what is left at the end, so that little of it is to be done again."""
SIZES = (PIECE_CHARS, *TAIL_CHARS)
MAX_PIECES = 4096
"""Of all texts; with hashes for MAX_SALTS one of English text takes 19 KB, so 77 MB in all."""
WHOLE_EVERY = 16
"""Pieces; so a long chain is put together from few parts."""
MAX_SALTS = 4
"""Hashes that are kept of a piece, by block size and salt."""


_Chain = tuple[list[BlockHash], BlockHash, bytes, list[BlockHash]]
"""Hashes of the blocks that end in a piece, the last of them, ids of the block begun, and of every
so many pieces the hashes of all blocks until then."""


class _Piece:
    """One piece after one beginning. `text` goes on to what is looked at to cut there, so whatever
    goes on with all of it has this piece too.
    """

    __slots__ = (
        "before", "chains", "chars", "ids", "moved", "next", "number", "size", "text", "tokens"
    )  # fmt: skip

    def __init__(self, text: str, chars: int, size: int) -> None:
        self.text = text
        self.chars = chars
        self.size = size
        """Which of SIZES."""
        self.ids = b""
        """Its tokens as they are hashed."""
        self.tokens = 0
        """With all before it."""
        self.number = 0
        self.moved = 0
        self.before: _Piece | None = None
        self.next: list[_Piece | None] = [None] * len(SIZES)
        """What last followed, of each size: most texts are the next turn of a known one."""
        self.chains: dict[tuple[int, str], _Chain] = {}


class Walk(msgspec.Struct):
    """A text, as far as it is known, its other pieces in order, and what is left, which is not
    kept, because what follows may belong to its last word.
    """

    pieces: list[_Piece]
    made: list[_Piece]
    last: str
    unknown_chars: int

    def work(
        self, encode: Callable[[str], list[int]], block_sizes: Iterable[int], salt: str
    ) -> tuple[int, dict[int, list[BlockHash]]]:
        """Tokenise and hash the rest, on any thread: how many tokens there are, and for each size
        the hashes of the blocks before the last token.
        """
        count = self.pieces[-1].tokens if self.pieces else 0
        for piece in self.made:
            piece.ids = ids_as_bytes(encode(piece.text[: piece.chars]))
            count += len(piece.ids) // ID_BYTES
            piece.tokens = count
        ids = encode(self.last)
        pieces, end = self.pieces + self.made, ids_as_bytes(ids[:-1])
        chains = {size: _chain(pieces, end, size, salt) for size in block_sizes if size > 0}
        return count + len(ids), chains


class PromptMemory:
    """Owns the pieces of recent texts, the least recently used go first; nothing to close."""

    def __init__(self, max_pieces: int = MAX_PIECES) -> None:
        self._max_pieces = max_pieces
        self._pieces: OrderedDict[tuple[int, str], _Piece] = OrderedDict()
        self._root = _Piece("", 0, 0)
        self._numbers = self._moves = 0
        self.known_chars = self.new_chars = 0
        """Of all texts so far: what was remembered of them, and what was not."""

    def __len__(self) -> int:
        return len(self._pieces)

    def walk(self, text: str) -> Walk:
        """What is known of its beginning."""
        found: list[_Piece] = []
        piece, at, size = self._root, 0, 0
        while True:
            following = piece.next[size]
            if following is None or not text.startswith(following.text, at):
                cut = next_cut(text, at + SIZES[size])
                if cut is None:
                    size += 1
                    if size == len(SIZES):
                        break
                    continue
                following = self._pieces.get((piece.number, text[at : cut + LOOK_AHEAD]))
                if following is None:
                    break
                piece.next[size] = following
            found.append(following)
            piece = following
            at += following.chars
        self._used(found)
        self.known_chars += at
        self.new_chars += len(text) - at
        made, end = _cut(text, at, size)
        return Walk(found, made, text[end:], len(text) - at)

    def keep(self, walk: Walk) -> None:
        """What was made of a text's pieces is known from now on."""
        before = walk.pieces[-1] if walk.pieces else self._root
        pieces = walk.pieces.copy()
        for piece in walk.made:
            known = self._pieces.setdefault((before.number, piece.text), piece)
            if known is piece:
                self._numbers += 1
                piece.number, piece.before = self._numbers, before
            before.next[piece.size] = known
            before = known
            pieces.append(known)
        if walk.made:
            self._move(pieces)
        while len(self._pieces) > self._max_pieces:
            self._forget(self._pieces.popitem(last=False)[1])

    def _used(self, pieces: Sequence[_Piece]) -> None:
        """They are moved, but not each time, as long as far fewer have moved since than there is
        room for.
        """
        if pieces and self._moves - pieces[-1].moved >= self._max_pieces // 8:
            self._move(pieces)  # those before the last were used whenever it was

    def _move(self, pieces: Sequence[_Piece]) -> None:
        """From the end that is forgotten, the first ones farthest: nothing is of use without what
        stands before it, or holds what is forgotten.
        """
        for piece in reversed(pieces):
            assert piece.before is not None
            key = (piece.before.number, piece.text)
            if key in self._pieces:  # else it was forgotten while a thread was at work
                self._moves += 1
                piece.moved = self._moves
                self._pieces.move_to_end(key)

    @staticmethod
    def _forget(piece: _Piece) -> None:
        before = piece.before
        if before is not None and before.next[piece.size] is piece:
            before.next[piece.size] = None


def _cut(text: str, at: int, size: int) -> tuple[list[_Piece], int]:
    """New pieces of a text from there on, and where what is left begins. Where it is cut depends on
    what stands before and the LOOK_AHEAD characters that follow.
    """
    made: list[_Piece] = []
    while size < len(SIZES):
        cut = next_cut(text, at + SIZES[size])
        if cut is None:
            size += 1
        else:
            made.append(_Piece(text[at : cut + LOOK_AHEAD], cut - at, size))
            at = cut
    return made, at


def _chain(pieces: Sequence[_Piece], end: bytes, size: int, salt: str) -> list[BlockHash]:
    key = (size, salt)
    at = len(pieces) // WHOLE_EVERY * WHOLE_EVERY
    known = pieces[at - 1].chains.get(key) if at else None
    if known is None:
        at, known = 0, ([], root_hash(salt), b"", [])
    _, parent, left, whole = known
    chain = whole.copy()
    for number, piece in enumerate(pieces[at:], at + 1):
        known = piece.chains.get(key)
        if known is None:
            hashes, left = chain_on(parent, left + piece.ids, size)
            whole = [] if number % WHOLE_EVERY else chain + hashes
            known = piece.chains[key] = (hashes, hashes[-1] if hashes else parent, left, whole)
            if len(piece.chains) > MAX_SALTS:  # another thread may do the same
                piece.chains.pop(next(iter(piece.chains)), None)
        hashes, parent, left, _ = known
        chain += hashes
    return chain + chain_on(parent, left + end, size)[0]
