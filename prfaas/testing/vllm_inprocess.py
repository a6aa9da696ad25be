"""A real vLLM whose scheduler, worker and connector live in the test's process, stepped by hand.

Imported in .venv-vllm only.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from prfaas.testing.staging_agent import Kv, Script, StagingAgent

CHUNK_TOKENS = 64
STEPS_TIMEOUT_S = 60.0


@dataclass(eq=False)
class Running:
    """One request and what has come of it."""

    name: str
    request_id: str
    """vLLM's own."""
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    finish_reason: str = ""
    cached_tokens: int = 0

    @property
    def over(self) -> bool:
        return bool(self.finish_reason)


class InProcessVllm:
    """Owns one engine; `close` ends it. Every method is for the thread that made it."""

    def __init__(
        self,
        model: Path,
        agent: StagingAgent,
        engine: dict[str, Any],
        options: dict[str, Any],
        beside: dict[str, Any] | None = None,
    ) -> None:
        """`beside`: KVTransferConfig of another connector, the two in a MultiConnector."""
        from vllm.config import KVTransferConfig
        from vllm.distributed.kv_transfer import get_kv_transfer_group
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        self.agent = agent
        ours: dict[str, Any] = {
            "kv_connector": "PrfaasConnector",
            "kv_connector_module_path": "prfaas_connect.vllm.connector",
            "kv_role": "kv_consumer",
            "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": {
                "socket": str(agent._path),
                "chunk_tokens": CHUNK_TOKENS,
                **options,
            },
        }
        both = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": {"connectors": [ours, beside]},
        }
        transfer = KVTransferConfig(**(both if beside else ours))
        arguments: dict[str, Any] = {
            "model": str(model),
            "dtype": "float32",
            "block_size": 32,
            "max_model_len": 1024,
            "kv_cache_memory_bytes": 16 << 20,
            "enforce_eager": True,
            "disable_log_stats": True,
            "distributed_executor_backend": "uni",
            "kv_transfer_config": transfer,
        }
        self.engine = LLMEngine.from_engine_args(EngineArgs(**(arguments | engine)))
        self.scheduler: Any = self.engine.engine_core.engine_core.scheduler
        self.connector: Any = self.scheduler.connector
        self.worker: Any = get_kv_transfer_group()
        if beside:
            self.connector = self.connector._connectors[0]
            self.worker = self.worker._connectors[0]
        self.block_tokens: int = self.scheduler.block_size
        self._known: dict[bytes, Kv] = {}
        self._count = 0
        self.running: list[Running] = []

    def close(self) -> None:
        """End the engine and its connector."""
        self.connector.shutdown()
        self.engine.engine_core.shutdown()

    # --- before and after a test ---

    def begin(self) -> None:
        """Nothing cached, no agent's memory of earlier tests; connected."""
        self.agent.script = Script(kv=self.kv_of, chunk_tokens=CHUNK_TOKENS)
        self.agent.asked.clear()
        self.running.clear()
        self.wait(lambda: self.half._port.connected)
        assert self.engine.reset_prefix_cache()

    def assert_idle(self) -> None:
        """Every block is free, nothing is remembered, every extent was given back."""
        self.steps(lambda: not self.engine.has_unfinished_requests(), 200)
        self.steps(lambda: not self.scheduler.has_requests(), 200)
        assert not self.scheduler.requests
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        assert len(self.half._decode) == 0
        assert len(self.worker._worker._decode) == 0
        for asked in self.agent.asked:
            self.agent.wait_for(lambda _, asked=asked: asked.ended)  # type: ignore[misc]

    @property
    def half(self) -> Any:
        """The scheduler's half of the connector."""
        return self.connector._scheduler

    # --- requests ---

    def add(
        self, prompt: list[int], *, max_tokens: int = 8, plan: bool = True, **fields: Any
    ) -> Running:
        """Start a request, with a gateway's plan in it or without."""
        from vllm import SamplingParams

        self._count += 1
        name = f"r{self._count}"
        extra: dict[str, Any] = {}
        if plan:
            extra = {"kv_transfer_params": {"transfer_id": f"t-{name}", "salt": ""}}
        before = set(self.scheduler.requests)
        self.engine.add_request(
            name,
            {"prompt_token_ids": list(prompt)},
            SamplingParams(
                temperature=0,
                max_tokens=max_tokens,
                ignore_eos=True,
                detokenize=False,
                extra_args=extra or None,
                **fields,
            ),
        )
        (request_id,) = set(self.scheduler.requests) - before
        one = Running(name, request_id, list(prompt))
        self.running.append(one)
        return one

    def add_loading(self, prompt: list[int], steps: int = 3) -> Running:
        """A request in the middle of its load, some steps after the first bytes."""
        one = self.add(prompt)
        self.steps(lambda: self.status(one) == "WAITING_FOR_REMOTE_KVS")
        jobs = self.worker._worker._decode._jobs
        self.steps(lambda: jobs and jobs[0].staged is not None)
        for _ in range(steps):
            self.step()
        assert self.status(one) == "WAITING_FOR_REMOTE_KVS"
        return one

    def abort(self, one: Running) -> None:
        """Its client leaves."""
        self.engine.abort_request([one.name])

    def step(self) -> None:
        """One engine step; outputs go to their requests."""
        for output in self.engine.step():
            for one in self.running:
                if one.name == output.request_id:
                    completion = output.outputs[0]
                    one.tokens = list(completion.token_ids)
                    one.finish_reason = completion.finish_reason or ""
                    one.cached_tokens = output.num_cached_tokens or 0

    def steps(self, until: Callable[[], Any], limit: int = 0) -> Any:
        """Step until something is true. Raises AssertionError when that takes more than `limit`
        steps, or, without one, so long that no other thread is the reason.
        """
        deadline = time.monotonic() + STEPS_TIMEOUT_S
        taken = 0
        while not (found := until()):
            over = taken >= limit if limit else time.monotonic() > deadline
            assert not over, "waited in vain"
            self.step()
            taken += 1
        return found

    def finish(self, *requests: Running) -> None:
        """Step until these are over."""
        self.steps(lambda: all(one.over for one in requests))

    def wait(self, until: Callable[[], Any], timeout_s: float = 10.0) -> Any:
        """Wait without stepping."""
        deadline = time.monotonic() + timeout_s
        while not (found := until()):
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(0.002)
        return found

    def count_preemptions(self) -> Callable[[], int]:
        """How many of the running requests have been preempted since, by looking in each step."""
        seen: dict[str, int] = {}
        inner = self.scheduler.schedule

        def watched(*args: Any, **kwargs: Any) -> Any:
            output = inner(*args, **kwargs)
            for name, request in self.scheduler.requests.items():
                seen[name] = request.num_preemptions
            return output

        self.scheduler.schedule = watched

        def count() -> int:
            self.scheduler.schedule = inner
            return sum(seen.values())

        return count

    def status(self, one: Running) -> str:
        """vLLM's word for where a live request stands; empty once it is gone."""
        request = self.scheduler.requests.get(one.request_id)
        return request.status.name if request is not None else ""

    def blocks(self, one: Running) -> list[int]:
        """Blocks of a live request."""
        return list(self.scheduler.kv_cache_manager.get_block_ids(one.request_id)[0])

    @property
    def free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    # --- KV ---

    def read_kv(self, one: Running, start: int, end: int) -> Kv:
        """What lies in a live request's blocks, [layer][k|v][token][head][dim]."""
        table = self.blocks(one)
        out = []
        for _, layer in sorted(self.worker._worker._decode._layers.items()):
            shape = (2, end - start, layer.heads.count, layer.dim)
            found = torch.empty(shape, dtype=layer.dtype)
            layer.read(table, start, end, found)
            out.append(found.view(torch.uint8) if layer.dtype == torch.bfloat16 else found)
        return np.stack([each.numpy() for each in out])

    def local_run(self, prompt: list[int], max_tokens: int = 8) -> list[int]:
        """Tokens of a run without a plan; its KV is what the agent stages from now on."""
        one = self.add(prompt, max_tokens=max_tokens, plan=False)
        self.steps(lambda: one.tokens)
        self._known[_key(prompt)] = self.read_kv(one, 0, len(prompt))
        self.finish(one)
        assert self.engine.reset_prefix_cache()
        return one.tokens

    def kv_of(self, tokens: npt.NDArray[np.int32]) -> Kv:
        """KV of a prompt that ran locally before."""
        return self._known[_key(tokens.tolist())]


def _key(prompt: list[int]) -> bytes:
    return np.asarray(prompt, dtype="<i4").tobytes()
