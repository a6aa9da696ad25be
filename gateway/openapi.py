"""The OpenAPI document of the gateway, from the shapes in `api_types` and a table of routes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Any

import msgspec

from gateway import api_types as types

PATH = "/openapi.json"

_REFUSALS: Mapping[str, str] = {
    "400": "A field is wrong; `param` names it.",
    "401": "A key is missing or unknown.",
    "403": "The key may not do this.",
    "404": "No such model, request or endpoint, or no engine has it.",
    "413": "The body is over the limit.",
    "429": "A tenant's quota is used up; Retry-After says until when.",
}
_FAILURES: Mapping[str, str] = {
    "500": "An error of the gateway or of the engine.",
    "502": "The engine is not reachable, or broke off.",
    "503": "Full, draining, or no place to prefill; Retry-After says when to come back.",
    "504": "Something took too long.",
}


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path. `answer` None: text that is not JSON."""

    method: str
    path: str
    summary: str
    answer: Any = None
    body: Any = None
    streams: bool = False
    refusals: tuple[str, ...] = ("401", "403")
    failures: tuple[str, ...] = ()
    query: Sequence[Mapping[str, Any]] = ()
    statuses: tuple[str, ...] = ("200",)


def _generating(path: str, summary: str, body: Any, answer: Any, streams: bool) -> Operation:
    return Operation(
        "post", path, summary, answer, body, streams, tuple(_REFUSALS), tuple(_FAILURES)
    )


OPERATIONS = (
    _generating("/v1/chat/completions", "Answer a chat", types.ChatRequest, types.Answer, True),
    _generating(
        "/v1/completions", "Complete a text", types.CompletionRequest, types.Answer, True
    ),
    _generating(
        "/v1/responses", "Answer by the Responses API", types.ResponsesRequest, dict[str, Any], True
    ),
    _generating(
        "/v1/embeddings", "Embed texts", types.EmbeddingsRequest, dict[str, Any], False
    ),
    _generating(
        "/tokenize", "Tokenise a text or chat", types.TokenizeRequest, types.TokensAnswer, False
    ),
    _generating(
        "/detokenize", "Text of token ids", types.DetokenizeRequest, types.TextAnswer, False
    ),
    Operation("get", "/v1/models", "The model that is served", types.ModelList),
    Operation(
        "get", "/v1/models/{model}", "Its card", types.ModelCard, refusals=("401", "403", "404")
    ),
    Operation("get", "/health", "The process lives", types.Status, refusals=()),
    Operation(
        "get", "/ready", "New requests are welcome (503: not now)", types.Status, refusals=(),
        statuses=("200", "503"),
    ),
    Operation("get", "/metrics", "Prometheus metrics", refusals=()),
    Operation("get", PATH, "This document", dict[str, Any], refusals=()),
    Operation(
        "get", "/prfaas/requests", "The latest requests and their decisions", types.Requests,
        refusals=("400", "401", "403"),
        query=(
            {
                "name": "limit", "in": "query", "required": False,
                "schema": {"type": "integer", "minimum": 1, "maximum": 1000, "default": 50},
            },
        ),
    ),
    Operation(
        "get", "/prfaas/requests/{request_id}", "One request in detail", dict[str, Any],
        refusals=("401", "403", "404"),
    ),
    Operation("get", "/prfaas/cluster", "Engines, peers and links as seen now", dict[str, Any]),
)  # fmt: skip


@cache
def document() -> bytes:
    """The document as JSON, OpenAPI 3.1."""
    shapes = [each for op in OPERATIONS for each in (op.body, op.answer) if each is not None]
    schemas, components = msgspec.json.schema_components(
        [*shapes, types.ErrorBody], ref_template="#/components/schemas/{name}"
    )
    by_shape = {repr(shape): schema for shape, schema in zip(shapes, schemas, strict=False)}
    error = schemas[-1]
    paths: dict[str, dict[str, Any]] = {}
    for op in OPERATIONS:
        paths.setdefault(op.path, {})[op.method] = _operation(op, by_shape, error)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "prfaas gateway",
                "version": version("prfaas"),
                "description": "OpenAI's API over engines whose prefill may run elsewhere.",
                "license": {"name": "Apache-2.0"},
            },
            "paths": paths,
            "components": {
                "schemas": components,
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            },
            "security": [{}, {"key": []}],
        }
    )


def _operation(op: Operation, by_shape: Mapping[str, Any], error: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "operationId": f"{op.method}{op.path}".translate({ord(c): "_" for c in "/.{}"}),
        "summary": op.summary,
        "responses": {status: _answer(op, by_shape) for status in op.statuses},
    }
    for table, chosen in ((_REFUSALS, op.refusals), (_FAILURES, op.failures)):
        for status in chosen:
            made["responses"][status] = {
                "description": table[status],
                "content": {"application/json": {"schema": error}},
            }
    if op.body is not None:
        made["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": by_shape[repr(op.body)]}},
        }
    named = [part[1:-1] for part in op.path.split("/") if part.startswith("{")]
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in named
    ]
    if parameters or op.query:
        made["parameters"] = [*parameters, *op.query]
    return made


def _answer(op: Operation, by_shape: Mapping[str, Any]) -> dict[str, Any]:
    if op.answer is None:
        content: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
    else:
        content = {"application/json": {"schema": by_shape[repr(op.answer)]}}
    if op.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return {"description": op.summary, "content": content}
