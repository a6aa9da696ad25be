"""What the bench makes of answers over a thin link."""

from __future__ import annotations

import pytest

from bench import codec_ttft
from bench.harness import Report, Samples
from bench.site import RemoteAnswer
from prfaas.errors import PrfaasError
from prfaas.up.client import StreamedAnswer


def answer(wire_bytes: int) -> RemoteAnswer:
    return RemoteAnswer(StreamedAnswer("", 0.0), 1200, wire_bytes, 0, 10, {})


SAMPLES = {
    "raw": Samples((20.0, 22.0, 18.0)),
    "compact": Samples((5.0, 11.0, 6.0)),
    "t_prefill": Samples((4.0, 5.0, 6.0)),
}


def test_the_quotient_is_that_of_the_rounds() -> None:
    report = Report("codecs")
    answers = {"raw": [answer(1200)] * 3, "compact": [answer(200), answer(240), answer(300)]}
    codec_ttft._write(report, SAMPLES, answers, "a link")
    found = {row.name: row.value for row in report._rows}
    assert found["ttft_raw_over_compact.phi_4"] == 3.0
    assert (found["ttft.raw.ratio"], found["ttft.compact.ratio"]) == (1.0, 5.0)
    assert (found["ttft.compact"], found["ttft.t_prefill"]) == (6.0, 5.0)


def test_kv_that_did_not_come_compact_is_no_result() -> None:
    answers = {"raw": [answer(1200)], "compact": [answer(200), answer(600)]}
    with pytest.raises(PrfaasError, match="not compact"):
        codec_ttft._write(Report("codecs"), SAMPLES, answers, "a link")
