"""Write prfaas/codecs/csrc/ladder.h: the frequency tables of quantised coefficients.

Table k is for columns whose mean magnitude is about m_k: a generalised Gaussian (between Laplace
and normal, as transformed KV is), integrated over unit cells, as 12-bit frequencies. The tables are
part of the wire format, so they are committed, never computed where they are used.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import numpy.typing as npt

TABLES = 28
FIRST_MEAN, LAST_MEAN = 0.004, 14.0
SHAPE = 1.35
TOTAL = 4096
MAX_REACH = 126
OUT = Path(__file__).parent.parent / "prfaas/codecs/csrc/ladder.h"

Floats = npt.NDArray[np.float64]


def cells(scale: float, reach: int) -> Floats:
    """Probabilities of -reach..reach, and of all else."""
    x = np.linspace(-reach - 40.5, reach + 40.5, (2 * reach + 81) * 64 + 1)
    density = np.exp(-((np.abs(x) / scale) ** SHAPE))
    mass = (density[1:] + density[:-1]) / 2
    p = mass.reshape(-1, 64).sum(1)
    p /= p.sum()
    inside = p[40:-40]
    return np.append(inside, max(0.0, 1 - inside.sum()))


def scale_of(mean: float) -> float:
    """The scale at which the mean magnitude of a cell is `mean`."""
    low, high = 1e-3, 200.0
    for _ in range(80):
        middle = math.sqrt(low * high)
        p = cells(middle, MAX_REACH)
        found = float((np.abs(np.arange(-MAX_REACH, MAX_REACH + 1)) * p[:-1]).sum())
        low, high = (middle, high) if found < mean else (low, middle)
    return low


def frequencies(mean: float) -> list[int]:
    """Of -reach..reach and the escape; they add up to TOTAL, none is 0."""
    scale = scale_of(mean)
    wide = cells(scale, MAX_REACH)
    reach = 1
    while reach < MAX_REACH and wide[MAX_REACH + reach + 1] * TOTAL > 0.35:
        reach += 1
    p = cells(scale, reach)
    counts = np.maximum(1, np.round(p * TOTAL)).astype(int)
    counts[reach] += TOTAL - counts.sum()
    assert counts.min() >= 1
    assert counts.sum() == TOTAL
    return [int(n) for n in counts]


def main() -> None:
    means = np.geomspace(FIRST_MEAN, LAST_MEAN, TABLES)
    tables = [frequencies(float(mean)) for mean in means]
    bounds = [round(65536 * math.sqrt(a * b)) for a, b in itertools.pairwise(means)]
    longest = max(len(t) for t in tables)
    lines = [
        "/* Made by scripts/gen_codec_tables.py; part of the wire format. */",
        f"#define LADDER_TABLES {TABLES}",
        f"#define LADDER_LONGEST {longest}",
        "/* Symbols -reach..reach, then the escape. */",
        "static const uint8_t ladder_reach[LADDER_TABLES] = {",
        "    " + ", ".join(str((len(t) - 2) // 2) for t in tables),
        "};",
        "/* Table k is for means up to bound k (in 1/65536), the last for all above. */",
        "static const uint32_t ladder_bound[LADDER_TABLES - 1] = {",
        *("    " + ", ".join(map(str, bounds[i : i + 8])) + "," for i in range(0, len(bounds), 8)),
        "};",
        "static const uint16_t ladder_freq[LADDER_TABLES][LADDER_LONGEST] = {",
    ]
    for t in tables:
        rows = [", ".join(map(str, t[i : i + 16])) for i in range(0, len(t), 16)]
        lines.append("    {" + ",\n     ".join(rows) + "},")
    lines.append("};")
    OUT.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
