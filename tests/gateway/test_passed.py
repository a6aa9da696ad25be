"""Bodies that are passed on: bytes as they came, less what is ours to write."""

from __future__ import annotations

import json
import random

import msgspec
import pytest

from gateway.passed import PassedApi, PassedBody
from prfaas.errors import InvalidRequest
from prfaas.testing.fuzz import fuzz, mutate_bytes, mutate_json

BODY = {
    "model": "tiny",
    "input": [{"role": "user", "content": "hé"}],
    "stream": True,
    "cache_salt": "mine",
    "previous_response_id": None,
    "background": False,
    "kv_transfer_params": {"a": [1.0, "x"]},
}


def test_paths_are_openais_and_vllms() -> None:
    assert [api.path for api in PassedApi] == [
        "/v1/responses", "/v1/embeddings", "/tokenize", "/detokenize",
    ]  # fmt: skip


def test_what_nothing_is_taken_from_stays_as_it_is() -> None:
    body = b' {"input" : [1.0,"\\u00e9"],"a":1,"a":2}\n'
    assert PassedBody(PassedApi.EMBEDDINGS, body, 3).for_engine("") is body


def test_only_our_fields_change() -> None:
    out = PassedBody(PassedApi.RESPONSES, json.dumps(BODY).encode(), 1).for_engine("ours")
    wanted = {k: v for k, v in BODY.items() if k != "kv_transfer_params"} | {"cache_salt": "ours"}
    assert json.loads(out) == wanted


@pytest.mark.parametrize("api", list(PassedApi))
def test_whatever_clients_send_is_refused_or_passed_on_without_transfer_fields(
    api: PassedApi,
) -> None:
    good = json.dumps(BODY).encode()

    def make(rng: random.Random) -> bytes:
        if rng.random() < 0.7:
            return json.dumps(mutate_json(BODY, rng)).encode()
        return mutate_bytes(good, [good], rng)

    def run(body: bytes) -> None:
        out = PassedBody(api, body, 2).for_engine("ours")
        fields = msgspec.json.decode(out, type=dict[str, msgspec.Raw])
        assert "kv_transfer_params" not in fields
        assert bytes(fields["cache_salt"]) == b'"ours"'

    fuzz(f"passed/{api}", run, make, (InvalidRequest,))
