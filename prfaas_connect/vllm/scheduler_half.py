"""The connector in vLLM's scheduler process: it is the engine to the agent."""

from __future__ import annotations

import secrets
from typing import Any

from prfaas_connect.port.engine import EnginePort
from prfaas_connect.port.layout import KvLayout
from prfaas_connect.port.messages import (
    FetchDone,
    PortMessage,
    PrefillCancel,
    PrefillStart,
    Welcome,
)
from prfaas_connect.vllm.decode_scheduler import DecodeScheduler
from prfaas_connect.vllm.features import Features
from prfaas_connect.vllm.hello import Options, hello_of
from prfaas_connect.vllm.layouts import HeadRange
from prfaas_connect.vllm.metadata import PrfaasMetadata, PrfaasWorkerMetadata
from prfaas_connect.vllm.producer_scheduler import ProducerScheduler
from prfaas_connect.vllm.server_watch import ServerWatch


class SchedulerHalf:
    """Owns the engine's port and the books of requests under way; `close` ends the port."""

    def __init__(
        self, vllm_config: Any, kv_cache_config: Any, options: Options, features: Features
    ) -> None:
        epoch = secrets.token_hex(8)
        hello = hello_of(
            vllm_config, kv_cache_config, options, epoch=epoch, version=features.version
        )
        self._block_tokens = hello.block_tokens
        self._pool: Any = None
        self._port = EnginePort(options.socket, hello, self)
        self._decode: DecodeScheduler | None = None
        if "decode" in hello.roles:
            self._decode = DecodeScheduler(
                self._port,
                epoch=epoch,
                block_tokens=hello.block_tokens,
                session_bytes=KvLayout.from_dict(hello.layout).session_bytes,
            )
        layout = KvLayout.from_dict(hello.layout)
        ranks = vllm_config.parallel_config.tensor_parallel_size
        heads = layout.groups[0].kv_heads
        # In every role: the numeric probe is any engine's to answer.
        self._prefill = ProducerScheduler(
            self._port,
            layout,
            chunk_tokens=hello.chunk_tokens,
            vocab_size=hello.vocab_size,
            max_tokens=hello.max_tokens,
            ranks=[HeadRange.of_rank(rank, ranks, heads) for rank in range(ranks)],
            serves="prefill" in hello.roles,
            may_wait=features.may_answer_none,
        )
        self._port.start()
        # The agent serves one engine: one that is left behind would keep the next from it.
        self._watch = ServerWatch(self._port.close)

    def close(self) -> None:
        """Leave the agent."""
        self._watch.close()
        self._port.close()

    def bind_block_pool(self, pool: Any) -> None:
        """vLLM shows us its prefix cache."""
        if self._decode is not None and hasattr(pool, "get_cached_block"):
            self._pool = pool
            self._decode.cached_tokens = self._cached_tokens

    def new_request(self, request: Any) -> None:
        if self._decode is not None and not self._prefill.owns(request):
            self._decode.new_request(request)

    def matched_tokens(self, request: Any, computed: int) -> tuple[int | None, bool]:
        if self._prefill.owns(request):
            return self._prefill.matched_tokens(request)
        if self._decode is None:
            return 0, False
        # Where vLLM has no hook for new requests this is the first we hear of one.
        self._decode.new_request(request)
        return self._decode.matched_tokens(request, computed)

    def allocated(self, request: Any, blocks: Any, external_tokens: int) -> None:
        if self._decode is not None:
            ids = blocks.get_block_ids() if external_tokens else ([],)
            self._decode.allocated(request, ids[0], external_tokens)

    def metadata(self, scheduler_output: Any) -> PrfaasMetadata:
        metadata = PrfaasMetadata(prefill=self._prefill.plan(scheduler_output))
        if self._decode is not None:
            metadata.decode = self._decode.plan(scheduler_output.total_num_scheduled_tokens)
        return metadata

    def worker_output(self, output: Any) -> None:
        """Reports of all workers of one step, as vLLM has joined them."""
        self._prefill.sent(output.finished_sending or ())
        answer = getattr(output, "kv_connector_worker_meta", None)
        digests = answer.digests if isinstance(answer, PrfaasWorkerMetadata) else {}
        if self._decode is not None:
            self._decode.loaded(
                output.finished_recving or (),
                set(getattr(output, "invalid_block_ids", None) or ()),
                digests,
            )

    def finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        if self._prefill.owns(request):
            return self._prefill.finished(request)
        if self._decode is not None:
            self._decode.finished(request)
        return False, None

    def _cached_tokens(self, request: Any) -> int:
        """Prompt tokens in vLLM's prefix cache; as it does, never all of the prompt."""
        if getattr(request, "skip_reading_prefix_cache", False):
            return 0
        most = (len(request.prompt_token_ids) - 1) // self._block_tokens
        found = 0
        for block_hash in request.block_hashes[:most]:
            if not self._pool.get_cached_block(block_hash, [0]):
                break
            found += 1
        return found * self._block_tokens

    # --- EngineHandler, on the port's reader thread ---

    def on_connected(self, welcome: Welcome) -> None:
        self._prefill.connected(welcome)
        if self._decode is not None:
            self._decode.connected(welcome)

    def on_disconnected(self, reason: str) -> None:
        self._prefill.disconnected(reason)
        if self._decode is not None:
            self._decode.disconnected(reason)

    def on_message(self, message: PortMessage, blob: bytes) -> None:
        if isinstance(message, FetchDone):
            if self._decode is not None:
                self._decode.answered(message)
        elif isinstance(message, (PrefillStart, PrefillCancel)):
            self._prefill.handle(message, blob)
