"""The two fleets that the simulator is held against: engines that are paced, and a pair that
computes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from prfaas.settings import PolicySettings
from prfaas.up.calibration import STEP_LENGTH

MODEL = "fidelity"
PEER = "far"
D_ENGINE = "d-0-engine"
RTT_MS = 20.0
POLICY_FILE = "policy.yaml"
CALIBRATED_BY = "always_remote"
"""A pair of equals would keep at D whatever is asked while nobody waits."""
LOADED_BY = "least_ttft"
PARAMETERS: dict[str, dict[str, int]] = {LOADED_BY: {"min_uncached_tokens": 1}}
"""Every prompt is weighed, short ones too, which D would keep without asking further."""
_TOKENIZER = Path(__file__).parents[1] / "deploy" / "profiles" / "byte-tokenizer"
_KV = {"layers": 4, "kv_heads": 2, "head_dim": 64, "dtype": "bfloat16", "max_context": 8192}
"""Of paced engines: 2 KiB a token."""
_CHUNK_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Kind:
    """One fleet of a D and a P, and the load that suits it."""

    name: str
    computes: bool
    p90: bool
    """Whether the issue asks for P90 too."""
    lengths: tuple[int, ...]
    """Characters of prompts that calibrate: not whole chunks, or their base would not show. Of all
    lengths that are asked for later, the shortest too."""
    rounds: int
    step_length: int
    """Characters of prompts whose answers time decode steps."""
    least_tokens: int
    most_tokens: int
    """Of requests; what calibrates has more."""
    median_tokens: int
    sigma: float
    output_tokens: int
    token_ids: range
    """What prompts are made of."""
    max_batch: int
    mbit_s: float
    ttft_p90_s: float
    """At the rate that counts as all of it."""


def kinds() -> Iterator[Kind]:
    """Paced first: it takes no cores to speak of."""
    yield Kind(
        "paced",
        False,
        True,
        (150, 700, 1900, 4096),
        3,
        STEP_LENGTH,
        128,
        4096,
        900,
        0.7,
        16,
        range(97, 123),
        16,
        60.0,
        4.0,
    )
    yield Kind(
        "real",
        True,
        False,
        (110, 300, 600, 1200),
        4,
        340,
        64,
        600,
        200,
        0.5,
        4,
        range(1000, 40000),
        16,
        200.0,
        6.0,
    )


def write_fleet(kind: Kind, directory: Path, model: Path | None) -> Path:
    """The fleet's file, with profiles beside it. `model`: what computes."""
    near: dict[str, Any] = {"chunk_tokens": _CHUNK_TOKENS, "max_batch": kind.max_batch}
    far: dict[str, Any] = {"chunk_tokens": _CHUNK_TOKENS}
    if model is None:
        for name, token_s in (("near", 4e-4), ("far", 4e-4 / 3)):
            profile = {
                "name": name,
                "label": "estimate",
                "source": "made up for bench fidelity",
                "tokenizer": str(_TOKENIZER),
                "model": _KV,
                "prefill": {
                    "base_s": 0.01, "token_s": token_s, "token_context_s": token_s / 2e4,
                    "chunk_tokens": _CHUNK_TOKENS,
                },
                "decode": {"step_s": 0.02, "sequence_s": 0.001, "max_batch": kind.max_batch},
            }  # fmt: skip
            (directory / f"{name}.yaml").write_text(yaml.safe_dump(profile))
        near |= {"paced": "near.yaml", "kv_memory_bytes": 256 << 20}
        far |= {"paced": "far.yaml", "kv_memory_bytes": 256 << 20}
        tokenizer = _TOKENIZER
    else:
        near |= {"model": str(model)}
        far |= {"model": str(model)}
        tokenizer = model
    fleet = {
        "fleet_version": 1,
        "model": MODEL,
        # In the simulation all that waits does so at an engine, and nothing is refused.
        "limits": {"engine_active_requests": 0},
        "gateway": {
            "tokenizer": str(tokenizer),
            "short_body_bytes": 0,
            "policy": {"file": str(directory / POLICY_FILE)},
        },
        "engines": {"count": 1, "engine": near},
        "peers": [
            {
                "name": PEER,
                "instances": 1,
                "engine": far,
                "link": {"mbit_s": kind.mbit_s, "rtt_ms": RTT_MS},
            }
        ],
    }
    write_policy(directory, LOADED_BY)
    file = directory / "fleet.yaml"
    file.write_text(yaml.safe_dump(fleet))
    return file


def loaded_by() -> PolicySettings:
    """The same policy for the simulation."""
    return PolicySettings(name=LOADED_BY, **PARAMETERS[LOADED_BY])


def write_policy(directory: Path, name: str) -> None:
    """The gateway takes it over within a second or two."""
    new = directory / f"{POLICY_FILE}.new"
    policy = {"policy_version": 1, "policy": name, "parameters": PARAMETERS.get(name, {})}
    new.write_text(yaml.safe_dump(policy))
    new.replace(directory / POLICY_FILE)
