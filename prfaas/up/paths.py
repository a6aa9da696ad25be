"""Where `prfaas up` keeps what outlives it: the demo model."""

from __future__ import annotations

import os
from pathlib import Path


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/prfaas`, by default `~/.cache/prfaas`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "prfaas"
