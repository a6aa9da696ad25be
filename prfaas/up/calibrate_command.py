"""`prfaas calibrate`: a live fleet measured and written as a scenario with its profiles."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import yaml

from prfaas.errors import ConfigError
from prfaas.limits import Limits
from prfaas.up.calibration import Plan, Samples, measure, profiles, scenario
from prfaas.up.client import OpenAIClient
from prfaas.whole_file import can_hold_files, whole_file

SCENARIO = "scenario.yaml"


def run_calibrate(
    gateway: str,
    engine: str,
    plan: Plan,
    out: Path,
    max_batch: int,
    timeout_s: float,
    say: Callable[[str], None],
) -> None:
    """Write scenario and profiles into `out`, which is made. Raises ConfigError, PrfaasError."""
    if not can_hold_files(out):
        raise ConfigError(f"cannot write {out}: no directory of ours", field="out")
    samples = asyncio.run(_measured(gateway, engine, plan, timeout_s, say))
    source = f"prfaas calibrate, {time.strftime('%Y-%m-%d')}, {plan.rounds} rounds"
    found = profiles(samples, max_batch, source)
    data = scenario(samples, plan.model, Limits().watch_interval_s)
    out.mkdir(parents=True, exist_ok=True)
    files = {f"{name}.yaml": profile for name, profile in found.items()} | {SCENARIO: data}
    for file, content in files.items():
        with whole_file(out / file) as part:
            part.write_text(yaml.safe_dump(content, sort_keys=False))
    say(f"written: {out / SCENARIO}, {', '.join(f'{name}.yaml' for name in found)}")


async def _measured(
    gateway: str, engine: str, plan: Plan, timeout_s: float, say: Callable[[str], None]
) -> Samples:
    async with (
        OpenAIClient(gateway, timeout_s=timeout_s) as front,
        OpenAIClient(engine, timeout_s=timeout_s) as behind,
    ):
        return await measure(front, behind, plan, say)
