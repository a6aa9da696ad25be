"""From body to token ids and block chains: an estimate, as P prefills the engine's own tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

import msgspec

from gateway.prompt_memory import PromptMemory
from gateway.schema import Api, ParsedRequest
from prfaas.errors import ContextTooLong, InvalidRequest
from prfaas.hashing import ID_BYTES, BlockHash, chain_on, ids_as_bytes, root_hash

BYTES_PER_TOKEN = 4
"""English text has 3.8 to 4.7 bytes a token; used where nothing was tokenised."""

INLINE_BYTES = 4096
"""Bodies up to this size take a millisecond or so; longer ones would stall the event loop."""

REMEMBERED_BYTES = 1 << 20
"""Bodies up to this size are decoded, and their template applied, on the event loop."""

_IDS = 1 << 32
"""More ids than any tokenizer has."""

Chains = Mapping[int, Sequence[BlockHash]]
"""Block hash chain of the prompt for each block size in use."""


class PromptTokenizer(Protocol):
    """What the gateway needs of `prfaas.tokens.Tokenizer`."""

    @property
    def keeps_words_apart(self) -> bool: ...

    def encode(self, text: str, add_special: bool = False) -> list[int]: ...

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str: ...


class Prompt(msgspec.Struct, frozen=True):
    """What is known of a prompt; `chains` is empty where it was not tokenised."""

    tokens: int
    features: frozenset[str] = frozenset()
    chains: Chains = {}
    tokenised: bool = False
    texts: Sequence[int] = ()
    """Blocks of its text (`TextBlocks`), where it was not tokenised and engines are compared."""


def guess(parsed: ParsedRequest, features: frozenset[str] = frozenset()) -> Prompt:
    """A prompt known only by its size."""
    return Prompt(max(1, parsed.body_bytes // BYTES_PER_TOKEN), features)


class Text(msgspec.Struct, frozen=True):
    """A prompt that has to be tokenised; `special`: with what the model wants around it."""

    text: str
    special: bool = False


class Tokeniser:
    """Owns one worker thread for long prompts; close it with `close`.

    Without a tokenizer only token arrays are exact, everything else is guessed from its size. What
    prompts have in common with earlier ones is not tokenised again, where that gives the same.
    """

    def __init__(self, tokenizer: PromptTokenizer | None, max_prompt_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._memory: PromptMemory | None = None
        self._adds_special = True
        if tokenizer is not None and tokenizer.keeps_words_apart:
            self._memory = PromptMemory()
            self._adds_special = bool(tokenizer.encode("", True))
        self._max_prompt_tokens = max_prompt_tokens
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenise")

    @property
    def memory(self) -> PromptMemory | None:
        """What is remembered of prompts; None where nothing can be."""
        return self._memory

    @property
    def available(self) -> bool:
        return self._tokenizer is not None

    def reads(self, body_bytes: int) -> bool:
        """It looks into chats of this size, on the event loop."""
        return self._memory is not None and INLINE_BYTES < body_bytes <= REMEMBERED_BYTES

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    async def prompt(self, parsed: ParsedRequest, block_sizes: frozenset[int], salt: str) -> Prompt:
        """Tokenise and hash. Raises InvalidRequest for a prompt of the wrong type or length."""
        if self._tokenizer is None and parsed.api is Api.CHAT:
            return guess(parsed)  # whatever is in it: the engine is to judge that
        if self._memory is not None and self.reads(parsed.body_bytes):
            return await self._remembered(self._memory, parsed, block_sizes, salt)
        if parsed.body_bytes <= INLINE_BYTES:
            return self._prompt(parsed, block_sizes, salt)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._prompt, parsed, block_sizes, salt)

    def _prompt(self, parsed: ParsedRequest, block_sizes: frozenset[int], salt: str) -> Prompt:
        ids, feature = self.token_ids(parsed)
        if ids is None:
            return guess(parsed, frozenset([feature] if feature else []))
        self._check_length(parsed, len(ids))
        prefix, root = ids_as_bytes(ids)[:-ID_BYTES], root_hash(salt)  # D computes the last token
        chains = {size: chain_on(root, prefix, size)[0] for size in block_sizes if size > 0}
        return Prompt(len(ids), chains=chains, tokenised=True)

    async def _remembered(
        self, memory: PromptMemory, parsed: ParsedRequest, block_sizes: frozenset[int], salt: str
    ) -> Prompt:
        """Only what no earlier prompt began with is tokenised and hashed; much of it on the thread,
        for here it would stall the event loop."""
        loop = asyncio.get_running_loop()
        try:
            text = self._text(parsed)
        except _NotTokenised as exc:
            return guess(parsed, frozenset([exc.feature]))
        if not isinstance(text, Text) or (text.special and self._adds_special):
            return await loop.run_in_executor(self._thread, self._prompt, parsed, block_sizes, salt)
        assert self._tokenizer is not None
        walk = memory.walk(text.text)
        work = partial(walk.work, self._tokenizer.encode, block_sizes, salt)
        try:
            if walk.unknown_chars <= INLINE_BYTES:
                count, chains = work()
            else:
                count, chains = await loop.run_in_executor(self._thread, work)
        except InvalidRequest:
            if parsed.api is not Api.CHAT:
                raise
            return guess(parsed, frozenset(["template"]))
        memory.keep(walk)
        self._check_length(parsed, count)
        return Prompt(count, chains=chains, tokenised=True)

    def _check_length(self, parsed: ParsedRequest, tokens: int) -> None:
        if tokens > self._max_prompt_tokens:
            name = "messages" if parsed.api is Api.CHAT else "prompt"
            raise ContextTooLong(
                f"{name}: the prompt has {tokens} tokens, more than the "
                f"{self._max_prompt_tokens} that are accepted",
                param=name,
            )

    async def ids(self, parsed: ParsedRequest) -> list[int]:
        """Token ids alone, on the worker thread. Raises InvalidRequest where there are none."""
        loop = asyncio.get_running_loop()
        ids, feature = await loop.run_in_executor(self._thread, self.token_ids, parsed)
        if ids is None:
            raise InvalidRequest(
                f"the prompt cannot be tokenised here: {feature or 'no tokenizer'}"
            )
        return ids

    def token_ids(self, parsed: ParsedRequest) -> tuple[list[int] | None, str]:
        """Token ids, or None and the feature that stands in the way (empty: no tokenizer)."""
        try:
            text = self._text(parsed)
        except _NotTokenised as exc:
            return None, exc.feature
        if not isinstance(text, Text):
            return text, ""
        assert self._tokenizer is not None
        try:
            return self._tokenizer.encode(text.text, text.special), ""
        except InvalidRequest:
            if parsed.api is not Api.CHAT:
                raise
            return None, "template"  # as with chats that our template refuses

    def _text(self, parsed: ParsedRequest) -> Text | list[int] | None:
        """What is to be tokenised, or token ids that came as such; None without a tokenizer."""
        return self._chat(parsed) if parsed.api is Api.CHAT else self._completion(parsed)

    def _chat(self, parsed: ParsedRequest) -> Text | None:
        messages = parsed.decode("messages", list)
        tools = parsed.decode("tools", list)
        if messages is None or not all(isinstance(m, dict) for m in messages):
            raise InvalidRequest("messages: must be a list of objects", param="messages")
        if any(_has_other_parts(message.get("content")) for message in messages):
            raise _NotTokenised("multimodal")
        if self._tokenizer is None:
            return None
        try:
            return Text(self._tokenizer.render_chat(messages, tools))
        except InvalidRequest as exc:
            # Refusing a chat is the engine's job; our template may differ from its own.
            raise _NotTokenised("template") from exc

    def _completion(self, parsed: ParsedRequest) -> Text | list[int] | None:
        ids = parsed.token_ids("prompt")
        if ids is not None:  # none of them has to be looked at one by one
            return ids if not ids or 0 <= min(ids) <= max(ids) < _IDS else _token_array(ids)
        prompt = parsed.decode("prompt", str | list)  # type: ignore[arg-type]
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
            if len(prompt) > 1:
                raise _NotTokenised("batch")
            prompt = prompt[0]
        if isinstance(prompt, list):
            return _token_array(prompt)
        if prompt is None:
            raise _NotTokenised("prompt_embeds")
        if self._tokenizer is None:
            return None
        return Text(prompt, parsed.decode("add_special_tokens", bool) is not False)


class _NotTokenised(Exception):
    """The prompt is not plain text; `feature` is the reason label that keeps it local."""

    def __init__(self, feature: str) -> None:
        super().__init__(feature)
        self.feature = feature


def _has_other_parts(content: object) -> bool:
    """True where a message's content has parts that are not text."""
    if not isinstance(content, list):
        return False
    return any(not isinstance(part, dict) or part.get("type") != "text" for part in content)


def _token_array(prompt: list[Any]) -> list[int]:
    if not prompt or (set(map(type, prompt)) == {int} and 0 <= min(prompt) <= max(prompt) < _IDS):
        return prompt
    wrong = next(token for token in prompt if type(token) is not int or not 0 <= token < _IDS)
    raise InvalidRequest(
        f"prompt: a token array has ids of 0 or more, not {wrong!r}"[:200], param="prompt"
    )
