"""`prfaas workload`: describe a trace or a generated workload, plot it, write it."""

from __future__ import annotations

import json
from pathlib import Path

from policies.prefix_cache import CacheSpec
from policies.scenario import load_scenario
from policies.workload.describe import describe, read_columns
from policies.workload.source import Source, open_source
from prfaas.whole_file import whole_file


def run_workload(
    trace: Path | None,
    trace_format: str | None,
    scenario: str,
    cache_tokens: int | None,
    state_tokens: int,
    write: Path | None,
    plots: Path | None,
    as_json: bool,
) -> tuple[str, list[str]]:
    """The description as text or JSON, and notes on what was left out. Raises ConfigError."""
    generator = load_scenario(scenario)[0].workload
    source = open_source(trace, trace_format, generator)
    if write is not None:
        write_mooncake(source, write)
    columns = read_columns(source, CacheSpec(cache_tokens, state_tokens))
    description = describe(columns)
    notes = [source.note()] if source.note() else []
    if plots is not None:
        from policies.workload.plots import plot_workload

        plot_workload(columns, plots)
        notes.append(f"written: {plots}")
    if as_json:
        return json.dumps(description.to_json(), indent=2) + "\n", notes
    return description.to_text(), notes


def write_mooncake(source: Source, path: Path) -> None:
    """Write requests as a Mooncake trace; times are in whole milliseconds there."""
    with whole_file(path) as part, part.open("w", encoding="utf-8") as out:
        for r in source:
            row = {
                "timestamp": round(r.arrival_s * 1e3),
                "input_length": r.prompt_tokens,
                "output_length": r.output_tokens,
                "hash_ids": list(r.blocks),
            }
            out.write(json.dumps(row) + "\n")
