"""What clients send the embedded engine: every body ends in a job or in a 4xx that says why."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from local_engine.http.decoding import decode_body
from local_engine.http.generation import prepare
from local_engine.http.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from local_engine.http.state import ServerState
from prfaas.errors import ContextTooLong, InvalidRequest, UnknownModel
from prfaas.limits import Limits
from prfaas.testing.fuzz import fuzz, mutate_bytes, mutate_json
from prfaas.tokens import Tokenizer

CHAT: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "be kind", "name": "n"},
        {"role": "user", "content": [{"type": "text", "text": "hé"}]},
        {"role": "assistant", "content": "x", "tool_calls": []},
    ],
    "max_completion_tokens": 5, "temperature": 0.5, "top_p": 0.9, "top_k": 4, "seed": 7,
    "stop": ["a", "b"], "stop_token_ids": [1], "stream": True,
    "stream_options": {"include_usage": True}, "user": "u", "metadata": {"a": "b"},
    "logit_bias": {"5": 1.5}, "response_format": {"type": "text"}, "cache_salt": "s",
    "logprobs": True, "top_logprobs": 2, "min_p": 0.1, "presence_penalty": 0.5,
    "frequency_penalty": -0.5, "repetition_penalty": 1.1,
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    "kv_transfer_params": {"version": 1, "plan": [{"peer": "p"}]},
}  # fmt: skip
COMPLETION: dict[str, Any] = {
    "model": "m", "prompt": [[1, 2, 3]], "max_tokens": 5, "temperature": 0, "stop": "a",
    "ignore_eos": True, "return_token_ids": True, "add_special_tokens": True, "echo": False,
    "suffix": None, "logprobs": 2, "n": 2, "logit_bias": {"5": 1},
}  # fmt: skip


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_generation_bodies(
    kind: type[ChatRequest] | type[CompletionRequest], tiny_model_dir: Path
) -> None:
    good = CHAT if kind is ChatRequest else COMPLETION
    raw = json.dumps(good).encode()
    state = ServerState(Limits(max_prompt_tokens=300))
    serving: Any = SimpleNamespace(
        model_name="m",
        max_context=200,
        vocab_size=768,
        tokenizer=Tokenizer.load(tiny_model_dir),
        paced="",
    )
    loop = asyncio.new_event_loop()

    def make(rng: random.Random) -> bytes:
        chance = rng.random()
        if chance < 0.7:
            return json.dumps(mutate_json(good, rng)).encode()
        if chance < 0.75:
            depth = rng.choice((3, 100, 900, 950, 100_000))
            nested = '{"a":' * depth + "1" + "}" * depth
            text = json.dumps({**good, "kv_transfer_params": "HERE"})
            return text.replace('"HERE"', nested).encode()
        return mutate_bytes(raw, [raw], rng)

    def run(body: bytes) -> None:
        job = loop.run_until_complete(prepare(state, serving, decode_body(body, kind), "answer"))
        assert 1 <= job.answers <= 128
        for request in job.engine_requests:
            assert 1 <= len(request.prompt_tokens) <= 200
            assert len(request.prompt_tokens) + request.sampling.max_tokens <= 200
            # What the agent will be sent crosses KvPort's JSON.
            assert json.loads(json.dumps(request.kv_transfer_params)) == request.kv_transfer_params

    try:
        fuzz(f"engine/{kind.__name__}", run, make, (InvalidRequest, ContextTooLong, UnknownModel))
    finally:
        loop.close()
        state.close()


@pytest.mark.parametrize(
    ("kind", "good"),
    [
        (TokenizeRequest, {"messages": [{"role": "user", "content": "x"}], "model": "m"}),
        (TokenizeRequest, {"prompt": "text", "add_special_tokens": False}),
        (DetokenizeRequest, {"tokens": [1, 2, 3], "model": "m"}),
    ],
)
def test_other_bodies(
    kind: type[TokenizeRequest] | type[DetokenizeRequest], good: dict[str, Any]
) -> None:
    raw = json.dumps(good).encode()

    def make(rng: random.Random) -> bytes:
        if rng.random() < 0.7:
            return json.dumps(mutate_json(good, rng)).encode()
        return mutate_bytes(raw, [raw], rng)

    fuzz(f"engine/{kind.__name__}", lambda body: decode_body(body, kind), make, (InvalidRequest,))
