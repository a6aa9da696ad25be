"""Log-probabilities in OpenAI's two shapes: that of chats and the older one of completions."""

from __future__ import annotations

import msgspec

from local_engine.http.text import Piece
from prfaas.tokens import Tokenizer


class TokenLogprob(msgspec.Struct):
    """`token` is the text of `bytes`, or its escapes where they are only part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class ChatToken(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatToken]
    refusal: None = None


class TextLogprobs(msgspec.Struct):
    """`top_logprobs`: the most likely tokens and the one drawn. `text_offset`: in the answer."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


def chat_logprobs(piece: Piece, tokenizer: Tokenizer) -> ChatLogprobs | None:
    """Of every token the piece counts, the one that ends an answer included; None if not asked."""
    if not piece.logprobs:
        return None

    def entry(token_id: int, logprob: float) -> TokenLogprob:
        raw = tokenizer.token_bytes(token_id)
        return TokenLogprob(_text(raw), logprob, list(raw))

    content = []
    for token_id, logprobs in zip(piece.token_ids, piece.logprobs, strict=True):
        own = entry(token_id, logprobs.logprob)
        top = [entry(*one) for one in logprobs.top]
        content.append(ChatToken(own.token, own.logprob, own.bytes, top))
    return ChatLogprobs(content)


def text_logprobs(piece: Piece, tokenizer: Tokenizer) -> TextLogprobs | None:
    """The same for completions."""
    if not piece.logprobs:
        return None

    def name(token_id: int) -> str:
        return _text(tokenizer.token_bytes(token_id), "bytes:")

    found = TextLogprobs([], [], [], list(piece.offsets))
    for token_id, logprobs in zip(piece.token_ids, piece.logprobs, strict=True):
        found.tokens.append(name(token_id))
        found.token_logprobs.append(logprobs.logprob)
        top = {name(other): logprob for other, logprob in logprobs.top}
        found.top_logprobs.append(top | {name(token_id): logprobs.logprob})
    return found


def _text(raw: bytes, mark: str = "") -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return mark + "".join(f"\\x{byte:02x}" for byte in raw)
