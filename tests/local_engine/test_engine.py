"""The engine as its callers see it: threads, streams, bounds, a clean end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
import torch
import transformers

from local_engine.engine import Engine
from local_engine.kv.pool import KvPool
from local_engine.models.config import config_from_hf
from local_engine.models.llama import LlamaModel
from local_engine.requests import EngineRequest, FinishReason, SamplingParams, TokenEvent
from local_engine.runner import TorchRunner
from local_engine.sampler import Drawn
from local_engine.stream import TokenStream
from local_engine.testing import CHAIN_LAYOUT, CHAIN_VOCAB, ChainRunner, chain_answer
from prfaas.clock import Deadline
from prfaas.errors import (
    Cancelled,
    ContextTooLong,
    EngineUnavailable,
    InvalidRequest,
    Overloaded,
)
from prfaas.layout import GroupKind, KvLayout, LayerGroup
from prfaas.limits import Limits
from prfaas.settings import EngineSettings
from prfaas.testing.waiting import eventually

Submit = Callable[..., Awaitable[TokenStream]]


def tokens(count: int, seed: int = 0) -> list[int]:
    return [(seed * 131 + i * 7 + i * i) % CHAIN_VOCAB for i in range(count)]


def request(name: str, prompt: list[int], max_tokens: int = 4, **sampling: Any) -> EngineRequest:
    sampling = {"temperature": 0.0} | sampling
    return EngineRequest(name, tuple(prompt), SamplingParams(max_tokens, **sampling))


class GatedRunner(ChainRunner):
    """Waits at the gate before every decode step; open unless a test closes it."""

    def __init__(self, pool: KvPool) -> None:
        super().__init__(pool)
        self.gate = threading.Event()
        self.gate.set()
        self.fails = False

    def decode(self, rows: Any) -> list[Drawn]:
        assert self.gate.wait(20)
        if self.fails:
            raise RuntimeError("the device is gone")
        return super().decode(rows)


@asynccontextmanager
async def running(
    *, blocks: int = 64, limits: Limits | None = None, max_context: int = 200, **settings: Any
) -> AsyncIterator[tuple[Engine, GatedRunner]]:
    """A started engine over exact arithmetic; its books are checked at the end."""
    pool = KvPool(CHAIN_LAYOUT, blocks, 4)
    runner = GatedRunner(pool)
    engine = Engine(
        runner, pool, EngineSettings(**({"block_tokens": 4, "chunk_tokens": 8} | settings)),
        limits or Limits(), vocab_size=CHAIN_VOCAB, eos_ids=frozenset(), max_context=max_context,
    )  # fmt: skip
    runner.strict = False
    engine.start()
    runner.strict = True
    try:
        yield engine, runner
        if engine.healthy:
            await settled(engine)
            await engine.check_integrity()
            stats = engine.stats()
            assert stats.free_blocks == stats.total_blocks
            assert stats.integrity_failures == 0
    finally:
        runner.gate.set()
        await asyncio.to_thread(engine.close)


async def settled(engine: Engine) -> None:
    """Wait until nothing is live."""
    await eventually(lambda: engine.stats().waiting == engine.stats().running == 0)


async def collect(stream: TokenStream) -> list[TokenEvent]:
    async with aclosing(stream):
        return [event async for event in stream]


def drawn(events: list[TokenEvent]) -> list[int]:
    assert events[-1].error is None, events[-1]
    return [token for event in events for token in event.token_ids]


async def test_many_at_once_are_answered_exactly() -> None:
    async with running(blocks=24, max_batch=4) as (engine, _):
        prompts = {f"r{i}": tokens(1 + 7 * i, i % 3) for i in range(10)}
        streams = [await engine.submit(request(n, p, 12)) for n, p in prompts.items()]
        answers = await asyncio.gather(*map(collect, streams))
        for prompt, events in zip(prompts.values(), answers, strict=True):
            assert drawn(events) == chain_answer(prompt, 12)
            assert [event.last for event in events] == [False] * 11 + [True]
            assert events[-1].finish_reason is FinishReason.LENGTH
        assert engine.stats().requests_finished == {"length": 10}


async def test_the_start_measures_without_a_trace() -> None:
    async with running() as (engine, _):
        stats = engine.stats()
        assert stats.prefill_base_s + stats.prefill_token_s + stats.prefill_token_context_s > 0
        assert stats.decode_step_s > 0
        assert stats.prompt_tokens == stats.generated_tokens == stats.cached_blocks == 0


@pytest.mark.parametrize(
    ("wrong", "error", "param", "text"),
    [
        (request("a", []), InvalidRequest, "prompt", "no tokens"),
        (request("a", [1], 0), InvalidRequest, "max_tokens", "max_tokens is 0"),
        (request("a", [1], -3), InvalidRequest, "max_tokens", "max_tokens is -3"),
        (request("a", [1, CHAIN_VOCAB]), InvalidRequest, "prompt", f"token {CHAIN_VOCAB} is"),
        (request("a", [-1]), InvalidRequest, "prompt", "token -1 is outside the vocabulary"),
        (request("a", [1], logit_bias=((-1, 1.0),)), InvalidRequest, "logit_bias", "token -1 is"),
        (request("a", [1], logprobs=-1), InvalidRequest, "logprobs", "logprobs is -1"),
        (request("a", [1] * 197, 4), ContextTooLong, "max_tokens", "197 prompt tokens.* 4 .* 200"),
        (request("a", [1] * 300, 4), ContextTooLong, "prompt", "300 prompt tokens"),
    ],
)
async def test_bad_requests_are_refused_at_once_and_cost_nothing(
    wrong: EngineRequest, error: type[Exception], param: str, text: str
) -> None:
    async with running() as (engine, _):
        with pytest.raises(error, match=text) as caught:
            await engine.submit(wrong)
        assert caught.value.param == param  # type: ignore[attr-defined]
        stream = await engine.submit(request("a", tokens(196), 4))
        assert len(drawn(await collect(stream))) == 4


async def test_a_request_that_can_never_fit_the_pool_is_refused() -> None:
    async with running(blocks=8, max_context=200) as (engine, _):
        with pytest.raises(ContextTooLong, match=r"30 prompt tokens and .* 32 tokens"):
            await engine.submit(request("a", tokens(30), 3))
        assert len(drawn(await collect(await engine.submit(request("a", tokens(30), 2))))) == 2


async def test_more_waiting_than_allowed_is_overload_with_a_hint() -> None:
    async with running(limits=Limits(engine_max_waiting=3), max_batch=1) as (engine, runner):
        first = await engine.submit(request("first", tokens(3), 9))
        await anext(first)
        runner.gate.clear()
        streams = [await engine.submit(request(f"r{i}", tokens(3))) for i in range(3)]
        with pytest.raises(Overloaded) as caught:
            await engine.submit(request("more", tokens(3)))
        assert caught.value.retry_after_s is not None
        assert caught.value.retry_after_s >= 1
        runner.gate.set()
        for stream in (first, *streams):
            await collect(stream)
        await collect(await engine.submit(request("more", tokens(3))))


async def test_two_live_requests_cannot_have_one_id() -> None:
    async with running() as (engine, runner):
        runner.gate.clear()
        stream = await engine.submit(request("a", tokens(3)))
        with pytest.raises(InvalidRequest, match="'a' is in use"):
            await engine.submit(request("a", tokens(4)))
        runner.gate.set()
        await collect(stream)
        await collect(await engine.submit(request("a", tokens(4))))


async def test_closing_a_stream_cancels_the_request() -> None:
    async with running() as (engine, _):
        stream = await engine.submit(request("a", tokens(30), 150))
        async with aclosing(stream):
            await anext(stream)
        await settled(engine)
        assert engine.stats().requests_finished == {"abort": 1}
        await stream.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


async def test_cancel_ends_the_stream_with_an_error() -> None:
    async with running() as (engine, _):
        stream = await engine.submit(request("a", tokens(30), 150))
        await anext(stream)
        engine.cancel("a")
        engine.cancel("nobody")
        events = await collect(stream)
        assert isinstance(events[-1].error, Cancelled)


async def test_a_client_that_does_not_read_delays_nobody_else() -> None:
    limits = Limits(engine_event_queue=8)
    async with running(limits=limits, max_batch=2) as (engine, _):
        slow = await engine.submit(request("slow", tokens(9), 60))
        await eventually(lambda: engine.stats().running == 0)
        for i in range(3):
            fast = await engine.submit(request(f"fast{i}", tokens(9, i), 60))
            assert drawn(await collect(fast)) == chain_answer(tokens(9, i), 60)
        assert drawn(await collect(slow)) == chain_answer(tokens(9), 60)


async def test_a_client_that_never_reads_is_dropped() -> None:
    limits = Limits(engine_event_queue=4, slow_client_timeout_s=0.05)
    async with running(limits=limits) as (engine, _):
        stream = await engine.submit(request("slow", tokens(9), 60))
        await eventually(lambda: engine.stats().requests_finished == {"abort": 1})
        events = await collect(stream)
        assert isinstance(events[-1].error, Cancelled)
        assert len(events) == 5


async def test_drain_lets_live_requests_finish_and_refuses_new_ones() -> None:
    async with running() as (engine, runner):
        runner.gate.clear()
        stream = await engine.submit(request("a", tokens(9), 20))
        draining = asyncio.create_task(engine.drain(Deadline.after(10)))
        await asyncio.sleep(0)
        with pytest.raises(EngineUnavailable, match="draining"):
            await engine.submit(request("b", tokens(9)))
        assert not draining.done()
        runner.gate.set()
        assert drawn(await collect(stream)) == chain_answer(tokens(9), 20)
        assert await draining is True
        assert engine.stats().draining


async def test_a_drain_that_takes_too_long_says_so() -> None:
    async with running() as (engine, runner):
        runner.gate.clear()
        stream = await engine.submit(request("a", tokens(9), 20))
        assert await engine.drain(Deadline.after(0.05)) is False
        runner.gate.set()
        await collect(stream)


async def test_closing_the_engine_ends_every_stream_with_an_error() -> None:
    async with running(max_batch=1) as (engine, runner):
        streams = [await engine.submit(request(f"r{i}", tokens(9), 50)) for i in range(3)]
        await anext(streams[0])
        runner.gate.clear()
        closing = asyncio.create_task(asyncio.to_thread(engine.close))
        await asyncio.sleep(0.01)
        runner.gate.set()
        await closing
        for stream in streams:
            events = await collect(stream)
            assert isinstance(events[-1].error, EngineUnavailable)
        with pytest.raises(EngineUnavailable):
            await engine.submit(request("late", tokens(9)))
        with pytest.raises(EngineUnavailable):
            await engine.check_integrity()
        assert await engine.drain(Deadline.after(1)) is True
        engine.cancel("late")


async def test_a_failing_model_ends_every_request_and_the_engine_says_it_is_unwell(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running() as (engine, runner):
        runner.gate.clear()
        streams = [await engine.submit(request(f"r{i}", tokens(9), 50)) for i in range(2)]
        assert engine.healthy
        runner.fails = True
        runner.gate.set()
        for stream in streams:
            events = await collect(stream)
            assert isinstance(events[-1].error, EngineUnavailable)
        await eventually(lambda: not engine.healthy)
        with pytest.raises(EngineUnavailable, match="failed"):
            await engine.submit(request("more", tokens(3)))
    assert "the device is gone" in caplog.text


async def test_the_prefix_cache_can_be_emptied() -> None:
    async with running() as (engine, _):
        cached = []
        for name in ("a", "b"):
            events = await collect(await engine.submit(request(name, tokens(21))))
            cached.append(events[0].cached_tokens)
        await engine.reset_prefix_cache()
        events = await collect(await engine.submit(request("c", tokens(21))))
        assert [*cached, events[0].cached_tokens] == [0, 20, 0]


async def test_broken_books_are_found_when_asked_and_when_idle(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("local_engine.engine._CHECK_INTERVAL_S", 0.0)
    async with running() as (engine, _):
        blocks = engine._core._blocks
        blocks._references[3] += 1
        with pytest.raises(AssertionError, match="block 3 has 1 references but 0 owners"):
            await engine.check_integrity()
        await eventually(lambda: engine.stats().integrity_failures > 0)
        blocks._references[3] -= 1
        await asyncio.sleep(0.3)
        assert "block 3" in caplog.text
        engine._integrity_failures = 0
        await collect(await engine.submit(request("a", tokens(3), 1)))


# --- a real model through the whole engine ------------------------------------------------------


class StateDict:
    """A `TensorSource` over the reference's own weights."""

    def __init__(self, model: transformers.LlamaForCausalLM) -> None:
        self._tensors = model.state_dict()

    def shape(self, name: str) -> tuple[int, ...] | None:
        return tuple(self._tensors[name].shape) if name in self._tensors else None

    def read(self, name: str) -> torch.Tensor:
        return self._tensors[name].clone()


