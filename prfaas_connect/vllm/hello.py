"""From vLLM's configuration to KvPort's Hello: layout, identity, roles and ranks of the engine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prfaas_connect.port.layout import GroupKind, KvLayout, LayerGroup, LayoutError
from prfaas_connect.port.messages import PORT_VERSION, Hello
from prfaas_connect.vllm.identity import Identity, identity_of
from prfaas_connect.vllm.layouts import DTYPE_NAMES, HeadRange

CHUNK_TOKENS = 256
IMPORT_BYTES_PER_STEP = 16 << 20
ROLES = {
    "kv_producer": ("prefill",),
    "kv_consumer": ("decode",),
    "kv_both": ("prefill", "decode"),
}
FULL_ATTENTION = "FullAttentionSpec"
"""vLLM's name for KV of which every token stays until its request ends."""
_LAYER_INDEX = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)(?:\.|$)")


@dataclass(frozen=True, slots=True)
class Options:
    """What an operator sets in `kv_connector_extra_config`; unknown names are errors."""

    socket: str
    """KvPort socket of the agent."""
    chunk_tokens: int = CHUNK_TOKENS
    import_bytes_per_step: int = IMPORT_BYTES_PER_STEP
    model_identity: str = ""
    config_digest: str = ""
    tokenizer_digest: str = ""
    """Stated rather than computed, for what cannot be or must not be compared."""
    kv_layout: str = ""
    """Name of the paged layout, where several fit; checked all the same."""

    @staticmethod
    def of(extra: Mapping[str, Any]) -> Options:
        """Raises LayoutError that names the option."""
        given = {k: v for k, v in extra.items() if not k.startswith("_")}
        kinds = {name: field.type for name, field in Options.__dataclass_fields__.items()}
        for name, value in given.items():
            if name not in kinds:
                raise LayoutError(
                    f"kv_connector_extra_config.{name} is unknown; known are {sorted(kinds)}"
                )
            wanted: type = int if kinds[name] == "int" else str
            if type(value) is not wanted:
                raise LayoutError(
                    f"kv_connector_extra_config.{name} must be {wanted.__name__}, not {value!r}"
                )
            if type(value) is int and value < 1:
                raise LayoutError(f"kv_connector_extra_config.{name} must be positive")
        if not given.get("socket"):
            raise LayoutError(
                "kv_connector_extra_config.socket must name the agent's KvPort socket"
            )
        return Options(**given)


def hello_of(
    vllm_config: Any, kv_cache_config: Any, options: Options, *, epoch: str, version: str
) -> Hello:
    """Introduce the engine. Raises LayoutError for a KV cache that cannot be carried."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    layout = layout_of(vllm_config, kv_cache_config)
    heads = layout.groups[0].kv_heads
    ranks = parallel.tensor_parallel_size
    ranges = [HeadRange.of_rank(rank, ranks, heads) for rank in range(ranks)]
    identity = _identity(model, options)
    return Hello(
        version=PORT_VERSION,
        engine=f"vllm {version}",
        roles=list(ROLES[vllm_config.kv_transfer_config.kv_role]),
        model=_served_name(model),
        layout=layout.to_dict(),
        chunk_tokens=options.chunk_tokens,
        block_tokens=vllm_config.cache_config.block_size,
        max_tokens=model.max_model_len,
        vocab_size=model.get_vocab_size(),
        model_identity=identity.model_identity,
        config_digest=identity.config_digest,
        tokenizer_digest=identity.tokenizer_digest,
        ranks=[[each.start, each.end] for each in ranges],
        epoch=epoch,
        max_running=_max_running(vllm_config),
    )


def _max_running(vllm_config: Any) -> int:
    """0 where this version calls it by another name."""
    scheduler = getattr(vllm_config, "scheduler_config", None)
    return int(getattr(scheduler, "max_num_seqs", 0) or 0)


def layout_of(vllm_config: Any, kv_cache_config: Any) -> KvLayout:
    """Canonical layout of the whole engine's KV, all ranks together."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    if getattr(model, "use_mla", False):
        raise LayoutError("this model keeps latent KV (MLA), which this version does not carry")
    dtype = getattr(model, "dtype", None)
    layers = tuple(range(model.get_num_layers(parallel)))
    head_dim = model.get_head_size()
    if kv_cache_config is not None:
        groups = kv_cache_config.kv_cache_groups
        if len(groups) != 1:
            raise LayoutError(
                f"this model has {len(groups)} kinds of KV cache; this version carries only models "
                "in which all layers keep full attention's"
            )
        spec = groups[0].kv_cache_spec
        kind = type(spec).__name__
        if kind != FULL_ATTENTION:
            raise LayoutError(
                f"this model keeps KV as vLLM's {kind}; this version carries only {FULL_ATTENTION}"
            )
        layers = tuple(sorted(layer_index(name) for name in groups[0].layer_names))
        dtype = getattr(spec, "dtype", dtype)
        head_dim = getattr(spec, "head_size", head_dim)
    if dtype not in DTYPE_NAMES:
        raise LayoutError(f"KV dtype {dtype} is not one of {sorted(DTYPE_NAMES.values())}")
    heads = model.get_total_num_kv_heads()
    group = LayerGroup(GroupKind.FULL, layers, heads, head_dim, DTYPE_NAMES[dtype])
    return KvLayout((group,))


def layer_index(name: str) -> int:
    """Model layer of a KV cache's name ("model.layers.3.self_attn.attn")."""
    found = _LAYER_INDEX.search(name)
    if found is None:
        raise LayoutError(f"the KV cache {name!r} does not say which layer it is of")
    return int(found[1])


def _identity(model: Any, options: Options) -> Identity:
    stated = Identity(options.model_identity, options.config_digest, options.tokenizer_digest)
    if all((stated.model_identity, stated.config_digest, stated.tokenizer_digest)):
        return stated
    config = getattr(model, "hf_text_config", None) or model.hf_config
    found = identity_of(config.to_dict(), _tokenizer_file(model))
    return Identity(
        stated.model_identity or found.model_identity,
        stated.config_digest or found.config_digest,
        stated.tokenizer_digest or found.tokenizer_digest,
    )


def _tokenizer_file(model: Any) -> Path | None:
    """The model's tokenizer.json, on disk or in vLLM's own download cache."""
    if getattr(model, "skip_tokenizer_init", False):
        return None
    local = Path(model.tokenizer) / "tokenizer.json"
    if local.is_file():
        return local
    from transformers.utils.hub import cached_file

    found = cached_file(
        model.tokenizer,
        "tokenizer.json",
        revision=getattr(model, "tokenizer_revision", None),
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return Path(found) if found else None


def _served_name(model: Any) -> str:
    name = getattr(model, "served_model_name", None) or model.model
    return str(name[0] if isinstance(name, (list, tuple)) else name)
