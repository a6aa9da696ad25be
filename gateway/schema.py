"""Request bodies: parse what the gateway acts on, keep every other value byte for byte."""

from __future__ import annotations

import enum
from collections.abc import Hashable, Mapping
from functools import cache
from typing import Any, TypeVar, cast

import msgspec

from prfaas.errors import InvalidRequest

T = TypeVar("T")


class Api(enum.StrEnum):
    """The generating endpoints."""

    CHAT = "chat"
    COMPLETIONS = "completions"

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self is Api.CHAT else "/v1/completions"


class ParsedRequest:
    """One body: what we act on, and every top-level value as it came; nothing to close."""

    __slots__ = (
        "_decoded",
        "_fields",
        "_found",
        "api",
        "body",
        "cache_salt",
        "features",
        "max_tokens",
        "model",
        "ours",
        "stream",
        "transfer",
    )

    def __init__(
        self,
        api: Api,
        body: bytes,
        *,
        model: str | None,
        stream: bool,
        max_tokens: int,
        features: frozenset[str],
        cache_salt: str,
        transfer: dict[str, Any] | None,
        ours: bool,
        fields: Mapping[str, msgspec.Raw] | None = None,
        found: Mapping[str, msgspec.Raw] = {},
        decoded: dict[str, Any] | None = None,
    ) -> None:
        """`fields` are taken from the body when they are asked for, where they are None; `found`:
        some of them that were met already, empty where absent; `decoded`: some that were decoded.
        """
        self.api = api
        self.body = body
        self.model = model
        self.stream = stream
        self.max_tokens = max_tokens
        self.features = features
        """Things that forbid offload, as far as they show without looking into the prompt."""
        self.cache_salt = cache_salt
        self.transfer = transfer
        """`kv_transfer_params` of the client; only a trusted one's are looked at."""
        self.ours = ours
        """It has fields that only we may write."""
        self._fields = fields
        self._found = found
        self._decoded = decoded or {}

    @property
    def body_bytes(self) -> int:
        return len(self.body)

    @property
    def fields(self) -> Mapping[str, msgspec.Raw]:
        """Every top-level value as it came."""
        if self._fields is None:
            self._fields = top_level(self.body)
        return self._fields

    def has(self, name: str) -> bool:
        return name in self.fields

    def token_ids(self, name: str) -> list[int] | None:
        """A top-level field, where it is an array of nothing but whole numbers."""
        raw = self._found.get(name) or self.fields.get(name)
        if raw is None or bytes(memoryview(raw)[:1]) != b"[":
            return None
        try:
            return _WHOLE_NUMBERS.decode(raw)
        except msgspec.DecodeError:
            return None

    def decode(self, name: str, kind: type[T]) -> T | None:
        """A top-level field, None where absent or null. Raises InvalidRequest naming it."""
        if name in self._decoded:
            value = self._decoded.pop(name)  # whoever asks has it: it may be large
            if value is None or isinstance(value, kind):
                return value
        raw = self._found.get(name)
        if raw is None:
            return decode_field(self.fields, name, kind)
        return decode_field({name: raw}, name, kind) if memoryview(raw) else None


class _Common(msgspec.Struct):
    """Fields that we act on. The typical body has them of the right type, and none of the rest."""

    model: str | None = None
    stream: bool | None = None
    max_tokens: int | None = None
    n: int | None = None
    cache_salt: str | None = None
    prompt_logprobs: msgspec.UnsetType = msgspec.UNSET
    use_beam_search: msgspec.UnsetType = msgspec.UNSET
    kv_transfer_params: msgspec.UnsetType = msgspec.UNSET


class _Chat(_Common):
    messages: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    max_completion_tokens: int | None = None

    @property
    def has_prompt(self) -> bool:
        return bool(memoryview(self.messages))

    @property
    def found(self) -> dict[str, msgspec.Raw]:
        return {"messages": self.messages, "tools": self.tools}

    @property
    def decoded(self) -> dict[str, Any] | None:
        return None


class _WholeChat(_Common):
    messages: Any = msgspec.UNSET
    tools: Any = None
    max_completion_tokens: int | None = None

    @property
    def has_prompt(self) -> bool:
        return self.messages is not msgspec.UNSET

    @property
    def found(self) -> dict[str, msgspec.Raw]:
        return {}

    @property
    def decoded(self) -> dict[str, Any] | None:
        return {"messages": self.messages, "tools": self.tools}


class _Completion(_Common):
    prompt: msgspec.Raw = msgspec.Raw()
    max_completion_tokens = None
    echo: msgspec.UnsetType = msgspec.UNSET
    best_of: msgspec.UnsetType = msgspec.UNSET
    prompt_embeds: msgspec.UnsetType = msgspec.UNSET

    @property
    def has_prompt(self) -> bool:
        return bool(memoryview(self.prompt))

    @property
    def found(self) -> dict[str, msgspec.Raw]:
        return {"prompt": self.prompt}

    @property
    def decoded(self) -> dict[str, Any] | None:
        return None


