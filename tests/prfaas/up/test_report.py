"""The demonstration's tables say what a reader needs to judge a decision."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from prfaas.up.burst import BurstResult
from prfaas.up.client import StreamedAnswer
from prfaas.up.prompts import burst_prompts, long_prompt, queued_prompt
from prfaas.up.report import burst_table, percentile, request_table


def shown(table: Table) -> str:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def answer() -> StreamedAnswer:
    return StreamedAnswer(
        "r1",
        sent_at=10.0,
        text="Paris [/is] the\ncapital.",
        first_event_at=10.25,
        token_at=[10.25, 10.30, 10.36],
        usage={"prompt_tokens": 1234},
    )


def estimate(where: str, ttft_s: float, queue_s: float) -> dict[str, Any]:
    return {
        "where": where,
        "ttft_s": ttft_s,
        "queue_s": queue_s,
        "prefill_s": 1.5,
        "transfer_s": 0.0,
        "rtt_s": 0.0,
        "decode_s": 0.06,
        "uncached_tokens": 1233,
    }


REMOTE = {
    "target": "remote",
    "decision": {
        "target": "remote",
        "reason": "remote_faster",
        "estimates": [estimate("local", 7.5, 5.9), estimate("p/p-0", 1.6, 0.0)],
    },
    "outcome": {
        "status": "staged",
        "reason": "",
        "peer": "p",
        "instance": "p-0",
        "received_tokens": 1233,
        "want_tokens": 1233,
        "raw_bytes": 28_408_320,
        "wire_bytes": 19_457_753,
        "hidden_wire_bytes": 18_484_865,
    },
}


def test_a_remote_request_shows_both_estimates_and_what_its_kv_cost() -> None:
    text = shown(request_table("Long", answer(), REMOTE))
    for part in (
        "1234 tokens",
        "remote (reason: remote_faster)",
        "estimated TTFT, local",
        "7.500 s (queue 5.900, prefill 1.500, decode 0.060)",
        "estimated TTFT, p/p-0",
        "1.600 s",
        "0.250 s",
        "55 ms (median)",
        "p/p-0: 1233 of 1233 tokens (staged)",
        "28.41 MB raw, 19.46 MB on the wire, 1.46 times smaller",
        "95.0% of the transfer",
        "Paris [/is] the capital.",
    ):
        assert part in text, text


def test_a_transfer_that_was_given_up_says_why_and_that_kv_went_as_it_was() -> None:
    outcome = {
        **REMOTE["outcome"],
        "status": "partial",
        "reason": "prefill_timeout_slower",
        "received_tokens": 240,
        "raw_bytes": 7_100_000,
        "wire_bytes": 7_110_000,
    }
    text = shown(request_table("Long", answer(), {**REMOTE, "outcome": outcome}))
    assert "240 of 1233 tokens (partial: prefill_timeout_slower)" in text
    assert "7.10 MB raw, 7.11 MB on the wire, not encoded: the link is faster" in text


def test_a_local_request_has_no_kv_on_the_link() -> None:
    local = {
        "target": "local",
        "decision": {"target": "local", "reason": "too_short", "estimates": []},
        "outcome": None,
    }
    text = shown(request_table("Short", answer(), local))
    assert "local (reason: too_short)" in text
    assert "none" in text


def test_bursts_stand_beside_each_other() -> None:
    local = BurstResult((0.1,) * 98 + (1.0, 2.0), (3.0, 6.0, 9.0, 12.0), 0)
    offload = BurstResult((0.1,) * 100, (3.0, 4.0, 5.0, 5.5), 3)
    lines = [line.split("│") for line in shown(burst_table(local, offload)).splitlines()]
    rows = {cells[1].strip(): [cell.strip() for cell in cells[2:4]] for cells in lines if cells[2:]}
    assert rows["ITL of the running chats, P50"] == ["100 ms", "100 ms"]
    assert rows["ITL of the running chats, P99"] == ["1000 ms", "100 ms"]
    assert rows["TTFT of the long prompts, P90"] == ["12000 ms", "5500 ms"]
    assert rows["long prompts prefilled at P"] == ["0 of 4", "3 of 4"]


@pytest.mark.parametrize(("percent", "expected"), [(50, 2.0), (99, 4.0), (25, 1.0)])
def test_percentile_is_nearest_rank(percent: float, expected: float) -> None:
    assert percentile([4.0, 2.0, 1.0, 3.0], percent) == expected


def test_prompts_are_natural_text_of_the_right_size_and_differ_from_the_start() -> None:
    assert 4000 < len(long_prompt()) < 6500
    assert 5000 < len(queued_prompt()) < 8000
    prompts = burst_prompts("A", 6) + burst_prompts("B", 6)
    assert len({prompt[:3] for prompt in prompts}) == 12
    assert all(1500 < len(prompt) < 3000 for prompt in prompts)
