"""`kv_transfer_params` from anywhere: nobody is dialled but for what a gateway's key has signed."""

from __future__ import annotations

import json
import random
from typing import Any

from prfaas.errors import InvalidRequest, Unauthorized
from prfaas.testing.fuzz import fuzz, mutate_json
from prfaas.transfer import PARAMS_VERSION, PlanStep, TransferParams, parse, sign, verify

KEY, NOW = b"key", 1000.0
SIGNED = sign(
    TransferParams(
        version=PARAMS_VERSION,
        transfer_id="t1",
        plan=(PlanStep("fra", "p-0"), PlanStep("fra", "p-1")),
        on_failure="local",
        quality="exact",
        deadline_s=20.0,
        salt="s",
        expires=NOW + 30,
    ),
    KEY,
)


def test_only_what_was_signed_is_accepted_and_only_our_errors_come_out() -> None:
    good = SIGNED.to_dict()

    def make(rng: random.Random) -> Any:
        value = mutate_json(good, rng) if rng.random() < 0.95 else good
        # As it comes over KvPort: JSON, in which anything may be nested and any number be huge.
        data = json.loads(json.dumps(value))
        return data if isinstance(data, dict) else {"params": data}

    def run(data: dict[str, Any]) -> None:
        params = parse(data)
        verify(params, [b"other", KEY], NOW)
        assert params == SIGNED

    fuzz("transfer params", run, make, (InvalidRequest, Unauthorized))
