"""Signed transfer parameters: only what a gateway signed, unexpired, once, and never an address."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from prfaas.errors import InvalidRequest, Unauthorized
from prfaas.quality import Quality
from prfaas.transfer import (
    PlanStep,
    SeenTransfers,
    Signer,
    TransferParams,
    canonical,
    parse,
    sign,
    verify,
)

KEY = b"key"
PARAMS = TransferParams(
    version=1,
    transfer_id="t1",
    plan=(PlanStep("fra", "p0"),),
    on_failure="local",
    quality="exact",
    deadline_s=30.0,
    salt="s",
    expires=100.0,
)


def test_signed_parameters_cross_json_and_verify_with_either_key() -> None:
    received = parse(sign(PARAMS, KEY).to_dict())
    verify(received, [b"new", KEY], now=99.0)
    assert received.plan == (PlanStep("fra", "p0"),)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"plan": (PlanStep('a"b', "é"), PlanStep("\ud800", "\n"))},
        {"plan": (), "deadline_s": 0.1, "expires": 1796025932.2645793, "tenant": "\u2028"},
        {"traceparent": "00-" + 32 * "a" + "-" + 16 * "b" + "-01"},
        {"quality": Quality.EXACT, "deadline_s": 1e22, "expires": 5e-324},
    ],
)
def test_what_is_signed_is_all_fields_as_sorted_json(fields: dict[str, Any]) -> None:
    """Also of a field that is added one day."""
    params = msgspec.structs.replace(PARAMS, **fields)
    body = msgspec.to_builtins(params)
    del body["mac"]
    assert canonical(params) == json.dumps(body, sort_keys=True, separators=(",", ":"))


@pytest.mark.parametrize("key", [b"", KEY, b"k" * 64, b"k" * 65, bytes(range(256))])
def test_a_signer_says_in_json_what_signing_gives(key: bytes) -> None:
    signer = Signer(key)
    for name in ("t1", 'a"\u2028'):
        params = msgspec.structs.replace(PARAMS, transfer_id=name)
        received = parse(msgspec.json.decode(signer.signed(params)))
        assert received == sign(params, key)
        verify(received, [key], now=0.0)


@pytest.mark.parametrize(
    "change",
    [
        {"transfer_id": "t2"},
        {"plan": [{"peer": "fra", "instance": "p1"}]},
        {"on_failure": "reject"},
        {"quality": "tight"},
        {"deadline_s": 31.0},
        {"salt": ""},
        {"tenant": "another"},
        {"expires": 101.0},
        {"mac": ""},
        {"mac": "\u00e9"},
        {"mac": "\ud800"},
    ],
)
def test_every_field_is_signed(change: dict[str, object]) -> None:
    forged = parse(sign(PARAMS, KEY).to_dict() | change)
    with pytest.raises(Unauthorized, match="signature"):
        verify(forged, [KEY], now=0.0)


def test_expired_and_unkeyed_parameters_are_refused() -> None:
    signed = sign(PARAMS, KEY)
    with pytest.raises(Unauthorized, match="expired"):
        verify(signed, [KEY], now=100.5)
    with pytest.raises(Unauthorized):
        verify(signed, [], now=0.0)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"address": "10.0.0.1:80"}, "address"),
        ({"plan": [{"peer": "a", "instance": "b", "host": "h"}]}, "host"),
        ({"plan": "fra"}, "plan"),
        ({"deadline_s": "soon"}, "deadline_s"),
        ({"on_failure": "panic"}, "on_failure"),
        ({"version": 2}, "version 2"),
    ],
)
def test_malformed_parameters_name_the_field(change: dict[str, object], names: str) -> None:
    with pytest.raises(InvalidRequest, match=names):
        parse(sign(PARAMS, KEY).to_dict() | change)


def test_a_transfer_id_is_used_once_until_it_expires() -> None:
    seen = SeenTransfers(capacity=2)
    assert seen.claim("a", expires=10, now=0)
    assert not seen.claim("a", expires=10, now=5)
    assert seen.claim("a", expires=30, now=11)
    assert seen.claim("b", expires=12, now=11)
    assert not seen.claim("c", expires=20, now=11), "a full table refuses instead of growing"
    assert seen.claim("c", expires=20, now=13)