class Reference:
    """Greedy answers of transformers, and an engine with the same weights."""

    def __init__(self) -> None:
        config = transformers.LlamaConfig(
            vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
            initializer_range=0.125, bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        self.model = transformers.LlamaForCausalLM(config).eval()
        ours = config_from_hf(config.to_dict())
        group = LayerGroup(
            GroupKind.FULL, tuple(range(ours.layers)), ours.kv_heads, ours.head_dim, "float32"
        )
        self._layout = KvLayout((group,))
        self._llama = LlamaModel(ours, StateDict(self.model), torch.float32, torch.device("cpu"))

    def engine(self, *, blocks: int, block_tokens: int, **settings: Any) -> Engine:
        pool = KvPool(self._layout, blocks, block_tokens)
        return Engine(
            TorchRunner(self._llama, pool), pool,
            EngineSettings(block_tokens=block_tokens, **settings), Limits(),
            vocab_size=256, eos_ids=frozenset(), max_context=512,
        )  # fmt: skip

    @torch.no_grad()
    def answer(self, prompt: list[int], count: int) -> list[int]:
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(self.model(torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(prompt) :]


@pytest.mark.parametrize(
    ("blocks", "block_tokens", "chunk_tokens", "preempts"),
    [(200, 4, 32, False), (24, 8, 16, True), (400, 1, 7, False), (9, 32, 64, False)],
)
async def test_greedy_answers_equal_transformers_cached_chunked_batched_and_preempted(
    blocks: int, block_tokens: int, chunk_tokens: int, preempts: bool
) -> None:
    reference = Reference()
    engine = reference.engine(
        blocks=blocks, block_tokens=block_tokens, chunk_tokens=chunk_tokens, max_batch=4
    )
    try:
        generator = torch.Generator().manual_seed(1)
        stem = torch.randint(0, 256, (70,), generator=generator).tolist()
        prompts = [
            *(torch.randint(0, 256, (n,), generator=generator).tolist() for n in (1, 2, 33, 90)),
            *([*stem[:n], n] for n in (64, 31, 70)),
        ]
        streams = [
            await engine.submit(request(f"r{i}", prompt, 24)) for i, prompt in enumerate(prompts)
        ]
        engine.start()  # only now: all of them wait, so what fits together does not hang on timing
        answers = await asyncio.gather(*map(collect, streams))
        for prompt, events in zip(prompts, answers, strict=True):
            assert drawn(events) == reference.answer(prompt, 24)
        await engine.check_integrity()
        stats = engine.stats()
        assert stats.prefix_hit_tokens > 0
        assert (stats.preemptions > 0) == preempts
    finally:
        await asyncio.to_thread(engine.close)


async def test_a_seeded_answer_is_the_same_alone_and_in_company() -> None:
    reference = Reference()
    engine = reference.engine(blocks=200, block_tokens=4, chunk_tokens=32)
    engine.start()
    try:
        sampled = {"temperature": 1.0, "top_p": 0.95, "seed": 11}

        async def answer(name: str, **sampling: Any) -> list[int]:
            stream = await engine.submit(request(name, [5, 6, 7, 8, 9], 20, **sampling))
            return drawn(await collect(stream))

        alone = await answer("alone", **sampled)
        both = await asyncio.gather(
            answer("again", **sampled),
            answer("other", **(sampled | {"seed": 12})),
            answer("unseeded", temperature=1.0),
            answer("unseeded too", temperature=1.0),
        )
        assert both[0] == alone
        assert both[1] != alone
        assert both[2] != both[3]
    finally:
        await asyncio.to_thread(engine.close)
