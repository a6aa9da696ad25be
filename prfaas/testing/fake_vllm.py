"""vLLM's connector interface as several of its versions have it, without vLLM.

`installed` puts modules of vLLM's names in place, so that the connector imports them; only what a
connector touches is there. What a version lacks is really missing.
"""

from __future__ import annotations

import abc
import enum
import importlib
import itertools
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
OURS = "prfaas_connect.vllm"
REIMPORTED = ("metadata", "scheduler_half", "worker_half", "connector", "multi")


@dataclass(frozen=True, slots=True)
class FakeVersion:
    """What one version of vLLM has and does; `name` is the release it is modelled on."""

    name: str
    three_arguments: bool = True
    """The constructor takes kv_cache_config."""
    none_answers: bool = True
    load_errors: bool = True
    failure_policy: bool = True
    worker_meta: bool = True
    request_hook: bool = True
    block_pool: bool = True
    load_before_forward: bool = False
    """start_load_kv comes before the model rather than after."""
    frees_aborted_loads_at_once: bool = False
    """Blocks of a request that is aborted while it loads go to others in the next step."""
    counts_whole_blocks: bool = False
    """A finished load is taken to have filled its last block."""
    preemption_argument: str = "metadata"
    """What handle_preemptions gets: `metadata`, `ids`, or nothing where it is not called."""


VERSIONS = {
    version.name: version
    for version in (
        FakeVersion("0.32"),
        FakeVersion("0.21", request_hook=False, block_pool=False, load_before_forward=True),
        FakeVersion(
            "0.13",
            worker_meta=False,
            request_hook=False,
            block_pool=False,
            load_before_forward=True,
            frees_aborted_loads_at_once=True,
            counts_whole_blocks=True,
            preemption_argument="ids",
        ),
        FakeVersion(
            "0.11",
            three_arguments=False,
            failure_policy=False,
            worker_meta=False,
            request_hook=False,
            block_pool=False,
            load_before_forward=True,
            frees_aborted_loads_at_once=True,
            counts_whole_blocks=True,
            preemption_argument="",
        ),
        FakeVersion(
            "0.9",
            three_arguments=False,
            none_answers=False,
            load_errors=False,
            failure_policy=False,
            worker_meta=False,
            request_hook=False,
            block_pool=False,
            load_before_forward=True,
            frees_aborted_loads_at_once=True,
            counts_whole_blocks=True,
            preemption_argument="",
        ),
    )
}


class Role(enum.Enum):
    """Half of a connector."""

    SCHEDULER = 0
    WORKER = 1


def base_class(version: FakeVersion) -> type:
    """KVConnectorBase_V1 of this version."""

    class Base(abc.ABC):
        @abc.abstractmethod
        def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

        @abc.abstractmethod
        def wait_for_layer_load(self, layer_name: str) -> None: ...

        @abc.abstractmethod
        def save_kv_layer(
            self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
        ) -> None: ...

        @abc.abstractmethod
        def wait_for_save(self) -> None: ...

        @abc.abstractmethod
        def update_state_after_alloc(
            self, request: Any, blocks: Any, num_external_tokens: int
        ) -> None: ...

        @abc.abstractmethod
        def build_connector_meta(self, scheduler_output: Any) -> Any: ...

        def bind_connector_metadata(self, connector_metadata: Any) -> None:
            self._connector_metadata = connector_metadata

        def clear_connector_metadata(self) -> None:
            self._connector_metadata = None

        def register_kv_caches(self, kv_caches: Any) -> None:
            return None

        def get_finished(self, finished_req_ids: set[str]) -> Any:
            return None, None

        def update_connector_output(self, connector_output: Any) -> None:
            return None

        def request_finished(self, request: Any, block_ids: Any) -> Any:
            return False, None

        def shutdown(self) -> None:
            return None

    members: dict[str, Any] = {}

    def two(self: Any, vllm_config: Any, role: Any) -> None:
        self._vllm_config, self._role = vllm_config, role

    def three(self: Any, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        two(self, vllm_config, role)

    @abc.abstractmethod  # type: ignore[misc]
    def sure(self: Any, request: Any, num_computed_tokens: int) -> tuple[int, bool]: ...

    @abc.abstractmethod  # type: ignore[misc]
    def unsure(self: Any, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]: ...

    def nothing(self: Any, *args: Any) -> None: ...

    members["__init__"] = three if version.three_arguments else two
    members["get_num_new_matched_tokens"] = unsure if version.none_answers else sure
    optional = {
        "get_block_ids_with_load_errors": version.load_errors,
        "build_connector_worker_meta": version.worker_meta,
        "on_new_request": version.request_hook,
        "bind_gpu_block_pool": version.block_pool,
        "handle_preemptions": bool(version.preemption_argument),
    }
    members.update({name: nothing for name, there in optional.items() if there})
    return abc.ABCMeta("KVConnectorBase_V1", (Base,), members)


@contextmanager
def installed(version: FakeVersion) -> Iterator[types.ModuleType]:
    """The connector module, imported on top of this version; all is as before afterwards."""
    ours = [f"{OURS}.{name}" for name in REIMPORTED]
    before = {
        name: module
        for name, module in sys.modules.items()
        if name in ours or name.partition(".")[0] == "vllm"
    }
    for name in before:
        del sys.modules[name]
    for module in _modules(version):
        sys.modules[module.__name__] = module
    try:
        yield importlib.import_module(f"{OURS}.connector")
    finally:
        for name in [n for n in sys.modules if n in ours or n.partition(".")[0] == "vllm"]:
            del sys.modules[name]
        sys.modules.update(before)


def _modules(version: FakeVersion) -> list[types.ModuleType]:
    names = BASE.split(".")
    modules = [types.ModuleType(".".join(names[: index + 1])) for index in range(len(names))]
    for module in modules[:-1]:
        module.__path__ = []
    for parent, child in itertools.pairwise(modules):
        setattr(parent, child.__name__.rpartition(".")[2], child)
    modules[0].__version__ = version.name  # type: ignore[attr-defined]
    base: Any = modules[-1]
    base.KVConnectorBase_V1 = base_class(version)
    base.KVConnectorRole = Role
    base.KVConnectorMetadata = type("KVConnectorMetadata", (abc.ABC,), {})
    if version.worker_meta:
        base.KVConnectorWorkerMetadata = type("KVConnectorWorkerMetadata", (abc.ABC,), {})
    state: Any = types.ModuleType("vllm.distributed.parallel_state")
    state.get_tensor_model_parallel_rank = lambda: 0
    return [*modules, state]
