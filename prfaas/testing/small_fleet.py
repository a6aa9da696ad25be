"""The file of a small fleet of paced engines, for tests: two that decode, and one peer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

MODEL = "small"
PROFILES = Path(__file__).parents[2] / "deploy" / "profiles"


def small_fleet(*, gateway: dict[str, Any] | None = None, **parts: Any) -> dict[str, Any]:
    """As YAML would have it; `gateway` adds settings, `parts` whole keys such as `faults`."""
    paced = {"kv_memory_bytes": 16 << 20}
    return {
        "fleet_version": 1,
        "model": MODEL,
        "gateway": {
            "tokenizer": str(PROFILES / "byte-tokenizer"),
            "short_body_bytes": 0,
            **(gateway or {}),
        },
        "engines": {
            "count": 2,
            "engine": {**paced, "paced": str(PROFILES / "small-decode.yaml")},
            "agent": {"staging_bytes": 16 << 20},
        },
        "peers": [
            {
                "name": "fra",
                "engine": {**paced, "paced": str(PROFILES / "small-prefill.yaml")},
                "link": {"mbit_s": 200, "rtt_ms": 10},
            }
        ],
        **parts,
    }
