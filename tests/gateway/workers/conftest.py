"""What all tests of workers need."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A directory with a short name, because sockets stand in it."""
    with tempfile.TemporaryDirectory(prefix="prfaas-") as name:
        yield Path(name)
