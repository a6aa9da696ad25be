"""The connector in a vLLM worker: it is a rank of the engine to the agent, and touches KV."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from prfaas_connect.port.layout import LayoutError
from prfaas_connect.port.messages import PortMessage, RingFree, Welcome
from prfaas_connect.vllm.copies import copies_for
from prfaas_connect.vllm.decode_worker import DecodeWorker, Report
from prfaas_connect.vllm.features import Features, summary
from prfaas_connect.vllm.hello import ROLES, Options, layer_index, layout_of
from prfaas_connect.vllm.layouts import HeadRange, PagedKv, require_layout
from prfaas_connect.vllm.metadata import PrfaasMetadata, PrfaasWorkerMetadata
from prfaas_connect.vllm.producer_worker import ProducerWorker
from prfaas_connect.vllm.worker_port import WorkerPort
from prfaas_connect.vllm.writers import cache_writer

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


class WorkerHalf:
    """Owns the rank's port and the loads under way; `close` ends the port.

    Until `register` has shown it the KV cache it has nothing to work on.
    """

    def __init__(
        self, vllm_config: Any, kv_cache_config: Any, options: Options, features: Features
    ) -> None:
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        self._vllm_config = vllm_config
        self._options = options
        self._features = features
        self._roles = ROLES[vllm_config.kv_transfer_config.kv_role]
        self._layout = layout_of(vllm_config, kv_cache_config)
        group = self._layout.groups[0]
        ranks = vllm_config.parallel_config.tensor_parallel_size
        rank = get_tensor_model_parallel_rank()
        self._heads = HeadRange.of_rank(rank, ranks, group.kv_heads)
        self._port = WorkerPort(options.socket, rank, self)
        self._decode: DecodeWorker | None = None
        self._prefill: ProducerWorker | None = None
        self._layer_of: dict[str, int] = {}
        self._report = Report()

    def close(self) -> None:
        """Leave the agent."""
        self._port.close()

    def register(self, caches: dict[str, torch.Tensor]) -> None:
        """Learn how KV lies in vLLM's tensors. Raises LayoutError where no layout fits."""
        group = self._layout.groups[0]
        layers: dict[int, PagedKv] = {}
        layout = None
        for name, cache in caches.items():
            if layout is None:
                layout = require_layout(
                    cache,
                    cache_writer(self._vllm_config, name, cache),
                    self._heads,
                    dim=group.head_dim,
                    block_tokens=self._vllm_config.cache_config.block_size,
                    name=self._options.kv_layout,
                )
            layers[layer_index(name)] = PagedKv(cache, layout, self._heads, group.head_dim)
        if layout is None or set(layers) != set(group.layers):
            raise LayoutError(f"vLLM shows KV of layers {sorted(layers)}, not {group.layers}")
        log.info(
            "%s: heads [%d, %d) of %d in layout %s, checked against the engine's own write",
            summary(self._features),
            self._heads.start,
            self._heads.end,
            self._heads.total,
            layout.name,
        )
        self._layer_of = {name: layer_index(name) for name in caches}
        first = next(iter(caches.values()))
        self._prefill = ProducerWorker(
            self._layout,
            layers,
            self._port,
            self._heads,
            copies_for(first.device),
            chunk_tokens=self._options.chunk_tokens,
        )
        if "decode" in self._roles:
            self._decode = DecodeWorker(
                self._layout,
                layers,
                self._port,
                bytes_per_step=self._options.import_bytes_per_step,
                whole=self._heads.count == self._heads.total,
                settle=_settler(first),
            )

    def bind(self, metadata: PrfaasMetadata) -> None:
        """The scheduler's word for this step, before anything is computed in it."""
        if self._decode is not None:
            self._decode.follow(metadata.decode)
        if self._prefill is not None:
            self._prefill.follow(metadata.prefill)

    def preempted(self, metadata: PrfaasMetadata) -> None:
        """Blocks are about to go to other requests; loads are not preempted, only cancelled."""

    def save_layer(self, name: str, cache: torch.Tensor, attn_metadata: Any) -> None:
        """A layer's KV has been computed."""
        layer = self._layer_of.get(name)
        if self._prefill is not None and layer is not None:
            self._prefill.layer_saved(layer)

    def saved(self) -> None:
        """All layers of this step have been."""
        if self._prefill is not None:
            self._prefill.saved()

    def finished(self, request_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Go on with the loads; requests whose KV is (sent, received)."""
        sent = self._prefill.finished() if self._prefill is not None else set()
        if self._decode is not None:
            self._decode.step()
            self._report = self._decode.report()
        return sent or None, self._report.done or None

    def load_errors(self) -> set[int]:
        """Blocks of loads that have failed in this step; vLLM asks after `finished`."""
        return self._report.bad_blocks

    def worker_meta(self) -> PrfaasWorkerMetadata | None:
        """What the scheduler's half is to hear."""
        if not self._report.digests:
            return None
        return PrfaasWorkerMetadata(self._report.digests)

    # --- EngineHandler, on the port's reader thread ---

    def on_connected(self, welcome: Welcome) -> None:
        """Staging is there for whoever asks `WorkerPort`."""

    def on_disconnected(self, reason: str) -> None:
        """Loads that have begun keep the memory and go on."""

    def on_message(self, message: PortMessage, blob: bytes) -> None:
        if isinstance(message, RingFree):  # The port has seen to it.
            return
        log.warning("the agent sent %s to a rank, which is not expected", message.TYPE)


def _settler(cache: torch.Tensor) -> Any:
    """What waits until copies to the cache's device are done."""
    if cache.device.type == "cpu":
        return lambda: None
    import torch

    return lambda: torch.accelerator.synchronize(cache.device)
