"""Loading a model: configuration, weights, tokenizer and identity from a directory or GGUF file."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from local_engine.models.config import ModelConfig, config_from_gguf, config_from_hf
from local_engine.models.hybrid import HybridModel
from local_engine.models.llama import LlamaModel, expected_tensors
from local_engine.weights import (
    ROPE_FACTORS,
    GgufSource,
    SafetensorsSource,
    WeightSource,
    check_tensors,
)
from prfaas.errors import ConfigError
from prfaas.gguf_file import GgufFile
from prfaas.tokens import Tokenizer


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """What two sites compare before they exchange KV: the same for every file format.

    `model_identity` covers config, tokenizer and the names and shapes of all tensors, not how they
    are stored; that the weights themselves agree is for the numeric probe to prove.
    """

    model_identity: str
    config_digest: str
    tokenizer_digest: str
    layers: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run; its owner drops it, nothing to close."""

    model: LlamaModel
    config: ModelConfig
    tokenizer: Tokenizer
    identity: ModelIdentity


def load_model(
    path: Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> LoadedModel:
    """Load a Hugging Face directory (safetensors) or a `.gguf` file, computing in `dtype`.

    Raises ConfigError that names the file, field or tensor at fault.
    """
    source: WeightSource
    if path.is_dir():
        config = config_from_hf(_read_json(path / "config.json"))
        source = SafetensorsSource(path)
        tokenizer = Tokenizer.load(path)
    elif path.is_file() and path.suffix == ".gguf":
        file = GgufFile(path)
        config = gguf_config(file)
        source = GgufSource(file, config)
        tokenizer = Tokenizer.from_gguf(file)
    else:
        raise ConfigError(f"{path} is neither a model directory nor a .gguf file")
    check_tensors(source, expected_tensors(config))
    architecture = HybridModel if config.recurrent else LlamaModel
    model = architecture(config, source, dtype, torch.device(device))
    return LoadedModel(model, config, tokenizer, identity_of(config, tokenizer.digest))


def gguf_config(file: GgufFile) -> ModelConfig:
    """The model configuration of an open GGUF file."""
    metadata = file.scalars()
    vocab_key = f"{metadata.get('general.architecture')}.vocab_size"
    if vocab_key not in metadata:
        embedding = file.shape("token_embd.weight")
        if embedding is None:
            raise ConfigError(f"{file.path} lacks tensor token_embd.weight")
        metadata[vocab_key] = embedding[0]
    factors: list[float] = []
    if ROPE_FACTORS in file.tensor_names:
        factors = file.tensor(ROPE_FACTORS).tolist()
    return config_from_gguf(metadata, file.tensor_names, factors)


def identity_of(config: ModelConfig, tokenizer_digest: str) -> ModelIdentity:
    """The identity of a model of this configuration and tokenizer."""
    config_digest = config.digest()
    # A tied head is the embedding, whether or not the file stores it twice; padding rows of the
    # vocabulary differ between converters.
    vocab_tensors = ("model.embed_tokens.weight", "lm_head.weight")
    headers = sorted(
        (name, shape)
        for name, shape in expected_tensors(config).items()
        if name not in vocab_tensors
    )
    text = json.dumps([config_digest, tokenizer_digest, headers])
    return ModelIdentity(
        model_identity=hashlib.blake2b(text.encode(), digest_size=16).hexdigest(),
        config_digest=config_digest,
        tokenizer_digest=tokenizer_digest,
        layers=config.layers,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path} does not exist") from error
    except (ValueError, OSError) as error:
        raise ConfigError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return value
