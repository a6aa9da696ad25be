"""The tokenizer a GGUF file describes, built with the `tokenizers` package."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from prfaas.detokenizer import BYTE_OF_CHAR, CHAR_OF_BYTE
from prfaas.errors import ConfigError
from prfaas.gguf_file import GgufFile

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# How text is cut before merging, by `tokenizer.ggml.pre`; None is the GPT-2 pattern that the
# ByteLevel pre-tokeniser has built in. smollm, starcoder and refact also cut between digits, but
# no merge of theirs crosses one; we follow transformers, which leaves that step out.
_SPLITS: dict[str, str | None] = {
    "default": None,
    "gpt-2": None,
    "smollm": None,
    "starcoder": None,
    "refact": None,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "falcon3": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
}


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class GgufVocab:
    """A tokenizer and what else the file says of it; ids are None where the file names none.

    `unused_ids` pad the vocabulary to the model's size and stand for nothing.
    """

    backend: tokenizers.Tokenizer
    merges: list[tuple[str, str]]
    unused_ids: frozenset[int]
    special_tokens: dict[str, str]
    bos_id: int | None
    eos_ids: frozenset[int]
    add_bos: bool
    add_eos: bool
    chat_template: str | None


def read_vocab(file: GgufFile) -> GgufVocab:
    """Build the tokenizer of a GGUF file; raises ConfigError for kinds that are not supported."""
    metadata = file.scalars()
    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise ConfigError(
            f"{file.path}: tokenizer model {model!r} is not supported (supported: gpt2); "
            "use the model's Hugging Face directory",
            field="tokenizer.ggml.model",
        )
    pre = metadata.get("tokenizer.ggml.pre")
    if pre not in _SPLITS:
        raise ConfigError(
            f"{file.path}: pre-tokeniser {pre!r} is not supported "
            f"(supported: {', '.join(sorted(_SPLITS))})",
            field="tokenizer.ggml.pre",
        )
    tokens = [str(token) for token in file.array("tokenizer.ggml.tokens")]
    merges = [_pair(file, merge) for merge in file.array("tokenizer.ggml.merges")]
    types = file.array("tokenizer.ggml.token_type")
    if len(types) != len(tokens):
        raise ConfigError(f"{file.path}: {len(types)} token types for {len(tokens)} tokens")
    backend = _byte_level(tokens, merges, _SPLITS[pre], add_prefix_space=False)
    _add_tokens(backend, tokens, types)

    def token_id(name: str) -> int | None:
        value = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if value is not None and not 0 <= value < len(tokens):
            raise ConfigError(f"{file.path}: {name} token id {value} is out of range")
        return value

    named = {
        "bos_token": token_id("bos"),
        "eos_token": token_id("eos"),
        "unk_token": token_id("unknown"),
        "pad_token": token_id("padding"),
    }
    ends = (token_id("eos"), token_id("eot"), token_id("eom"))
    return GgufVocab(
        backend=backend,
        merges=merges,
        unused_ids=frozenset(i for i, kind in enumerate(types) if kind == TokenType.UNUSED),
        special_tokens={name: tokens[i] for name, i in named.items() if i is not None},
        bos_id=named["bos_token"],
        eos_ids=frozenset(end for end in ends if end is not None),
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
        add_eos=bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
        chat_template=metadata.get("tokenizer.chat_template"),
    )


def _pair(file: GgufFile, merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right) or " " in right:
        raise ConfigError(f"{file.path}: {merge!r} is not a merge of two tokens")
    return left, right


def _byte_level(
    tokens: list[str], merges: list[tuple[str, str]], split: str | None, add_prefix_space: bool
) -> tokenizers.Tokenizer:
    vocab = {_byte_spelling(token): index for index, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    pre_tokenizer: pre_tokenizers.PreTokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=add_prefix_space, use_regex=split is None
    )
    if split is not None:
        cut = pre_tokenizers.Split(Regex(split), behavior="isolated")
        pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizer])
    backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoders.ByteLevel()
    return backend


def _byte_spelling(token: str) -> str:
    """A token that is not in the byte alphabet is plain text: spell its bytes."""
    if all(char in BYTE_OF_CHAR for char in token):
        return token
    return "".join(CHAR_OF_BYTE[byte] for byte in token.encode())


def _add_tokens(backend: tokenizers.Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Control and user-defined tokens are found in text before anything is cut or merged."""
    added: dict[int, list[AddedToken]] = {TokenType.CONTROL: [], TokenType.USER_DEFINED: []}
    vocab = backend.get_vocab()
    for token, kind in zip(tokens, types, strict=True):
        # A token outside the byte alphabet was respelled above; adding it would make a new id.
        if kind in added and token in vocab:
            special = kind == TokenType.CONTROL
            added[kind].append(AddedToken(token, normalized=False, special=special))
    backend.add_special_tokens(added[TokenType.CONTROL])
    backend.add_tokens(added[TokenType.USER_DEFINED])
