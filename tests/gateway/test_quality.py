"""The class of a request's KV: named by a header, within the limit, signed and shown."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.quality import quality_of, salt_of
from prfaas.errors import ConfigError, InvalidRequest
from prfaas.quality import Quality
from prfaas.settings import GatewaySettings, load_settings
from prfaas.snapshot import Outcome
from prfaas.testing.gateway_setup import KEY, completion, until
from prfaas.transfer import parse, verify


def settings(**fields: Any) -> GatewaySettings:
    return GatewaySettings.model_validate(fields)


@pytest.mark.parametrize(
    ("header", "fields", "quality"),
    [
        ("", {}, Quality.EXACT),
        ("", {"kv_quality": "near"}, Quality.NEAR),
        ("exact", {"kv_quality": "near"}, Quality.EXACT),
        ("compact", {}, Quality.COMPACT),
        ("tight", {"kv_quality_limit": "tight"}, Quality.TIGHT),
    ],
)
def test_the_header_counts_before_the_default(header: str, fields: Any, quality: Quality) -> None:
    assert quality_of(header, settings(**fields)) is quality


@pytest.mark.parametrize(
    ("header", "fields"),
    [("tight", {}), ("near", {"kv_quality_limit": "exact"}), ("Near", {}), ("\ud800" * 99, {})],
)
def test_what_may_not_be_asked_for_is_named(header: str, fields: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"quality: .* is not one of exact") as caught:
        quality_of(header, settings(**fields))
    assert caught.value.param == "x-prfaas-kv-quality"


def test_the_default_is_within_the_limit() -> None:
    with pytest.raises(ConfigError, match=r"gateway: .*kv_quality tight is worse"):
        load_settings(overrides={"gateway": {"kv_quality": "tight"}})


def test_classes_share_no_cached_kv() -> None:
    salts = {salt_of(salt, quality) for salt in ("", "s") for quality in Quality}
    assert len(salts) == 2 * len(Quality)
    assert salt_of("s", Quality.EXACT) == "s"


async def test_a_request_says_its_class_and_it_is_signed_logged_and_counted(
    make_cluster: Any,
) -> None:
    async with make_cluster(policy={"name": "always_remote"}) as cluster:
        status, _, _ = await cluster.post(
            completion(), x_prfaas_kv_quality="near", x_request_id="q1"
        )
        assert status == 200
        params = parse(cluster.engine.seen[-1].body["kv_transfer_params"])
        verify(params, [KEY.encode()], 0)
        assert (params.quality, params.salt) == ("near", "near.")
        assert cluster.engine.seen[-1].body["cache_salt"] == "near."
        outcome = Outcome(params.transfer_id, "staged", quality="near", codecs={"int8": 5})
        cluster.d.outcome(outcome)

        records = cluster.gateway.records
        await until(lambda: records.get("q1").outcome is not None, "the outcome")
        name = "prfaas_gateway_kv_quality_transfers_total"
        assert await cluster.metric(name, quality="near") == 1
        record = await cluster.record("q1")
        assert (record["kv_quality"], record["facts"]["quality"]) == ("near", "near")
        assert record["outcome"]["quality"] == "near"
        assert record["outcome"]["codecs"] == {"int8": 5}


async def test_too_bad_a_class_is_a_clear_400(make_cluster: Any) -> None:
    async with make_cluster() as cluster:
        status, body, _ = await cluster.post(completion(), x_prfaas_kv_quality="tight")
        assert status == 400
        assert body["error"]["param"] == "x-prfaas-kv-quality"
        assert "'tight' is not one of exact, near, compact" in body["error"]["message"]
        assert not cluster.engine.seen
