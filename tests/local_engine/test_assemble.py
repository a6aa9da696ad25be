from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from local_engine.assemble import Assembled, assemble, paced_settings, package_version
from local_engine.paced_profile import load_profile
from prfaas.errors import ConfigError
from prfaas.kvport import EngineConn, PortServer
from prfaas.layout import KvLayout
from prfaas.settings import EngineSettings, load_settings
from prfaas.testing.tinymodel import make_tiny_model
from prfaas_connect.port.messages import Hello

PROFILES = Path(__file__).parents[2] / "deploy" / "profiles"


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", max_context=512)


def profile(directory: Path, name: str, **changes: Any) -> Path:
    """A quick profile of one model; `changes` replace whole sections."""
    data = {
        "name": name,
        "source": "made up",
        "tokenizer": str(PROFILES / "byte-tokenizer"),
        "model": {
            "layers": 2, "kv_heads": 2, "head_dim": 8, "dtype": "float16", "max_context": 512,
        },
        "prefill": {"base_s": 0.0, "token_s": 1e-6, "chunk_tokens": 48},
        "decode": {"step_s": 1e-6, "max_batch": 4},
        **changes,
    }  # fmt: skip
    path = directory / f"{name}.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


def build(**engine: Any) -> Assembled:
    engine = {"threads": 1, "kv_memory_bytes": 4 << 20, **engine}
    return assemble(load_settings(None, {"engine": engine}))


@asynccontextmanager
async def agent(path: Path) -> AsyncIterator[asyncio.Future[Hello]]:
    """A KvPort that keeps the first Hello."""
    hello: asyncio.Future[Hello] = asyncio.get_running_loop().create_future()

    async def on_engine(conn: EngineConn) -> None:
        if not hello.done():
            hello.set_result(conn.hello)
        async for _ in conn:
            pass

    server = PortServer(
        path, agent_name="test", ring_bytes=1 << 20, staging_bytes=1 << 20, on_engine=on_engine
    )
    await server.start()
    try:
        yield hello
    finally:
        await server.close()


async def introduced(tmp_path: Path, **engine: Any) -> Hello:
    """What an engine of these settings tells its agent."""
    socket = tmp_path / "port.sock"
    async with agent(socket) as hello:
        assembled = build(port_socket=str(socket), **engine)
        await asyncio.to_thread(assembled.engine.start)
        try:
            return await asyncio.wait_for(hello, 10)
        finally:
            await asyncio.to_thread(assembled.engine.close)


async def test_an_engine_introduces_itself_to_its_agent(tmp_path: Path, tiny_model: Path) -> None:
    hello = await introduced(
        tmp_path,
        model=str(tiny_model),
        kv_dtype="float32",
        chunk_tokens=64,
        block_tokens=8,
        roles=["decode"],
        served_model_name="served",
        max_context=400,
    )
    layout = KvLayout.from_dict(hello.layout)
    (group,) = layout.groups
    assert (group.layers, group.kv_heads, group.head_dim) == ((0, 1, 2, 3), 2, 16)
    assert group.dtype == "float32"
    assert (hello.chunk_tokens, hello.block_tokens, hello.max_tokens) == (64, 8, 400)
    assert hello.roles == ["decode"]
    assert hello.max_running == EngineSettings().max_batch
    assert hello.model == "served"
    assert hello.engine == f"embedded {package_version()}"
    assert hello.ranks == [[0, 2]]
    assert hello.paced is False
    assert hello.model_identity
    assert hello.tokenizer_digest


async def test_identity_can_be_stated_by_the_operator(tmp_path: Path, tiny_model: Path) -> None:
    hello = await introduced(tmp_path, model=str(tiny_model), model_identity="ours-v3")
    assert hello.model_identity == "ours-v3"


async def test_paced_engines_of_one_model_can_pair_whatever_their_speed(tmp_path: Path) -> None:
    d = await introduced(tmp_path, paced=str(profile(tmp_path, "slow")))
    p = await introduced(
        tmp_path,
        paced=str(profile(tmp_path, "fast", decode={"step_s": 1e-3, "max_batch": 9})),
    )
    other_model = {
        "layers": 2, "kv_heads": 2, "head_dim": 8, "dtype": "float16", "max_context": 512,
        "seed": 1,
    }  # fmt: skip
    other = await introduced(tmp_path, paced=str(profile(tmp_path, "other", model=other_model)))
    assert d.paced
    for name in ("layout", "model_identity", "config_digest", "tokenizer_digest", "vocab_size"):
        assert getattr(d, name) == getattr(p, name), name
    assert d.model_identity != other.model_identity
    assert d.config_digest != other.config_digest
    assert d.epoch != p.epoch


async def test_a_paced_engine_is_never_taken_for_a_real_one(
    tmp_path: Path, tiny_model: Path
) -> None:
    paced = await introduced(tmp_path, paced=str(profile(tmp_path, "p")))
    real = await introduced(tmp_path, model=str(tiny_model))
    assert paced.model_identity.startswith("paced-")
    assert paced.config_digest != real.config_digest


def test_settings_left_at_their_default_yield_to_the_profile(tmp_path: Path) -> None:
    loaded = load_profile(profile(tmp_path, "p"))
    in_force = paced_settings(EngineSettings(), loaded)
    assert (in_force.chunk_tokens, in_force.max_batch, in_force.kv_dtype) == (48, 4, "float16")
    in_force = paced_settings(EngineSettings(chunk_tokens=96, max_batch=2), loaded)
    assert (in_force.chunk_tokens, in_force.max_batch) == (96, 2)


@pytest.mark.parametrize("setting", [{"kv_dtype": "float32"}, {"max_batch": 5}])
def test_settings_that_contradict_the_profile_are_refused(
    tmp_path: Path, setting: dict[str, Any]
) -> None:
    loaded = load_profile(profile(tmp_path, "p"))
    with pytest.raises(ConfigError, match=next(iter(setting))):
        paced_settings(EngineSettings(**setting), loaded)


def test_names_come_from_setting_directory_or_profile(tmp_path: Path, tiny_model: Path) -> None:
    assert build(model=str(tiny_model)).model_name == "tiny"
    assert build(model=str(tiny_model), served_model_name="x").model_name == "x"
    assert build(paced=str(profile(tmp_path, "p"))).model_name == "p"


def test_a_pool_smaller_than_the_context_shortens_it_and_says_so(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assembled = build(model=str(tiny_model), kv_blocks=4, block_tokens=16)
    assert assembled.max_context == assembled.kv_tokens == 64
    assert "contexts end there" in caplog.text


async def test_an_engine_that_never_started_can_be_closed(tmp_path: Path) -> None:
    assembled = build(paced=str(profile(tmp_path, "p")), port_socket=str(tmp_path / "none.sock"))
    with contextlib.closing(assembled.engine):
        pass
