"""A whole configuration, part by part: those that its file or the environment name."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from prfaas.check.agent_part import check_agent, check_engine, check_prefill
from prfaas.check.findings import Findings
from prfaas.check.gateway_part import Parts, check_gateway
from prfaas.errors import ConfigError
from prfaas.settings import Settings, load_settings

Part = Literal["gateway", "engine", "agent", "prefill"]
PARTS: tuple[Part, ...] = get_args(Part)


async def check(file: Path, parts: Parts, timeout_s: float, only: Sequence[Part] = ()) -> Findings:
    """Check what `only` names, or else every part that the configuration has. Never raises for what
    it finds.
    """
    findings = Findings()
    try:
        settings = await asyncio.to_thread(load_settings, file)
    except ConfigError as exc:
        findings.fail(
            str(file), exc.message, "correct these keys; docs/configuration.md has every one"
        )
        return findings
    findings.ok(str(file), "every key is known and every value is of its kind")
    wanted = [part for part in PARTS if part in (only or settings.model_fields_set)]
    if not wanted:
        findings.warn(
            str(file),
            f"has none of the sections {', '.join(PARTS)}: nothing else to check",
            "name a part with --part to check its defaults",
        )
    for part in wanted:
        findings.add(await _check(part, settings, parts, timeout_s))
    return findings


async def _check(part: Part, settings: Settings, parts: Parts, timeout_s: float) -> Findings:
    if part == "gateway":
        return await check_gateway(settings, parts, timeout_s)
    if part == "agent":
        return await check_agent(settings.agent, timeout_s)
    if part == "prefill":
        return await check_prefill(settings.prefill, timeout_s)
    return await asyncio.to_thread(check_engine, settings.engine)
