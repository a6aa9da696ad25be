"""Fetches the public request traces that tests and benchmarks use (`-m scripts.fetch_traces`).

Names where each comes from and under which licence, checks its rows against a digest, and writes it
compressed into the folder of PRFAAS_TRACES.
"""

from __future__ import annotations

import gzip
import hashlib
import sys
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import click

from policies.workload.source import traces_folder

TIMEOUT_S = 60.0
MAX_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Trace:
    """One file: where it is, and what its uncompressed bytes must be."""

    file: str
    url: str
    sha256: str
    licence: str


TRACES = (
    Trace(
        "mooncake_conversation_trace.jsonl.gz",
        "https://raw.githubusercontent.com/kvcache-ai/Mooncake/main/FAST25-release/traces/"
        "conversation_trace.jsonl",
        "b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df",
        "Apache-2.0, kvcache-ai/Mooncake",
    ),
    Trace(
        "AzureLLMInferenceTrace_code.csv.gz",
        "https://raw.githubusercontent.com/Azure/AzurePublicDataset/master/data/"
        "AzureLLMInferenceTrace_code.csv",
        "54e9a6d2a4bd06ba1e060304b900abbc74cbea53de96506e60fe5bb4f2277fb6",
        "CC-BY 4.0, Azure/AzurePublicDataset; cite Splitwise, ISCA 2024",
    ),
    Trace(
        "AzureLLMInferenceTrace_conv.csv.gz",
        "https://raw.githubusercontent.com/Azure/AzurePublicDataset/master/data/"
        "AzureLLMInferenceTrace_conv.csv",
        "2f1e5b666d4e3055fdbba98598ce2ec307767b9064e03e2fa46676dbcc7d0bf8",
        "CC-BY 4.0, Azure/AzurePublicDataset; cite Splitwise, ISCA 2024",
    ),
)


def digest(path: Path) -> str:
    """SHA-256 of the uncompressed rows, so that the compression does not matter."""
    found = hashlib.sha256()
    with gzip.open(path, "rb") as rows:
        while block := rows.read(1 << 20):
            found.update(block)
    return found.hexdigest()


def fetch(trace: Trace, folder: Path) -> str:
    """What became of one trace: a line to print. Raises OSError or ValueError."""
    path = folder / trace.file
    if path.is_file():
        same = digest(path) == trace.sha256
        return f"{path}: {'already there' if same else 'there, but other rows than expected'}"
    with urllib.request.urlopen(trace.url, timeout=TIMEOUT_S) as answer:
        data = answer.read(MAX_BYTES + 1)
    if hashlib.sha256(data).hexdigest() != trace.sha256:
        raise ValueError(f"{trace.url}: other rows than expected; nothing was written")
    folder.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_bytes(gzip.compress(data, mtime=0))
    part.rename(path)
    return f"{path}: {len(data)} bytes, {trace.licence}"


@click.command()
@click.option("--list", "only_list", is_flag=True, help="Name sources and digests only.")
def main(only_list: bool) -> None:
    """Fetch the traces that are not there yet."""
    failed = False
    for trace in TRACES:
        if only_list:
            click.echo(f"{trace.file}\n  {trace.url}\n  sha256 {trace.sha256}\n  {trace.licence}")
            continue
        try:
            click.echo(fetch(trace, traces_folder()))
        except (OSError, ValueError) as error:
            click.echo(f"{trace.file}: {error}", err=True)
            failed = True
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
