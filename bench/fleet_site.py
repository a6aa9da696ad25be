"""The paper's case study as live fleets of paced engines on one machine, scaled to fit it.

What is scaled keeps every ratio of the paper: one token stands for TOKENS_OF_ONE, a second takes
TIME_SCALE, and KV and link are BYTES_OF_ONE times smaller. Instances that decode hardly prefill, as
there: they take a prompt in chunks of DECODE_CHUNK and pay the curve's base for each, which makes
it slower by an order of magnitude, so that the policy sends them none while others are up.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypedDict

import yaml

from policies.profiles import find_profile
from policies.workload.generate import Lengths
from prfaas.limits import Limits
from prfaas.up.fleet import FleetPlan
from prfaas.up.fleet_file import read_fleet
from prfaas.up.fleet_processes import FleetProcesses

TOKENS_OF_ONE = 16
TIME_SCALE = 0.5
"""Of the machine's own time (some 30 processes on two cores) half as much is in each figure as at
0.25, where it was four tenths of the simulator's P90.
"""
BYTES_OF_ONE = 1016
DECODE_CHUNK = 16
MODEL = "paper"
PAPER_LINK_GBIT_S = 100.0
PAPER_OUTPUT_TOKENS = 1024
PAPER_LENGTHS = Lengths()
LINK_MBIT_S = round(PAPER_LINK_GBIT_S * 1e3 / BYTES_OF_ONE / TIME_SCALE, 1)
RTT_MS = 5.0
LAN_RTT_MS = 0.2
LAN_MBIT_S = 10_000.0
"""For the simulator; the fleet's own is as fast as the machine."""
_TOKENIZER = Path(__file__).parents[1] / "deploy" / "profiles" / "byte-tokenizer"
_KV = {"layers": 4, "kv_heads": 1, "head_dim": 17, "dtype": "bfloat16"}
"""272 bytes a token that stands for 16 of 17,280."""


class Instances(TypedDict):
    """How many decode, prefill on the local network, and prefill far away."""

    decode: int
    prefill: int
    remote: int


