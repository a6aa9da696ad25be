"""From settings to a running engine's parts: model or profile, pool, runner, engine, port."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from local_engine.engine import Engine
from local_engine.kv.pool import KvPool, pool_blocks, pool_state_slots, torch_dtype
from local_engine.kv_encode import encoders_for
from local_engine.loader import load_model
from local_engine.paced import PacedRunner, answer_tokens
from local_engine.paced_profile import PacedProfile, load_profile
from local_engine.runner import ModelRunner, TorchRunner
from prfaas.codecs import Calibration
from prfaas.errors import ConfigError
from prfaas.layout import KvLayout
from prfaas.settings import EngineSettings, Settings
from prfaas.tokens import Tokenizer
from prfaas_connect.port.engine import EnginePort
from prfaas_connect.port.messages import PORT_VERSION, Hello

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Assembled:
    """An engine that has not started, and what its server says about it.

    Whoever asked for it starts and closes the engine, which closes the port. `settings` are those
    in force: with a profile some of them come from it. `late_s`: see `PacedRunner`.
    """

    engine: Engine
    settings: EngineSettings
    tokenizer: Tokenizer
    model_name: str
    model_identity: str
    vocab_size: int
    max_context: int
    kv_tokens: int
    engine_version: str
    paced: str = ""
    late_s: Callable[[], float] | None = None


@dataclass(frozen=True, slots=True)
class _Model:
    """What the two kinds of engine differ in."""

    layout: KvLayout
    tokenizer: Tokenizer
    name: str
    identity: str
    config_digest: str
    vocab_size: int
    max_context: int
    make_runner: Callable[[KvPool], ModelRunner]
    paced: str = ""


def assemble(settings: Settings) -> Assembled:
    """Load what `settings.engine` names; takes seconds. Raises ConfigError naming the key."""
    engine_settings = settings.engine
    if (engine_settings.model is None) == (engine_settings.paced is None):
        raise ConfigError("engine.model, engine.paced: give one of them, not both", field="model")
    if engine_settings.threads:
        torch.set_num_threads(engine_settings.threads)
    if engine_settings.paced is not None:
        profile = load_profile(engine_settings.paced)
        engine_settings = paced_settings(engine_settings, profile)
        model = _paced_model(engine_settings, profile)
    else:
        model = _torch_model(engine_settings)
    return _assemble(settings, engine_settings, model)


def _assemble(settings: Settings, engine_settings: EngineSettings, model: _Model) -> Assembled:
    block_tokens = engine_settings.block_tokens
    blocks = engine_settings.kv_blocks or pool_blocks(
        model.layout, block_tokens, engine_settings.kv_memory_bytes
    )
    states = pool_state_slots(model.layout, blocks, engine_settings.state_memory_bytes)
    pool = KvPool(model.layout, blocks, block_tokens, _device(engine_settings), states)
    max_context = _max_context(engine_settings, model, blocks * block_tokens)
    runner = model.make_runner(pool)
    engine = Engine(
        runner,
        pool,
        engine_settings,
        settings.limits,
        vocab_size=model.vocab_size,
        eos_ids=model.tokenizer.eos_ids,
        max_context=max_context,
    )
    engine_version = package_version()
    if engine_settings.port_socket is not None:
        encoders = encoders_for(pool.device, _calibration(engine_settings))
        hello = _hello(engine_settings, model, engine.epoch, max_context, engine_version)
        hello = replace(hello, encodes=[encoder.name for encoder in encoders])
        path = str(engine_settings.port_socket)
        engine.attach_port(
            EnginePort(path, hello, engine, max_queue=settings.limits.port_send_queue), encoders
        )
    return Assembled(
        engine=engine,
        settings=engine_settings,
        tokenizer=model.tokenizer,
        model_name=model.name,
        model_identity=model.identity,
        vocab_size=model.vocab_size,
        max_context=max_context,
        kv_tokens=blocks * block_tokens,
        engine_version=engine_version,
        paced=model.paced,
        late_s=(lambda: runner.late_s) if isinstance(runner, PacedRunner) else None,
    )


def _torch_model(settings: EngineSettings) -> _Model:
    assert settings.model is not None
    loaded = load_model(settings.model, torch_dtype(settings.dtype), _device(settings))
    identity = loaded.identity
    return _Model(
        layout=loaded.config.kv_layout(settings.kv_dtype),
        tokenizer=loaded.tokenizer,
        name=settings.served_model_name or _name_of(settings.model),
        identity=settings.model_identity or identity.model_identity,
        config_digest=identity.config_digest,
        vocab_size=loaded.config.vocab_size,
        max_context=loaded.config.max_context,
        make_runner=lambda pool: TorchRunner(loaded.model, pool),
    )


def _paced_model(settings: EngineSettings, profile: PacedProfile) -> _Model:
    tokenizer = Tokenizer.load(profile.tokenizer)
    ids = answer_tokens(tokenizer)
    return _Model(
        layout=profile.layout,
        tokenizer=tokenizer,
        name=settings.served_model_name or profile.name,
        identity=settings.model_identity or f"paced-{profile.config_digest}",
        config_digest=profile.config_digest,
        vocab_size=tokenizer.vocab_size,
        max_context=profile.model.max_context,
        make_runner=lambda pool: PacedRunner(profile, pool, ids),
        paced=profile.name,
    )


def paced_settings(settings: EngineSettings, profile: PacedProfile) -> EngineSettings:
    """Settings in force with a profile: those left at their default yield to it.

    Raises ConfigError where one contradicts it.
    """
    of_profile: dict[str, Any] = {
        "chunk_tokens": profile.prefill.chunk_tokens,
        "max_batch": profile.decode.max_batch,
        "kv_dtype": profile.model.dtype,
    }
    defaults = {name: EngineSettings.model_fields[name].default for name in of_profile}
    changed = {
        name: value
        for name, value in of_profile.items()
        if getattr(settings, name) == defaults[name]
    }
    result = settings.model_copy(update=changed)
    if result.kv_dtype != profile.model.dtype:
        raise ConfigError(
            f"engine.kv_dtype is {result.kv_dtype}, the profile's KV is {profile.model.dtype}",
            field="kv_dtype",
        )
    if result.max_batch > profile.decode.max_batch:
        raise ConfigError(
            f"engine.max_batch is {result.max_batch}, "
            f"the profile holds for up to {profile.decode.max_batch}",
            field="max_batch",
        )
    return result


def _max_context(settings: EngineSettings, model: _Model, kv_tokens: int) -> int:
    """The longest context all of model, settings and pool allow."""
    asked = settings.max_context or model.max_context
    if asked > model.max_context:
        raise ConfigError(
            f"engine.max_context is {asked}, the model's is {model.max_context}",
            field="max_context",
        )
    if asked <= kv_tokens:
        return asked
    if settings.max_context:
        raise ConfigError(
            f"engine.max_context is {asked}, the KV pool holds {kv_tokens} tokens "
            "(engine.kv_blocks, engine.kv_memory_bytes)",
            field="max_context",
        )
    log.warning(
        "the KV pool of %d tokens is smaller than the model's context of %d: contexts end there",
        kv_tokens,
        model.max_context,
    )
    return kv_tokens


def _hello(
    settings: EngineSettings, model: _Model, epoch: str, max_context: int, engine_version: str
) -> Hello:
    """How the engine introduces itself to its agent."""
    return Hello(
        version=PORT_VERSION,
        engine=f"embedded {engine_version}",
        roles=list(settings.roles),
        model=model.name,
        layout=model.layout.to_dict(),
        chunk_tokens=settings.chunk_tokens,
        block_tokens=settings.block_tokens,
        max_tokens=max_context,
        vocab_size=model.vocab_size,
        model_identity=model.identity,
        config_digest=model.config_digest,
        tokenizer_digest=model.tokenizer.digest,
        ranks=[[0, max(group.kv_heads for group in model.layout.groups)]],
        epoch=epoch,
        paced=bool(model.paced),
        max_running=settings.max_batch,
    )


def _calibration(settings: EngineSettings) -> Calibration | None:
    path = settings.codec_calibration
    return None if path is None else Calibration.load(path)


def _device(settings: EngineSettings) -> torch.device:
    try:
        return torch.device(settings.device)
    except RuntimeError as error:
        raise ConfigError(
            f"engine.device: {settings.device!r} is not a torch device", field="device"
        ) from error


def _name_of(model: Path) -> str:
    return model.stem if model.suffix == ".gguf" else model.resolve().name


def package_version() -> str:
    """The installed version of prfaas."""
    try:
        return version("prfaas")
    except PackageNotFoundError:
        return "0+unknown"
