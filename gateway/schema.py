"""Request bodies: parse what the gateway acts on, keep every other value byte for byte."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

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


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """One body. `fields` has every top-level value as it came; the rest is what we act on."""

    api: Api
    fields: Mapping[str, msgspec.Raw]
    body_bytes: int
    model: str | None
    stream: bool
    max_tokens: int
    features: frozenset[str]
    """Things that forbid offload, as far as they show without looking into the prompt."""
    cache_salt: str
    transfer: dict[str, Any] | None = field(repr=False)
    """`kv_transfer_params` of the client; only a trusted one's are looked at."""

    def has(self, name: str) -> bool:
        return name in self.fields

    def decode(self, name: str, kind: type[T]) -> T | None:
        """A top-level field, None where absent or null. Raises InvalidRequest naming it."""
        return _decode(self.fields, name, kind)


def parse(api: Api, body: bytes) -> ParsedRequest:
    """Raises InvalidRequest: not JSON, not an object, or a field we act on has the wrong type."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError as exc:
        raise InvalidRequest("the body must be a JSON object") from exc
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise InvalidRequest(f"the body is not valid JSON: {exc}") from exc
    max_tokens = _decode(fields, "max_completion_tokens", int) if api is Api.CHAT else None
    if max_tokens is None:
        max_tokens = _decode(fields, "max_tokens", int)
    _require_prompt(api, fields)
    return ParsedRequest(
        api=api,
        fields=fields,
        body_bytes=len(body),
        model=_decode(fields, "model", str),
        stream=bool(_decode(fields, "stream", bool)),
        max_tokens=max_tokens or 0,
        features=_features(api, fields),
        cache_salt=_decode(fields, "cache_salt", str) or "",
        transfer=_decode(fields, "kv_transfer_params", dict),
    )


def rewrite(
    parsed: ParsedRequest, transfer: Mapping[str, Any] | None, cache_salt: str | None
) -> bytes:
    """The body for the engine: the client's, less its transfer fields, with ours.

    `cache_salt` None leaves the field as the client sent it.
    """
    changed: dict[str, Any] = {k: v for k, v in parsed.fields.items() if k != "kv_transfer_params"}
    if cache_salt is not None:
        changed["cache_salt"] = cache_salt
    if transfer is not None:
        changed["kv_transfer_params"] = transfer
    return msgspec.json.encode(changed)


def _decode(fields: Mapping[str, msgspec.Raw], name: str, kind: type[T]) -> T | None:
    raw = fields.get(name)
    if raw is None:
        return None
    try:
        return msgspec.json.decode(raw, type=kind | None)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise InvalidRequest(f"{name}: {exc}", param=name) from exc


def _require_prompt(api: Api, fields: Mapping[str, msgspec.Raw]) -> None:
    name = "messages" if api is Api.CHAT else "prompt"
    if name in fields or (api is Api.COMPLETIONS and "prompt_embeds" in fields):
        return
    raise InvalidRequest(f"{name}: this field is required", param=name)


def _features(api: Api, fields: Mapping[str, msgspec.Raw]) -> frozenset[str]:
    found: list[str] = []
    if _decode(fields, "prompt_logprobs", int) is not None:
        found.append("prompt_logprobs")
    if (_decode(fields, "n", int) or 1) > 1:
        found.append("n")
    if _decode(fields, "use_beam_search", bool):
        found.append("beam_search")
    if api is Api.COMPLETIONS:
        if _decode(fields, "echo", bool):
            found.append("echo")
        if (_decode(fields, "best_of", int) or 1) > 1:
            found.append("best_of")
        if fields.get("prompt_embeds") is not None and bytes(fields["prompt_embeds"]) != b"null":
            found.append("prompt_embeds")
    return frozenset(found)