def scaled_profile(name: str) -> dict[str, Any]:
    """A shipped profile in this fleet's tokens and bytes; times are left to `time_scale`."""
    paper = find_profile(name)
    context = paper.model.max_context // TOKENS_OF_ONE
    times = paper.prefill
    prefill: dict[str, Any] = {"chunk_tokens": context}
    if times.points_tokens_s is not None:
        prefill["points_tokens_s"] = [
            [tokens // TOKENS_OF_ONE, seconds] for tokens, seconds in times.points_tokens_s
        ]
    else:
        prefill |= {
            "base_s": (times.base_s or 0.0),
            "token_s": (times.token_s or 0.0) * TOKENS_OF_ONE,
            "token_context_s": (times.token_context_s or 0.0) * TOKENS_OF_ONE**2,
        }
    return {
        "name": name,
        "label": paper.label,
        "source": f"{name}: 1 token for {TOKENS_OF_ONE}, KV {BYTES_OF_ONE} times smaller",
        "tokenizer": str(_TOKENIZER),
        # Answers are drawn behind the prompt, so the context is a little longer.
        "model": {**_KV, "max_context": context + output_tokens()},
        "prefill": prefill,
        "decode": {
            "step_s": (paper.decode.step_s or 0.0) * TOKENS_OF_ONE,
            "max_batch": paper.decode.max_batch,
        },
        "time_scale": TIME_SCALE,
    }


def simulated_site(directory: Path, *, decode: int, prefill: int, remote: int) -> Path:
    """The scenario of the same fleet, for the simulator, in the fleet's own tokens and seconds."""
    decoding = scaled_profile("paper-h20")
    decoding["prefill"]["chunk_tokens"] = DECODE_CHUNK
    profiles = {
        "decode": decoding,
        "h20": scaled_profile("paper-h20"),
        "h200": scaled_profile("paper-h200"),
    }
    for name, profile in profiles.items():
        (directory / f"{name}.yaml").write_text(yaml.safe_dump(profile))
    pools = [
        ("pool", prefill, "h20", LAN_MBIT_S, LAN_RTT_MS),
        ("far", remote, "h200", LINK_MBIT_S, RTT_MS),
    ]
    scenario = {
        "scenario_version": 1,
        "name": "fleet",
        "local": {"prefill": "decode.yaml", "instances": decode, "colocated": True},
        "peers": [
            {
                "name": name,
                "profile": f"{profile}.yaml",
                "instances": count,
                "central_queue": False,
                "link": {"gbit_per_s": mbit_s / 1e3, "rtt_ms": rtt_ms},
            }
            for name, count, profile, mbit_s, rtt_ms in pools
            if count
        ],
        "telemetry": {
            "interval_s": Limits().watch_interval_s,
            "settle_s": Limits().watch_interval_s,
        },
        "workload": {
            "output_tokens": output_tokens(),
            "prompt": {
                "mu": PAPER_LENGTHS.mu - math.log(TOKENS_OF_ONE),
                "sigma": PAPER_LENGTHS.sigma,
                "low_tokens": prompt_tokens(PAPER_LENGTHS.low_tokens),
                "high_tokens": prompt_tokens(PAPER_LENGTHS.high_tokens),
            },
        },
    }
    file = directory / "scenario.yaml"
    file.write_text(yaml.safe_dump(scenario))
    return file


def output_tokens() -> int:
    """Of each answer."""
    return PAPER_OUTPUT_TOKENS // TOKENS_OF_ONE


def prompt_tokens(paper_tokens: float) -> int:
    """A prompt of so many tokens in the paper, here."""
    return max(2, round(paper_tokens / TOKENS_OF_ONE))


def write_fleet(
    directory: Path,
    *,
    decode: int,
    prefill: int,
    remote: int,
    gateways: int = 1,
    redis: str = "",
) -> Path:
    """The file of a fleet of H20 instances, `prefill` of them a pool on the local network, and
    `remote` H200 instances behind the paper's link. `redis`: URL of what the gateways share.
    """
    directory.mkdir(parents=True, exist_ok=True)
    profiles = {
        "h20": scaled_profile("paper-h20"),
        "h200": scaled_profile("paper-h200"),
    }
    for name, profile in profiles.items():
        (directory / f"{name}.yaml").write_text(yaml.safe_dump(profile))
    pools = [
        ("pool", prefill, "h20", {"rtt_ms": LAN_RTT_MS}, "lan"),
        ("far", remote, "h200", {"mbit_s": LINK_MBIT_S, "rtt_ms": RTT_MS}, "wan"),
    ]
    fleet = {
        "fleet_version": 1,
        "model": MODEL,
        "gateways": gateways,
        "gateway": {
            "tokenizer": str(_TOKENIZER),
            "short_body_bytes": 0,
            "policy": {"name": "least_ttft", "min_uncached_tokens": 1},
            **({"state": {"redis": redis}} if redis else {}),
        },
        "limits": {
            "gateway_max_in_flight": 4096,
            "engine_active_requests": 0,
            "engine_max_waiting": 1024,
            "prefill_queue_sessions": 1024,
            "agent_max_sessions": 1024,
            "staging_timeout_s": 60.0,
        },
        "engines": {
            "count": decode,
            "engine": {
                "paced": "h20.yaml",
                "chunk_tokens": DECODE_CHUNK,
                "kv_memory_bytes": 64 << 20,
                "max_batch": find_profile("paper-h20").decode.max_batch,
            },
            "agent": {"staging_bytes": 256 << 20},
        },
        "peers": [
            {
                "name": name,
                "instances": count,
                "engine": {"paced": f"{profile}.yaml", "kv_memory_bytes": 32 << 20},
                "link": link,
                "link_class": link_class,
            }
            for name, count, profile, link, link_class in pools
            if count
        ],
    }
    file = directory / "fleet.yaml"
    file.write_text(yaml.safe_dump(fleet))
    return file


@asynccontextmanager
async def running_fleet(file: Path, say: Callable[[str], None]) -> AsyncIterator[FleetProcesses]:
    """Up and paired while the context lasts."""
    fleet = FleetProcesses(FleetPlan.create(read_fleet(file), file, file.parent), say)
    try:
        await fleet.start()
        yield fleet
    finally:
        await fleet.stop()


def paper_seconds(seconds: float) -> float:
    """What was measured here, in the paper's time."""
    return seconds / TIME_SCALE
