"""Tokenizer of a served model, for gateway and engine; loads without torch or transformers."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import tokenizers
from tokenizers.processors import TemplateProcessing

from prfaas.chat_template import ChatTemplate, Message
from prfaas.detokenizer import IncrementalDetokenizer, token_bytes
from prfaas.errors import ConfigError, InvalidRequest
from prfaas.gguf_file import GgufFile
from prfaas.gguf_vocab import read_vocab
from prfaas.word_bounds import keeps_words_apart

__all__ = ["IncrementalDetokenizer", "Tokenizer"]

# How vocabularies that are not byte-level spell a byte of a character they lack.
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """Text to token ids and back, and chat messages to a prompt; immutable, nothing to close.

    `digest` names vocabulary, merges and special tokens; it is the same for a Hugging Face
    directory and a GGUF file of one tokenizer. `vocab_size` is the highest id + 1. `eos_ids` are
    all the tokens that end an answer. `keeps_words_apart`: a text cut between words has the same
    tokens in pieces (`prfaas.word_bounds`).
    """

    vocab_size: int
    bos_id: int | None
    eos_ids: frozenset[int]
    special_ids: frozenset[int]
    digest: str
    keeps_words_apart: bool
    _backend: tokenizers.Tokenizer = field(repr=False)
    _template: ChatTemplate = field(repr=False)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Load from a Hugging Face directory or a `.gguf` file; ConfigError says what is wrong."""
        try:
            if path.is_dir():
                return cls._from_directory(path)
            if path.is_file() and path.suffix == ".gguf":
                return cls.from_gguf(GgufFile(path))
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
        raise ConfigError(f"{path} is neither a model directory nor a .gguf file")

    @classmethod
    def from_gguf(cls, file: GgufFile) -> Self:
        """Build from an open GGUF file."""
        vocab = read_vocab(file)
        template = {} if vocab.chat_template is None else {"default": vocab.chat_template}
        _set_affixes(vocab.backend, vocab.special_tokens, vocab.add_bos, vocab.add_eos)
        return cls._build(
            vocab.backend,
            merges=vocab.merges,
            unused_ids=vocab.unused_ids,
            bos_id=vocab.bos_id,
            eos_ids=vocab.eos_ids,
            template=ChatTemplate(template, vocab.special_tokens),
        )

    @classmethod
    def _from_directory(cls, directory: Path) -> Self:
        path = directory / "tokenizer.json"
        raw = _read_json(path)
        try:
            backend = tokenizers.Tokenizer.from_str(json.dumps(raw))
        except Exception as error:  # the package raises bare Exception
            raise ConfigError(f"{path} is not a tokenizer: {error}") from error
        settings = _read_json(directory / "tokenizer_config.json", missing_ok=True)
        named = {
            name: text
            for name in _NAMED_TOKENS
            if (text := _token_text(settings.get(name))) is not None
        }
        if "add_bos_token" in settings or "add_eos_token" in settings:
            add_bos, add_eos = (bool(settings.get(f"add_{name}_token")) for name in ("bos", "eos"))
            _set_affixes(backend, named, add_bos, add_eos)
        eos_ids = set(_eos_ids_of_model(directory))
        if "eos_token" in named:
            eos_ids.add(_id_of(backend, named["eos_token"]))
        return cls._build(
            backend,
            merges=[_merge_pair(merge) for merge in raw["model"].get("merges", ())],
            unused_ids=frozenset(),
            bos_id=_id_of(backend, named["bos_token"]) if "bos_token" in named else None,
            eos_ids=frozenset(eos_ids),
            template=ChatTemplate(_template_sources(directory, settings), named),
        )

    @classmethod
    def _build(
        cls,
        backend: tokenizers.Tokenizer,
        *,
        merges: Sequence[tuple[str, str]],
        unused_ids: frozenset[int],
        bos_id: int | None,
        eos_ids: frozenset[int],
        template: ChatTemplate,
    ) -> Self:
        backend.no_truncation()
        backend.no_padding()
        vocab = backend.get_vocab(with_added_tokens=True)
        special_ids = frozenset(
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        )
        used = {token: token_id for token, token_id in vocab.items() if token_id not in unused_ids}
        return cls(
            vocab_size=max(vocab.values()) + 1,
            bos_id=bos_id,
            eos_ids=eos_ids,
            special_ids=special_ids,
            digest=_digest(used, merges, special_ids),
            keeps_words_apart=keeps_words_apart(backend),
            _backend=backend,
            _template=template,
        )

    def encode(self, text: str, add_special: bool = False) -> list[int]:
        """Token ids of `text`; `add_special` adds what the model wants around a bare prompt.

        Special tokens spelled out in the text become those tokens. Other threads run meanwhile.
        Raises InvalidRequest for text that is not valid Unicode (a lone surrogate).
        """
        try:
            # The single-text call would hold the GIL for tens of milliseconds on a long prompt.
            encodings = self._backend.encode_batch_fast([text], add_special_tokens=add_special)
        except (TypeError, UnicodeEncodeError) as error:
            raise InvalidRequest("text has a lone surrogate and cannot be tokenised") from error
        ids: list[int] = encodings[0].ids
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of all ids at once; bytes that are not UTF-8 become U+FFFD."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special)

    def detokenizer(self, skip_special: bool = True) -> IncrementalDetokenizer:
        """A fresh decoder for one answer that arrives token by token."""
        return IncrementalDetokenizer(self._backend, self.special_ids, skip_special)

    def to_json(self) -> str:
        """As a `tokenizer.json`; its chat template is not part of that."""
        return self._backend.to_str()

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for, of a special one its name; empty for an id without a token."""
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self.special_ids:
            return token.encode()
        if isinstance(self._backend.decoder, tokenizers.decoders.ByteLevel):
            return token_bytes(token)
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes.fromhex(byte[1]) if byte else token.replace("\u2581", " ").encode()

    def token_is_special(self, token_id: int) -> bool:
        return token_id in self.special_ids

    @property
    def tool_template(self) -> str | None:
        """Text of the chat template that renders tools; None if there is none that does."""
        return self._template.tool_source

    def render_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> str:
        """The prompt text of a chat; raises InvalidRequest if the template refuses the messages."""
        return self._template.render(messages, tools, add_generation_prompt, **template_kwargs)

    def encode_chat(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """Token ids of a chat prompt that ends where the assistant is to answer."""
        return self.encode(self.render_chat(messages, tools))


def _digest(
    vocab: Mapping[str, int], merges: Iterable[tuple[str, str]], special_ids: frozenset[int]
) -> str:
    """Hashed as bytes, so that two spellings of one vocabulary agree."""
    hasher = hashlib.blake2b(digest_size=16)

    def add(part: bytes) -> None:
        hasher.update(len(part).to_bytes(4, "little") + part)

    for token, token_id in sorted(vocab.items(), key=lambda item: item[1]):
        add(token_id.to_bytes(4, "little"))
        add(token_bytes(token))
    for left, right in merges:
        add(token_bytes(left))
        add(token_bytes(right))
    for token_id in sorted(special_ids):
        add(token_id.to_bytes(4, "little"))
    return hasher.hexdigest()


def _set_affixes(
    backend: tokenizers.Tokenizer, named: Mapping[str, str], add_bos: bool, add_eos: bool
) -> None:
    """What `add_special` adds: the begin token before and the end token after, where asked for."""
    wanted = {"bos_token": add_bos, "eos_token": add_eos}
    for name, add in wanted.items():
        if add and name not in named:
            raise ConfigError(f"the tokenizer is to add {name}, but names none", field=name)
    before = [named["bos_token"]] if add_bos else []
    after = [named["eos_token"]] if add_eos else []
    backend.post_processor = TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *(f"{text}:1" for text in before), "$B:1"],
        special_tokens=[(text, _id_of(backend, text)) for text in {*before, *after}],
    )


def _template_sources(directory: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name; a file of its own wins over tokenizer_config.json."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return {"default": path.read_text(encoding="utf-8")}
    template = settings.get("chat_template")
    if template is None:
        return {}
    if isinstance(template, str):
        return {"default": template}
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in template}
    except (TypeError, KeyError) as error:
        raise ConfigError(
            f"{directory}: chat_template is neither text nor a list of named templates",
            field="chat_template",
        ) from error


def _eos_ids_of_model(directory: Path) -> Iterable[int]:
    """End tokens that generation_config.json and config.json name, one or several."""
    for name in ("generation_config.json", "config.json"):
        value = _read_json(directory / name, missing_ok=True).get("eos_token_id")
        if isinstance(value, int):
            yield value
        elif isinstance(value, list):
            yield from (int(token_id) for token_id in value)


def _token_text(value: Any) -> str | None:
    """A special token is spelled as text, or as an object with its text under `content`."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _id_of(backend: tokenizers.Tokenizer, token: str) -> int:
    token_id = backend.token_to_id(token)
    if token_id is None:
        raise ConfigError(f"special token {token!r} is not in the vocabulary")
    return token_id


def _merge_pair(merge: str | list[str]) -> tuple[str, str]:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right


def _read_json(path: Path, missing_ok: bool = False) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if missing_ok:
            return {}
        raise ConfigError(f"{path} does not exist") from error
    except (ValueError, OSError) as error:
        raise ConfigError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return value
