"""Requests made up from the OpenAPI document, against a gateway and the embedded engine.

Seeded: the same requests each time. Whatever is sent, the answer is one that the document names, in
the shape it says, and no error of the server.
"""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from gateway.openapi import OPERATIONS, Operation
from prfaas.testing.client_stack import ClientStack

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
MOST_TOKENS = 4
EXAMPLES = 12
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


@pytest.fixture(scope="session")
def described(stack: ClientStack) -> Any:
    return schemathesis.openapi.from_url(f"{stack.gateway}/openapi.json")


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda op: f"{op.method} {op.path}")
def test_every_answer_is_one_that_the_document_names(described: Any, operation: Operation) -> None:
    strategy = described[operation.path][operation.method].as_strategy()

    @given(case=strategy)
    @settings(
        max_examples=EXAMPLES if operation.body is not None else 3,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def ask(case: Any) -> None:
        if isinstance(case.body, dict):
            case.body = short(case.body)
        case.call_and_validate(timeout=60, checks=CHECKS)

    ask()


def short(body: dict[str, Any]) -> dict[str, Any]:
    """The same with a short answer, which says as much as a long one."""
    most = {"max_tokens": MOST_TOKENS, "max_completion_tokens": MOST_TOKENS, "n": 2}
    limited = {
        name: min(value, most[name]) if name in most and isinstance(value, int) else value
        for name, value in body.items()
    }
    if not limited.get("max_tokens") and not limited.get("max_completion_tokens"):
        limited["max_tokens"] = MOST_TOKENS
    return limited
