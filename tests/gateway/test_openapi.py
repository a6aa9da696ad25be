"""The OpenAPI document says what there is: every route, every field we act on, true answers."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import msgspec
import pytest

from gateway import api_types, schema
from gateway.handlers import Handlers
from gateway.ids import Ids
from gateway.openapi import OPERATIONS, document
from gateway.passed import PassedApi
from prfaas.limits import Limits
from prfaas.testing.gateway_setup import MODEL
from prfaas.testing.scripted_engine import Script

DOCUMENT: dict[str, Any] = json.loads(document())


def schema_of(path: str, method: str, status: str = "200") -> dict[str, Any]:
    """The schema of an answer, with the parts it refers to."""
    found: dict[str, Any] = DOCUMENT["paths"][path][method]["responses"][status]["content"]
    return {**found["application/json"]["schema"], "components": DOCUMENT["components"]}


def assert_is(answer: Any, path: str, method: str, status: str = "200") -> None:
    jsonschema.validate(answer, schema_of(path, method, status))


async def test_every_route_is_in_it_and_nothing_else(cluster: Any) -> None:
    gateway = cluster.gateway
    handlers = Handlers(
        MODEL, Limits(), gateway.generation, gateway.passing, gateway.admission, gateway.budget,
        gateway.view, gateway.engines, gateway.records, gateway.metrics, Ids(),
    )  # fmt: skip
    app = handlers.app()
    routes = {
        (route.method.lower(), re.sub(r"\{(\w+):[^}]*\}", r"{\1}", route.resource.canonical))
        for route in app.router.routes()
        if route.method != "HEAD"
    }
    listed = {(m, path) for path, methods in DOCUMENT["paths"].items() for m in methods}
    assert listed == routes
    assert len(listed) == len(OPERATIONS)


def test_every_reference_leads_somewhere() -> None:
    text = document().decode()
    names = set(re.findall(r'"#/components/schemas/(\w+)"', text))
    assert names <= set(DOCUMENT["components"]["schemas"])
    assert DOCUMENT["openapi"].startswith("3.1")
    ids = [op["operationId"] for methods in DOCUMENT["paths"].values() for op in methods.values()]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize(
    ("shown", "parsed"),
    [
        (api_types.ChatRequest, schema._Chat),
        (api_types.CompletionRequest, schema._Completion),
    ],
)
def test_every_field_that_is_acted_on_is_shown(shown: Any, parsed: Any) -> None:
    """But those that only the gateway writes, and those that only forbid an offload."""
    ours = {"kv_transfer_params", "prompt_logprobs", "use_beam_search", "best_of", "prompt_embeds"}
    fields = {field.name for field in msgspec.structs.fields(shown)}
    assert {field.name for field in msgspec.structs.fields(parsed)} - ours <= fields


def test_every_endpoint_that_is_passed_on_is_shown() -> None:
    assert {api.path for api in PassedApi} <= set(DOCUMENT["paths"])


async def test_pages_are_as_it_says(cluster: Any) -> None:
    await cluster.post({"model": MODEL, "prompt": "hi", "max_tokens": 2}, x_request_id="r1")
    for url, path in (
        ("/v1/models", "/v1/models"),
        (f"/v1/models/{MODEL}", "/v1/models/{model}"),
        ("/health", "/health"),
        ("/ready", "/ready"),
        ("/openapi.json", "/openapi.json"),
        ("/prfaas/requests?limit=1", "/prfaas/requests"),
        ("/prfaas/requests/r1", "/prfaas/requests/{request_id}"),
        ("/prfaas/cluster", "/prfaas/cluster"),
    ):
        status, answer = await cluster.get(url)
        assert status == 200, url
        assert_is(answer, path, "get")
    status, answer = await cluster.get("/v1/models/gpt-9")
    assert_is(answer, "/v1/models/{model}", "get", str(status))
    assert (await cluster.get("/openapi.json"))[1] == DOCUMENT


async def test_answers_and_errors_are_as_it_says(cluster: Any) -> None:
    cluster.engine.script = Script(cached_tokens=1)
    path = "/v1/completions"
    status, answer, _ = await cluster.post({"model": MODEL, "prompt": "hi"})
    assert_is(answer, path, "post", str(status))
    for body in (b"{", {"model": "gpt-9", "prompt": "hi"}, {"model": MODEL}):
        status, answer, _ = await cluster.post(body)
        assert status in (400, 404)
        assert_is(answer, path, "post", str(status))
    with pytest.raises(jsonschema.ValidationError):
        assert_is({"error": "no"}, path, "post", "400")
