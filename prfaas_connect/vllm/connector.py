"""The class that vLLM loads: it hands each call to the half that its process runs.

The scheduler's process has one, and every worker has one; they share nothing but the metadata
that vLLM carries between them. The agent knows the scheduler's half as the engine and the workers
as its ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole

from prfaas_connect.vllm.features import detect, require_decode, require_engine, vllm_version
from prfaas_connect.vllm.hello import ROLES, Options
from prfaas_connect.vllm.logs import join_vllm_log
from prfaas_connect.vllm.metadata import PrfaasMetadata, PrfaasWorkerMetadata
from prfaas_connect.vllm.scheduler_half import SchedulerHalf
from prfaas_connect.vllm.worker_half import WorkerHalf

if TYPE_CHECKING:
    import torch


class PrfaasConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """KV connector between vLLM and a prfaas agent. vLLM makes it and calls `shutdown`.

    It does not offer vLLM's hybrid memory (SupportsHMA): without it all layers keep their KV in
    one kind of blocks, which is what is carried.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        """Raises UnsupportedVllm or LayoutError with one sentence for what cannot work."""
        join_vllm_log()
        features = detect(KVConnectorBase_V1, vllm_config.kv_transfer_config, vllm_version())
        if features.kv_cache_config:
            super().__init__(vllm_config, role, kv_cache_config)
        else:
            super().__init__(vllm_config, role)
        config = vllm_config.kv_transfer_config
        options = Options.of(config.kv_connector_extra_config or {})
        require_engine(vllm_config)
        if "decode" in ROLES[config.kv_role]:
            require_decode(features, config)
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerHalf(vllm_config, kv_cache_config, options, features)
        else:
            self._worker = WorkerHalf(vllm_config, kv_cache_config, options, features)

    @property
    def _sched(self) -> SchedulerHalf:
        assert self._scheduler is not None, "called in a worker's process"
        return self._scheduler

    @property
    def _work(self) -> WorkerHalf:
        assert self._worker is not None, "called in the scheduler's process"
        return self._worker

    # --- scheduler ---

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._sched.bind_block_pool(gpu_block_pool)

    def on_new_request(self, request: Any) -> None:
        self._sched.new_request(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._sched.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._sched.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> PrfaasMetadata:
        return self._sched.metadata(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        self._sched.worker_output(connector_output)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._sched.finished(request, block_ids)

    # --- worker ---

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._work.register(kv_caches)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._work.bind(connector_metadata)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        self._work.preempted(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads are asynchronous: they go on in `get_finished`, which every step calls."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """What is scheduled has been loaded."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        self._work.save_layer(layer_name, kv_layer, attn_metadata)

    def wait_for_save(self) -> None:
        self._work.saved()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return self._work.finished(finished_req_ids)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._work.load_errors()

    def build_connector_worker_meta(self) -> PrfaasWorkerMetadata | None:
        return self._work.worker_meta()

    # --- both ---

    def shutdown(self) -> None:
        for half in (self._scheduler, self._worker):
            if half is not None:
                half.close()
