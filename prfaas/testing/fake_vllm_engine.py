"""A tiny engine that calls a connector as vLLM's scheduler and model runner do, step by step.

Its "model" writes KV by a formula of token and place, so that what lies in a block tells whose it
is. Both halves of the connector live here; metadata is pickled on its way, as between processes.
"""

from __future__ import annotations

import itertools
import pickle
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from prfaas.testing.fake_vllm import FakeVersion, Role

LAYERS, HEADS, DIM, BLOCK = 3, 2, 8, 4
VOCAB, MAX_TOKENS = 1000, 256
LAYER_NAMES = [f"model.layers.{index}.self_attn.attn" for index in range(LAYERS)]


def formula_kv(tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    """KV of a sequence, [layer][k|v][token][head][dim]; depends on every token before."""
    state = np.cumsum(tokens.astype(np.float64) + 1)
    parts = np.arange(LAYERS * 2 * HEADS * DIM).reshape(LAYERS, 2, 1, HEADS, DIM)
    return np.sin(state[None, None, :, None, None] * 0.1 + parts).astype(np.float32)


@dataclass(eq=False)
class FakeRequest:
    """The attributes of vLLM's Request that connectors read, and the engine's own."""

    request_id: str
    prompt_token_ids: list[int]
    kv_transfer_params: dict[str, Any] | None = None
    max_tokens: int = 1
    status: str = "waiting"
    """`waiting`, `loading`, `running` or how it ended."""
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    generated: int = 0
    loaded: bool = False

    @property
    def block_hashes(self) -> list[tuple[int, ...]]:
        whole = len(self.prompt_token_ids) // BLOCK
        return [tuple(self.prompt_token_ids[: (i + 1) * BLOCK]) for i in range(whole)]


class _Blocks:
    def __init__(self, ids: list[int]) -> None:
        self._ids = ids

    def get_block_ids(self) -> tuple[list[int], ...]:
        return (list(self._ids),)


class BlockPool:
    """Free blocks, last freed first, and those that the prefix cache knows by hash."""

    def __init__(self, blocks: int) -> None:
        self.free = list(range(blocks - 1, 0, -1))
        self.cached: dict[tuple[int, ...], int] = {}

    def get_cached_block(self, block_hash: tuple[int, ...], groups: list[int]) -> list[int] | None:
        return [self.cached[block_hash]] if block_hash in self.cached else None

    def give_back(self, ids: list[int], used: set[int]) -> None:
        """Free blocks that no other request uses; the prefix cache keeps those it knows."""
        assert not set(ids) & set(self.free), "freed twice"
        kept = used | set(self.cached.values())
        self.free.extend(i for i in ids if i not in kept)

    def evict(self, used: set[int]) -> None:
        """Free what only the prefix cache holds."""
        for block_hash, block in list(self.cached.items()):
            if block not in used:
                del self.cached[block_hash]
                self.free.append(block)


class FakeEngine:
    """Owns both halves of one connector; `close` ends them."""

    def __init__(
        self,
        connector: ModuleType,
        version: FakeVersion,
        socket: str,
        *,
        blocks: int = 64,
        role: str = "kv_consumer",
        policy: str = "fail",
        wrap: Any = None,
        **options: Any,
    ) -> None:
        self.version = version
        self.config = fake_config(version, socket, role=role, policy=policy, **options)
        self.kv_cache_config = fake_kv_cache_config()
        self.caches = {name: torch.zeros((blocks, HEADS, BLOCK, 2 * DIM)) for name in LAYER_NAMES}
        make = wrap or connector.PrfaasConnector
        extra = (self.kv_cache_config,) if version.three_arguments else ()
        self.worker = make(self.config, Role.WORKER, *extra)
        self.worker.register_kv_caches(self.caches)
        self.scheduler = make(self.config, Role.SCHEDULER, *extra)
        self.pool = BlockPool(blocks)
        if version.block_pool:
            self.scheduler.bind_gpu_block_pool(self.pool)
        self.requests: dict[str, FakeRequest] = {}
        self.received: set[str] = set()
        self.ended: set[str] = set()
        self.asked: list[tuple[str, int | None]] = []
        """Every answer of get_num_new_matched_tokens."""
        self.steps = 0

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()

    def add(self, request: FakeRequest) -> FakeRequest:
        """A request arrives."""
        self.requests[request.request_id] = request
        if self.version.request_hook:
            self.scheduler.on_new_request(request)
        return request

    def abort(self, request: FakeRequest) -> None:
        """Its client has left."""
        self._finish(request, "aborted")

    def run(self, *requests: FakeRequest, steps: int = 3000) -> None:
        """Step until these have ended. Raises AssertionError when that takes too many steps."""
        for _ in range(steps):
            if all(r.status not in ("waiting", "loading", "running") for r in requests):
                return
            self.step()
        raise AssertionError(f"not over: {requests}")

    def step(self) -> None:
        """Schedule, run the model, read what came out: one engine step."""
        self.steps += 1
        scheduled = self._schedule()
        meta = self.scheduler.build_connector_meta(
            SimpleNamespace(total_num_scheduled_tokens=sum(count for _, count in scheduled))
        )
        output = self._execute(pickle.loads(pickle.dumps(meta)), scheduled)
        self._update(output, [request for request, _ in scheduled])

    def kv(self, request: FakeRequest, end: int) -> npt.NDArray[np.float32]:
        """What lies in a live request's blocks, [layer][k|v][token][head][dim]."""
        out = np.zeros((LAYERS, 2, end, HEADS, DIM), dtype=np.float32)
        for index, cache in enumerate(self.caches.values()):
            for token in range(end):
                key, value = _places(cache, request.blocks[token // BLOCK], token % BLOCK)
                out[index, 0, token], out[index, 1, token] = key.numpy(), value.numpy()
        return out

    # --- scheduler ---

    def _schedule(self) -> list[tuple[FakeRequest, int]]:
        scheduled = [(r, 1) for r in self.requests.values() if r.status == "running"]
        for request in list(self.requests.values()):
            if request.status == "loading" and request.request_id in self.received:
                self._promote(request)
            if request.status != "waiting":
                continue
            local = request.computed if request.loaded else self._cached(request)
            external, later = 0, False
            if not request.loaded:
                found, later = self.scheduler.get_num_new_matched_tokens(request, local)
                self.asked.append((request.request_id, found))
                if found is None:
                    continue
                external = found
                assert external or not later
            total = len(request.prompt_token_ids)
            wanted = local + external if later else total
            if not self._allocate(request, local, wanted):
                break
            self.scheduler.update_state_after_alloc(request, _Blocks(request.blocks), external)
            if later:
                request.status, request.computed = "loading", local + external
                continue
            assert external == 0, "this engine knows no synchronous loads"
            request.status, request.computed = "running", local
            scheduled.append((request, total - local))
        return scheduled

    def _promote(self, request: FakeRequest) -> None:
        self.received.discard(request.request_id)
        total = len(request.prompt_token_ids)
        if self.version.counts_whole_blocks:
            request.computed = min(len(request.blocks) * BLOCK, total)
        request.computed = min(request.computed, total - 1)
        for block_hash, block in zip(request.block_hashes, request.blocks, strict=False):
            if len(block_hash) <= request.computed:
                self.pool.cached.setdefault(block_hash, block)
        request.status, request.loaded = "waiting", True

    def _cached(self, request: FakeRequest) -> int:
        most = (len(request.prompt_token_ids) - 1) // BLOCK
        hits = itertools.takewhile(
            lambda block_hash: block_hash in self.pool.cached, request.block_hashes[:most]
        )
        return BLOCK * sum(1 for _ in hits)

    def _allocate(self, request: FakeRequest, local: int, tokens: int) -> bool:
        if not request.blocks:
            request.blocks = [
                self.pool.cached[block_hash]
                for block_hash in request.block_hashes[: local // BLOCK]
            ]
        lacks = -(-tokens // BLOCK) - len(request.blocks)
        if lacks > len(self.pool.free):
            self.pool.evict(self._used())
        if lacks > len(self.pool.free):
            if not request.loaded:
                request.blocks = []
            return False
        request.blocks += [self.pool.free.pop() for _ in range(lacks)]
        return True

    # --- model runner ---

    def _execute(self, meta: Any, scheduled: list[tuple[FakeRequest, int]]) -> SimpleNamespace:
        worker = self.worker
        worker.bind_connector_metadata(meta)
        if self.version.preemption_argument:
            metadata = self.version.preemption_argument == "metadata"
            worker.handle_preemptions(meta if metadata else set())
        if self.version.load_before_forward:
            worker.start_load_kv(SimpleNamespace(attn_metadata=None))
        if scheduled:
            for name, cache in self.caches.items():
                worker.wait_for_layer_load(name)
                for request, count in scheduled:
                    self._compute(request, count, LAYER_NAMES.index(name), cache)
                worker.save_kv_layer(name, cache, None)
        if not self.version.load_before_forward:
            worker.start_load_kv(SimpleNamespace(attn_metadata=None))
        worker.wait_for_save()
        ended, self.ended = self.ended, set()
        sent, received = worker.get_finished(ended)
        output = SimpleNamespace(finished_sending=sent, finished_recving=received)
        if self.version.load_errors:
            output.invalid_block_ids = worker.get_block_ids_with_load_errors()
        if self.version.worker_meta:
            answer = worker.build_connector_worker_meta()
            output.kv_connector_worker_meta = pickle.loads(pickle.dumps(answer))
        worker.clear_connector_metadata()
        return output

    def _compute(self, request: FakeRequest, count: int, layer: int, cache: torch.Tensor) -> None:
        tokens = np.asarray(request.prompt_token_ids, dtype=np.int32)
        kv = torch.from_numpy(formula_kv(tokens)[layer])
        for token in range(request.computed, min(request.computed + count, len(tokens))):
            key, value = _places(cache, request.blocks[token // BLOCK], token % BLOCK)
            key.copy_(kv[0, token])
            value.copy_(kv[1, token])

    # --- what came out ---

    def _update(self, output: SimpleNamespace, scheduled: list[FakeRequest]) -> None:
        bad = getattr(output, "invalid_block_ids", None) or set()
        for request in list(self.requests.values()):
            if request.status == "loading" and bad & set(request.blocks):
                assert self.config.kv_transfer_config.kv_load_failure_policy == "fail"
                self._finish(request, "error")
        self.scheduler.update_connector_output(output)
        for request_id in output.finished_recving or ():
            self._received(request_id)
        for request in scheduled:
            if request.status != "running":
                continue
            request.computed = max(request.computed, len(request.prompt_token_ids))
            request.generated += 1
            for block_hash, block in zip(request.block_hashes, request.blocks, strict=False):
                self.pool.cached.setdefault(block_hash, block)
            if request.generated >= request.max_tokens:
                self._finish(request, "done")

    def _received(self, request_id: str) -> None:
        request = self.requests.get(request_id)
        if self.version.frees_aborted_loads_at_once:
            if request is not None:
                self.received.add(request_id)
            return
        assert request is not None, f"{request_id} was received and is not known"
        if request.status == "loading":
            self.received.add(request_id)
        else:
            self._forget(request)

    def _finish(self, request: FakeRequest, how: str) -> None:
        loading = request.status == "loading" and request.request_id not in self.received
        request.status = how
        self.ended.add(request.request_id)
        delay, _ = self.scheduler.request_finished(request, list(request.blocks))
        assert not delay
        if not loading or self.version.frees_aborted_loads_at_once:
            self._forget(request)

    def _forget(self, request: FakeRequest) -> None:
        del self.requests[request.request_id]
        self.pool.give_back(request.blocks, self._used())

    def _used(self) -> set[int]:
        return {block for request in self.requests.values() for block in request.blocks}


def _places(cache: torch.Tensor, block: int, place: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of one token as views [head, dim]: K lies transposed, as in vLLM on a CPU."""
    plane = cache[block].view(HEADS, 2 * BLOCK * DIM)
    key = plane[:, : BLOCK * DIM].view(HEADS, DIM, BLOCK)[:, :, place]
    value = plane[:, BLOCK * DIM :].view(HEADS, BLOCK, DIM)[:, place]
    return key, value


def cpu_writer(key: Any, value: Any, cache: Any, slots: Any) -> None:
    """The engine's own write, as `layouts.require_layout` wants it."""
    for token, slot in enumerate(slots.tolist()):
        mine = _places(cache, slot // BLOCK, slot % BLOCK)
        mine[0].copy_(key[token])
        mine[1].copy_(value[token])


def fake_config(
    version: FakeVersion, socket: str, *, role: str, policy: str = "fail", **options: Any
) -> Any:
    """The parts of VllmConfig that a connector reads."""
    transfer = {
        "kv_role": role,
        "kv_connector_extra_config": {
            "socket": socket,
            "chunk_tokens": 8,
            "model_identity": "m",
            "config_digest": "c",
            "tokenizer_digest": "t",
            **options,
        },
    }
    if version.failure_policy:
        transfer["kv_load_failure_policy"] = policy
    model = SimpleNamespace(
        model="fake",
        served_model_name="fake",
        dtype=torch.float32,
        max_model_len=MAX_TOKENS,
        get_vocab_size=lambda: VOCAB,
        get_num_layers=lambda parallel: LAYERS,
        get_head_size=lambda: DIM,
        get_total_num_kv_heads=lambda: HEADS,
    )
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(**transfer),
        model_config=model,
        cache_config=SimpleNamespace(block_size=BLOCK, cache_dtype="auto"),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
        speculative_config=None,
    )


class FullAttentionSpec(SimpleNamespace):
    """Known by its name, as vLLM's is."""


class SlidingWindowSpec(SimpleNamespace):
    """KV of which the first tokens are given up while a request runs."""


def fake_kv_cache_config(groups: int = 1, kind: type[SimpleNamespace] = FullAttentionSpec) -> Any:
    """vLLM's KVCacheConfig of the fake model."""
    spec = kind(dtype=torch.float32, head_size=DIM, num_kv_heads=HEADS)
    group = SimpleNamespace(layer_names=list(LAYER_NAMES), kv_cache_spec=spec)
    return SimpleNamespace(kv_cache_groups=[group] * groups)
