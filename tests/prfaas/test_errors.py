"""The error tree: every kind is unique, crosses a wire and comes out as the same class."""

from __future__ import annotations

import pytest

from prfaas.errors import BY_KIND, PrfaasError, ProtocolError, from_kind, openai_body


@pytest.mark.parametrize("kind", sorted(BY_KIND))
def test_an_error_rebuilt_from_its_kind_is_the_same_class(kind: str) -> None:
    error = from_kind(
        kind, "text", param="p", retry_after_s=2.0, phase="connect", field="groups[0].dtype"
    )
    assert type(error) is BY_KIND[kind]
    assert (error.param, error.retry_after_s, error.phase) == ("p", 2.0, "connect")
    assert error.field == "groups[0].dtype"
    assert openai_body(error)["error"] == {
        "message": "text",
        "type": kind,
        "param": "p",
        "code": kind,
    }


def test_kinds_are_unique_and_statuses_valid() -> None:
    def walk(cls: type[PrfaasError]) -> list[type[PrfaasError]]:
        return [cls, *(c for sub in cls.__subclasses__() for c in walk(sub))]

    kinds = [c.kind for c in set(walk(PrfaasError)) if c.__module__ == "prfaas.errors"]
    assert len(kinds) == len(set(kinds))
    assert all(400 <= BY_KIND[k].http_status <= 599 for k in BY_KIND)


def test_an_unknown_kind_is_a_protocol_error_that_keeps_the_text() -> None:
    error = from_kind("martian", "hello")
    assert type(error) is ProtocolError
    assert "martian" in error.message
    assert "hello" in error.message
