"""The words for why a fetch did not get all it asked for."""

from __future__ import annotations

import pytest

from prfaas.errors import CorruptKv, PrefillTimeout, PrfaasError
from remote_prefill.tally import reason_of


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (CorruptKv("x"), "corrupt_kv"),
        (PrefillTimeout("x", phase="first_frame"), "prefill_timeout_first_frame"),
        (PrefillTimeout("x", phase="whatever a peer says"), "prefill_timeout"),
    ],
)
def test_reasons_are_few_whatever_the_other_side_says(error: PrfaasError, reason: str) -> None:
    assert reason_of(error) == reason
