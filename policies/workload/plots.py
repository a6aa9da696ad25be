"""Plots of a workload; the plotting library is loaded here and nowhere else."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from policies.workload.describe import Columns
from prfaas.errors import ConfigError
from prfaas.whole_file import whole_file


def plot_workload(columns: Columns, path: Path) -> None:
    """Lengths, uncached shares, arrivals and gaps on one page. Raises ConfigError."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("plots need matplotlib: pip install 'prfaas[plots]'") from error
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    lengths, shares, arrivals, gaps = figure.subplots(2, 2).flat
    grid = np.linspace(0, 1, 501)
    for name, values, line in (
        ("prompt", columns.prompt, "-"),
        ("uncached", columns.uncached, "--"),  # over the prompts' where nothing is cached
        ("output", columns.output, "-"),
    ):
        lengths.plot(np.maximum(1, np.quantile(values, grid)), grid, line, label=name)
    lengths.set(xscale="log", xlabel="tokens", ylabel="share of requests", title="Lengths")
    lengths.legend()
    share = columns.uncached / columns.prompt
    shares.hist(share, bins=50, range=(0, 1), color="tab:blue")
    shares.set(
        xlabel="uncached share of the prompt", xlim=(-0.02, 1.02), ylabel="requests", title="Reuse"
    )
    span = float(columns.arrival_s[-1] - columns.arrival_s[0])
    window = max(1, math.ceil(span / 200))
    at = ((columns.arrival_s - columns.arrival_s[0]) / window).astype(int)
    counts = np.bincount(at) / window
    if len(counts) > 1:
        counts = counts[:-1]  # the last window is not over
    arrivals.step(np.arange(len(counts)) * window, counts, where="post")
    arrivals.set(
        xlabel="seconds",
        ylim=(0, None),
        ylabel="requests a second",
        title=f"Arrivals, by {window} s",
    )
    between = np.sort(np.diff(columns.arrival_s))
    if len(between) and between[-1] > 0:
        tail = 1 - (np.arange(len(between)) + 0.5) / len(between)
        mean = float(between.mean())
        gaps.plot(between, tail, label="here")
        gaps.plot(between, np.exp(-between / mean), "--", label="Poisson")
        gaps.set(yscale="log", ylim=(1e-4, 1))
        gaps.legend()
    gaps.set(xlabel="seconds", ylabel="share longer", title="Time between arrivals")
    with whole_file(path) as part:
        try:
            figure.savefig(part)
        except ValueError as error:  # a kind of picture that there is not
            raise ConfigError(f"cannot write {path}: {error}") from error
