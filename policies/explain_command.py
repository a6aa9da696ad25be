"""`prfaas explain`: one logged decision, what it weighed, and what would have changed it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from policies.explain import OVERRIDDEN, Explanation, Flip, explain, find, settings_of
from prfaas.late_binding import Move
from prfaas.settings import PolicySettings
from prfaas.snapshot import Decision, Estimate


def run_explain(
    log: Path, request_id: str | None, settings: PolicySettings | None, as_json: bool
) -> str:
    """Explain the decision of a request in a gateway's log; none: of the last one.

    `settings`: the policy to ask; none: the logged one. Raises ConfigError.
    """
    logged = find(log, request_id)
    if settings is None:
        settings = settings_of(logged)
    found = explain(logged, settings)
    return json.dumps(as_data(found), indent=2) + "\n" if as_json else to_text(found)


def as_data(found: Explanation) -> dict[str, Any]:
    """For JSON."""
    logged = found.logged
    return {
        "request_id": logged.request_id,
        "prompt_tokens": logged.facts.prompt_tokens,
        "policy": logged.policy,
        "logged": asdict(logged.decision),
        "replayed": asdict(found.replayed),
        "same": found.same,
        "moves": [
            {
                "after_s": move.after_s,
                "from": move.source,
                "to": move.to,
                "why": move.why,
                "stay_s": move.stay_s,
                "go_s": move.go_s,
                "gain_s": move.gain_s,
            }
            for move in logged.moves
        ],
        "flips": [
            {
                "input": flip.name,
                "unit": flip.unit,
                "now": flip.now,
                "at": flip.at,
                "target": flip.decision.target,
                "reason": flip.decision.reason,
                "plan": flip.decision.plan,
            }
            for flip in found.flips
        ],
        "firm": found.firm,
    }


def to_text(found: Explanation) -> str:
    """For a terminal."""
    logged, replayed = found.logged, found.replayed
    lines = [
        f"{logged.request_id}: {logged.facts.prompt_tokens:,} prompt tokens, "
        f"{logged.decision.uncached_tokens:,} that D lacked",
        f"logged    {_told(logged.decision)}, by {logged.policy}",
        f"replayed  {_told(replayed)}{_difference(found)}",
        *map(_moved, logged.moves),
    ]
    if replayed.estimates:
        lines.append("")
        widest = max(len(estimate.where) for estimate in replayed.estimates)
        lines += [_estimate(estimate, widest) for estimate in replayed.estimates]
    lines.append("")
    if found.flips:
        lines.append("it would have gone elsewhere, all else as it was, with")
        widest = max(len(flip.name) for flip in found.flips)
        lines += [_flip(flip, widest) for flip in found.flips]
    if found.firm:
        whole = "no value of any input changes it alone" if not found.flips else "no value changes"
        lines.append(f"{whole}: {', '.join(found.firm)}")
    return "\n".join(lines) + "\n"


def _told(decision: Decision) -> str:
    to = f" to {'/'.join(decision.plan[0])}" if decision.plan else ""
    return f"{decision.target}{to} ({decision.reason})"


def _difference(found: Explanation) -> str:
    if found.same:
        return ""
    if found.logged.decision.reason in OVERRIDDEN:
        return ": the gateway's settings or the client overrode the policy"
    return ": not the same; the gateway's policy had other parameters or was another version"


def _moved(move: Move) -> str:
    return (
        f"moved     {move.after_s:.3g} s after it came, from {move.source} to {move.to} "
        f"({move.why}): gains {move.gain_s:.3g} s, {move.go_s:.3g} instead of {move.stay_s:.3g} s "
        "from then on"
    )


def _estimate(estimate: Estimate, widest: int) -> str:
    parts = ("queue", "prefill", "transfer", "rtt", "decode")
    told = ", ".join(f"{part} {getattr(estimate, f'{part}_s'):.3g}" for part in parts)
    return f"{estimate.where:<{widest}}  TTFT {estimate.ttft_s:.3g} s: {told}"


def _flip(flip: Flip, widest: int) -> str:
    beyond = "or more" if flip.at > flip.now else "or less"
    if flip.unit == "" and {flip.now, flip.at} <= {0.0, 1.0} and not flip.name.startswith("policy"):
        change = f"{_yes(flip.now)} -> {_yes(flip.at)}"
    else:
        change = f"{_value(flip.now, flip.unit)} -> {_value(flip.at, flip.unit)} {beyond}"
    return f"  {flip.name:<{widest}}  {change}: {_told(flip.decision)}"


def _yes(value: float) -> str:
    return "yes" if value else "no"


def _value(value: float, unit: str) -> str:
    if unit == "tokens":
        return f"{value:,.0f} tokens"
    if unit.startswith("bytes"):
        return f"{value / 1e6:,.4g} MB{unit.removeprefix('bytes')}"
    return f"{value:.4g} {unit}".rstrip()
