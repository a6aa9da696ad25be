"""Requests that the gateway passes on undecided: which there are, and their bodies."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.schema import decode_field, top_level
from gateway.tenancy.door import ANYBODY, Visit
from gateway.trace import Trace
from prfaas.errors import InvalidRequest


class PassedApi(enum.StrEnum):
    """Endpoints that an engine may have, and the gateway has where one of its engines does."""

    RESPONSES = "responses"
    EMBEDDINGS = "embeddings"
    TOKENIZE = "tokenize"
    DETOKENIZE = "detokenize"

    @property
    def path(self) -> str:
        of_openai = self in (PassedApi.RESPONSES, PassedApi.EMBEDDINGS)
        return f"/v1/{self.value}" if of_openai else f"/{self.value}"

    @property
    def salted(self) -> bool:
        """Engines keep what they computed for it, so tenants must not share it."""
        return self in (PassedApi.RESPONSES, PassedApi.EMBEDDINGS)


class PassedInbound(msgspec.Struct, frozen=True):
    """One client request, off the wire. `passed_headers` go on to the engine as they are."""

    request_id: str
    api: PassedApi
    trace: Trace
    body: bytes
    salt_header: str = ""
    passed_headers: Mapping[str, str] = {}
    visit: Visit = ANYBODY


class PassedBody:
    """One body: what we act on, and every top-level value as it came; nothing to close."""

    __slots__ = ("_body", "_fields", "api", "cache_salt", "model", "stream", "strips")

    def __init__(self, api: PassedApi, body: bytes, engines: int) -> None:
        """`engines`: so many could answer. Raises InvalidRequest naming the field: not JSON, the
        wrong type, or a wish for what an engine remembers, where nobody knows which one does.
        """
        self.api = api
        self._body = body
        self._fields = fields = top_level(body)
        self.model = decode_field(fields, "model", str)
        self.stream = api is PassedApi.RESPONSES and bool(decode_field(fields, "stream", bool))
        self.cache_salt = (decode_field(fields, "cache_salt", str) or "") if api.salted else ""
        self.strips = "kv_transfer_params" in fields
        if api is PassedApi.RESPONSES:
            _refuse_memory(fields, engines)

    @property
    def body_bytes(self) -> int:
        return len(self._body)

    def for_engine(self, cache_salt: str) -> bytes:
        """The client's, less its transfer fields, with our salt where there is one."""
        if not self.strips and not cache_salt:
            return self._body
        changed: dict[str, Any] = {
            name: value for name, value in self._fields.items() if name != "kv_transfer_params"
        }
        if cache_salt:
            changed["cache_salt"] = cache_salt
        return msgspec.json.encode(changed)


def _refuse_memory(fields: Mapping[str, msgspec.Raw], engines: int) -> None:
    if decode_field(fields, "background", bool):
        raise InvalidRequest(
            "background: this gateway keeps no responses to be fetched later", param="background"
        )
    name = "previous_response_id"
    if decode_field(fields, name, str) is not None and engines > 1:
        raise InvalidRequest(
            f"{name}: only one of {engines} engines remembers it; send the conversation in `input`",
            param=name,
        )