_NO_FEATURES: frozenset[str] = frozenset()
_WHOLE_NUMBERS = msgspec.json.Decoder(list[int])
_CHAT = msgspec.json.Decoder(_Chat)
_WHOLE_CHAT = msgspec.json.Decoder(_WholeChat)
_COMPLETION = msgspec.json.Decoder(_Completion)


def parse(api: Api, body: bytes, whole: bool = False) -> ParsedRequest:
    """Raises InvalidRequest: not JSON, not an object, or a field we act on has the wrong type.

    `whole`: the messages of a chat will be asked for; going through them once is cheaper.
    """
    try:
        common: _Chat | _WholeChat | _Completion
        if api is Api.CHAT:
            common = (_WHOLE_CHAT if whole else _CHAT).decode(body)
        else:
            common = _COMPLETION.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _parse_fields(api, body)  # says what is wrong, or takes what is rare
    if not common.has_prompt or (common.n or 1) > 1:
        return _parse_fields(api, body)
    max_tokens = common.max_completion_tokens
    if max_tokens is None:
        max_tokens = common.max_tokens or 0
    return ParsedRequest(
        api,
        body,
        model=common.model,
        stream=bool(common.stream),
        max_tokens=max_tokens,
        features=_NO_FEATURES,
        cache_salt=common.cache_salt or "",
        transfer=None,
        ours=False,
        found=common.found,
        decoded=common.decoded,
    )


def _parse_fields(api: Api, body: bytes) -> ParsedRequest:
    """Field by field, so that an error names its own."""
    fields = top_level(body)
    max_tokens = decode_field(fields, "max_completion_tokens", int) if api is Api.CHAT else None
    if max_tokens is None:
        max_tokens = decode_field(fields, "max_tokens", int)
    _require_prompt(api, fields)
    return ParsedRequest(
        api,
        body,
        model=decode_field(fields, "model", str),
        stream=bool(decode_field(fields, "stream", bool)),
        max_tokens=max_tokens or 0,
        features=_features(api, fields),
        cache_salt=decode_field(fields, "cache_salt", str) or "",
        transfer=decode_field(fields, "kv_transfer_params", dict),
        ours="kv_transfer_params" in fields,
        fields=fields,
    )


def top_level(body: bytes) -> dict[str, msgspec.Raw]:
    """Every top-level value as it came. Raises InvalidRequest: not JSON, or not an object."""
    try:
        return msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError as exc:
        raise InvalidRequest("the body must be a JSON object") from exc
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise InvalidRequest(f"the body is not valid JSON: {exc}") from exc


def rewrite(
    parsed: ParsedRequest,
    transfer: Mapping[str, Any] | msgspec.Raw | None,
    cache_salt: str | None,
) -> bytes:
    """The body for the engine: the client's, less its transfer fields, with ours.

    `cache_salt` None leaves the field as the client sent it. A body that nothing is taken from
    goes on byte for byte, with what is ours before its last brace.
    """
    if cache_salt is None and not parsed.ours:
        if transfer is None:
            return parsed.body
        return parsed.body.rstrip(b" \t\r\n")[:-1] + (
            b',"kv_transfer_params":' + msgspec.json.encode(transfer) + b"}"
        )
    changed: dict[str, Any] = {k: v for k, v in parsed.fields.items() if k != "kv_transfer_params"}
    if cache_salt is not None:
        changed["cache_salt"] = cache_salt
    if transfer is not None:
        changed["kv_transfer_params"] = transfer
    return msgspec.json.encode(changed)


@cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind | None)


def decode_field(fields: Mapping[str, msgspec.Raw], name: str, kind: type[T]) -> T | None:
    """One of them, None where absent or null. Raises InvalidRequest naming it."""
    raw = fields.get(name)
    if raw is None:
        return None
    try:
        found: T | None = _decoder(cast(Hashable, kind)).decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise InvalidRequest(f"{name}: {exc}", param=name) from exc
    return found


def _require_prompt(api: Api, fields: Mapping[str, msgspec.Raw]) -> None:
    name = "messages" if api is Api.CHAT else "prompt"
    if name in fields or (api is Api.COMPLETIONS and "prompt_embeds" in fields):
        return
    raise InvalidRequest(f"{name}: this field is required", param=name)


def _features(api: Api, fields: Mapping[str, msgspec.Raw]) -> frozenset[str]:
    found: list[str] = []
    if decode_field(fields, "prompt_logprobs", int) is not None:
        found.append("prompt_logprobs")
    if (decode_field(fields, "n", int) or 1) > 1:
        found.append("n")
    if decode_field(fields, "use_beam_search", bool):
        found.append("beam_search")
    if api is Api.COMPLETIONS:
        if decode_field(fields, "echo", bool):
            found.append("echo")
        if (decode_field(fields, "best_of", int) or 1) > 1:
            found.append("best_of")
        if fields.get("prompt_embeds") is not None and bytes(fields["prompt_embeds"]) != b"null":
            found.append("prompt_embeds")
    return frozenset(found)
