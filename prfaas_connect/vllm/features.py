"""What this vLLM can do, found by looking at its classes, and what we cannot do without.

Versions are not compared: forks and nightlies carry any number.
"""

from __future__ import annotations

import dataclasses
import inspect
from dataclasses import dataclass
from typing import Any


class UnsupportedVllm(RuntimeError):
    """This vLLM, or how it is set up, cannot work with prfaas; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class Features:
    """Of one version of vLLM's connector interface."""

    version: str
    kv_cache_config: bool
    """The constructor takes it, and vLLM gives it."""
    may_answer_none: bool
    """A connector may say that it does not know yet, and is asked again."""
    load_errors: bool
    """A worker may report blocks that failed to load."""
    failure_policy: bool
    """A failed load may end its request, rather than be computed again."""
    request_hook: bool
    """The connector hears of a request before it is first scheduled."""
    block_pool: bool
    """The connector may look into the prefix cache."""
    worker_meta: bool
    """Workers may answer the scheduler's half."""


def detect(base: type, config: Any, version: str) -> Features:
    """Features of the connector's base class and of vLLM's KVTransferConfig."""
    answer = inspect.signature(base.get_num_new_matched_tokens).return_annotation  # type: ignore[attr-defined]
    return Features(
        version=version,
        kv_cache_config="kv_cache_config" in inspect.signature(base.__init__).parameters,  # type: ignore[misc]
        may_answer_none="None" in str(answer) or "Optional" in str(answer),
        load_errors=hasattr(base, "get_block_ids_with_load_errors"),
        failure_policy=hasattr(config, "kv_load_failure_policy"),
        request_hook=hasattr(base, "on_new_request"),
        block_pool=hasattr(base, "bind_gpu_block_pool"),
        worker_meta=hasattr(base, "build_connector_worker_meta"),
    )


def require_decode(features: Features, config: Any) -> None:
    """Raise UnsupportedVllm unless this vLLM can decode from remote KV."""
    needs = (
        (
            features.may_answer_none,
            "lets no request wait for KV (no connector may answer None)",
        ),
        (features.load_errors, "has no way to report KV that did not load"),
        (features.failure_policy, "has no kv_load_failure_policy and computes what D refused"),
    )
    for there, sentence in needs:
        if not there:
            raise UnsupportedVllm(
                f"prfaas cannot decode on vLLM {features.version}: this version {sentence}; "
                "use vLLM 0.32"
            )
    for each in filter(None, (config, _outer_config())):
        if each.kv_load_failure_policy != "fail":
            raise UnsupportedVllm(
                "prfaas needs kv_load_failure_policy=fail in --kv-transfer-config: under "
                f"{each.kv_load_failure_policy!r} vLLM would compute locally what was refused, "
                "whatever its load"
            )


def _outer_config() -> Any:
    """The transfer configuration in force; within a MultiConnector it is not our own."""
    try:
        from vllm.config import get_current_vllm_config_or_none
    except ImportError:
        return None
    current = get_current_vllm_config_or_none()
    return current.kv_transfer_config if current is not None else None


def require_engine(vllm_config: Any) -> None:
    """Raise UnsupportedVllm for what an engine may be set up to do and we do not carry."""
    parallel = vllm_config.parallel_config
    refusals = (
        (
            getattr(parallel, "pipeline_parallel_size", 1) > 1,
            "pipeline parallelism: the layers of one request would be in several processes",
        ),
        (
            _context_parallel(parallel) > 1,
            "context parallelism: the tokens of one block would be in several processes",
        ),
        (
            getattr(parallel, "data_parallel_size", 1) > 1,
            "data parallelism within one server: run one server, with one agent, for each replica",
        ),
        (
            str(getattr(vllm_config.cache_config, "cache_dtype", "auto")).startswith("fp8"),
            "an fp8 KV cache: its scales do not travel",
        ),
        (
            getattr(vllm_config, "speculative_config", None) is not None,
            "speculative decoding: the draft model's KV does not travel",
        ),
    )
    for refused, sentence in refusals:
        if refused:
            raise UnsupportedVllm(f"prfaas does not support vLLM with {sentence}")


def _context_parallel(parallel: Any) -> int:
    names = ("decode_context_parallel_size", "prefill_context_parallel_size")
    return max(int(getattr(parallel, name, 1) or 1) for name in names)


def summary(features: Features) -> str:
    """One line for the log: the version, and what it lacks that we can do without."""
    optional = ("kv_cache_config", "request_hook", "block_pool", "worker_meta")
    known = dataclasses.asdict(features)
    lacks = [name for name in optional if not known[name]]
    return f"vLLM {features.version}" + (f" without {', '.join(lacks)}" if lacks else "")


def vllm_version() -> str:
    """As vLLM says it."""
    import vllm

    return str(getattr(vllm, "__version__", "unknown"))
