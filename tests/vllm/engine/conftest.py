"""One vLLM in the test's own process, its connector, and an agent that is all script."""

from __future__ import annotations

import os

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

from collections.abc import Iterator
from pathlib import Path

import pytest

from prfaas.testing.staging_agent import StagingAgent
from prfaas.testing.tinymodel import make_tiny_model
from prfaas.testing.vllm_inprocess import InProcessVllm


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a head size that vLLM has on CPUs."""
    directory = tmp_path_factory.mktemp("model")
    return make_tiny_model(
        directory, hidden=128, heads=4, kv_heads=2, head_dim=32, intermediate=256, layers=3
    )


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StagingAgent]:
    with StagingAgent(tmp_path_factory.mktemp("port") / "kv.sock") as agent:
        yield agent


@pytest.fixture(scope="module")
def vllm_module(
    request: pytest.FixtureRequest,
    tiny_model: Path,
    agent: StagingAgent,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[InProcessVllm]:
    """The engine as `ENGINE`, `OPTIONS` and `beside` of the test module say; one in a process."""
    beside = getattr(request.module, "beside", None)
    engine = InProcessVllm(
        tiny_model,
        agent,
        engine=getattr(request.module, "ENGINE", {}),
        options=getattr(request.module, "OPTIONS", {}),
        beside=beside(tmp_path_factory.mktemp("beside")) if beside else None,
    )
    yield engine
    engine.close()


@pytest.fixture
def vllm(vllm_module: InProcessVllm, agent: StagingAgent) -> Iterator[InProcessVllm]:
    """The same with nothing cached, nothing running and a fresh script; left as clean."""
    vllm_module.begin()
    yield vllm_module
    vllm_module.assert_idle()
