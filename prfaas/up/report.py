"""What the demonstration prints: one table for a request, one for the bursts."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from prfaas.up.burst import BurstResult
from prfaas.up.client import StreamedAnswer
from prfaas.up.cluster import Record

# Raw over wire bytes up to which KV went as it was: frames have headers.
_AS_IT_IS = 1.01


def request_table(title: str, answer: StreamedAnswer, record: Record) -> Table:
    """Decision, reason, estimates, what it cost, and the answer."""
    decision = record["decision"]
    table = Table(title=title, title_justify="left", show_header=False, title_style="bold")
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("prompt", f"{answer.usage['prompt_tokens']} tokens")
    table.add_row("decision", f"{decision['target']} (reason: {decision['reason']})")
    for estimate in decision["estimates"]:
        table.add_row(f"estimated TTFT, {estimate['where']}", _estimate(estimate))
    table.add_row("TTFT", f"{answer.ttft_s:.3f} s")
    if answer.itl_s:
        table.add_row("ITL", f"{statistics.median(answer.itl_s) * 1e3:.0f} ms (median)")
    for name, text in _transfer(record["outcome"]):
        table.add_row(name, text)
    # Not markup, whatever brackets the model wrote.
    table.add_row("answer", Text(" ".join(answer.text.split())))
    return table


def burst_table(local: BurstResult, offload: BurstResult) -> Table:
    """Both bursts beside each other."""
    bursts = (local, offload)
    table = Table(title="Burst", title_justify="left", title_style="bold")
    table.add_column("")
    table.add_column("local only", justify="right")
    table.add_column("with offload", justify="right")
    rows = (
        ("ITL of the running chats, P50", *(_ms(burst.itl_s, 50) for burst in bursts)),
        ("ITL of the running chats, P99", *(_ms(burst.itl_s, 99) for burst in bursts)),
        ("TTFT of the long prompts, P90", *(_ms(burst.ttft_s, 90) for burst in bursts)),
        ("long prompts prefilled at P", *(_share(burst) for burst in bursts)),
    )
    for row in rows:
        table.add_row(*row)
    return table


def percentile(values: Sequence[float], percent: float) -> float:
    """Nearest-rank percentile of a non-empty sequence."""
    ordered = sorted(values)
    return ordered[max(1, int(-(-len(ordered) * percent // 100))) - 1]


def _ms(values: Sequence[float], percent: float) -> str:
    return f"{percentile(values, percent) * 1e3:.0f} ms"


def _share(burst: BurstResult) -> str:
    return f"{burst.offloaded} of {len(burst.ttft_s)}"


def _estimate(estimate: Mapping[str, Any]) -> str:
    parts = ("queue", "prefill", "transfer", "rtt", "decode")
    shown = ", ".join(
        f"{part} {estimate[f'{part}_s']:.3f}" for part in parts if estimate[f"{part}_s"]
    )
    return f"{estimate['ttft_s']:.3f} s ({shown})"


def _transfer(outcome: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    if outcome is None:
        return [("KV over the link", "none")]
    raw, wire, hidden = (outcome[f"{kind}_bytes"] for kind in ("raw", "wire", "hidden_wire"))
    ratio = ""
    if wire:
        smaller = raw / wire > _AS_IT_IS
        ratio = (
            f", {raw / wire:.2f} times smaller" if smaller else ", not encoded: the link is faster"
        )
    status = ": ".join(word for word in (outcome["status"], outcome["reason"]) if word)
    rows = [
        (
            "prefilled at",
            f"{outcome['peer']}/{outcome['instance']}: {outcome['received_tokens']} of "
            f"{outcome['want_tokens']} tokens ({status})",
        ),
        ("KV over the link", f"{raw / 1e6:.2f} MB raw, {wire / 1e6:.2f} MB on the wire{ratio}"),
    ]
    if wire:
        rows.append(("hidden behind prefill", f"{hidden / wire:.1%} of the transfer"))
    return rows
