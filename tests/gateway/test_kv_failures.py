"""An engine that has no KV and cannot say so: the gateway asks the agent and answers 503."""

from __future__ import annotations

from typing import Any

import pytest

from prfaas.errors import PrfaasError
from prfaas.snapshot import Outcome
from prfaas.testing.gateway_setup import MODEL, completion
from prfaas.testing.scripted_engine import Script
from prfaas.transfer import parse

SHORT = {"model": MODEL, "prompt": "hi", "max_tokens": 4}


class VllmFailure(PrfaasError):
    """What a vLLM says whatever the reason."""

    kind = "InternalServerError"
    http_status = 500


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", ["refused", "failed", "staged"])
async def test_an_engine_that_cannot_say_why_it_failed_is_asked_about_at_its_agent(
    cluster: Any, status: str, stream: bool
) -> None:
    def fail(seen: Any) -> Script:
        transfer_id = parse(seen.body["kv_transfer_params"]).transfer_id
        cluster.d.outcome(Outcome(transfer_id, status, reason="overloaded"))
        return Script(error=VllmFailure("Internal server error"))

    cluster.engine.on_request = fail
    got, answer, response = await cluster.post(completion(stream=stream))
    record = await cluster.record(response.headers["x-request-id"])
    if status == "staged":
        assert (got, answer["error"]["type"]) == (500, "InternalServerError")
        return
    assert (got, answer["error"]["type"]) == (503, "prefill_unavailable")
    assert response.headers["retry-after"] == "1"
    assert (record["status"], record["error"]) == ("503", "prefill_unavailable")
    assert record["outcome"]["status"] == status


async def test_a_failure_of_a_request_that_was_not_offloaded_is_passed_on(cluster: Any) -> None:
    cluster.engine.script = Script(error=VllmFailure("Internal server error"))
    status, answer, _ = await cluster.post(SHORT)
    assert (status, answer["error"]["type"]) == (500, "InternalServerError")
