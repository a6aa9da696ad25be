"""What gateway tests have in common: settings, engine states and a tokenizer of bytes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prfaas.limits import Limits
from prfaas.settings import Settings
from prfaas.snapshot import PrefillCurve
from prfaas.telemetry import EngineInfo, LinkInfo

MODEL = "tiny"
KEY = "key of gateway and agent"
ENGINE, PEER, INSTANCE = "d-0", "p", "p-0"
PLACE = f"{PEER}/{INSTANCE}"
BLOCK_TOKENS = 16
TOKEN_BYTES = 1000
CURVE = PrefillCurve(base_s=0.01, token_s=0.002, token_context_s=0.0, chunk_tokens=256)


class ByteTokenizer:
    """One token for each byte; a chat is its contents, a line each, as in the scripted engine."""

    keeps_words_apart = True

    def encode(self, text: str, add_special: bool = False) -> list[int]:
        return list(text.encode())

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        return "\n".join(str(m.get("content", "")) for m in messages)


def d_engine(**fields: Any) -> EngineInfo:
    """D: ready, measured, with a queue of four seconds, so that a long prompt leaves it."""
    return EngineInfo(
        **{
            "name": ENGINE,
            "ready": True,
            "queue_tokens": 2000,
            "waiting": 1,
            "running": 2,
            "decode_step_s": 0.02,
            "curve": CURVE,
            "model": MODEL,
            "block_tokens": BLOCK_TOKENS,
            "token_bytes": TOKEN_BYTES,
            "epoch": "d1",
            "free_staging_bytes": 1 << 30,
            "roles": ("prefill", "decode"),
            **fields,
        }
    )


def p_engine(**fields: Any) -> EngineInfo:
    """P: ready, measured and idle."""
    return EngineInfo(
        **{
            "name": INSTANCE,
            "ready": True,
            "curve": CURVE,
            "model": MODEL,
            "block_tokens": BLOCK_TOKENS,
            "token_bytes": TOKEN_BYTES,
            "epoch": "p1",
            "free_retention_bytes": 1 << 30,
            "roles": ("prefill",),
            **fields,
        }
    )


def link(**fields: Any) -> LinkInfo:
    """A good link to P."""
    return LinkInfo(
        **{
            "peer": PEER,
            "instance": INSTANCE,
            "ready": True,
            "goodput_bytes_per_s": 50e6,
            "rtt_s": 0.01,
            "wire_ratio": 1.25,
            **fields,
        }
    )


def gateway_settings(
    engine_url: str = "http://127.0.0.1:1",
    d_watch: str | None = "127.0.0.1:1",
    p_watch: str = "127.0.0.1:1",
    *,
    limits: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Settings:
    """One engine, one peer; `fields` replace settings of the gateway."""
    return Settings(
        limits=Limits(**(limits or {})),
        gateway={
            "port": 0,
            "model": MODEL,
            "engines": ({"name": ENGINE, "url": engine_url, "agent": d_watch},),
            "peers": ({"peer": PEER, "instance": INSTANCE, "watch": p_watch},),
            "transfer_key": KEY,
            "cache_secret": "salt secret",
            "short_body_bytes": 200,
            "tokenize_check_every": 0,
            **fields,
        },
    )


def long_prompt(tokens: int = 2000, mark: str = "x") -> str:
    """A prompt of so many tokens for the byte tokenizer."""
    return (mark * tokens)[:tokens]


def completion(prompt: Any = None, **fields: Any) -> dict[str, Any]:
    """A body that is long enough to be worth offloading."""
    body = {"model": MODEL, "prompt": long_prompt() if prompt is None else prompt}
    return {**body, "max_tokens": 4, **fields}


async def until(condition: Callable[[], Any], what: str, timeout_s: float = 5.0) -> Any:
    """The first true value of `condition()`. Raises AssertionError after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout_s} s for {what}")
        await asyncio.sleep(0.005)
    return found
