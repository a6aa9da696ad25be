"""What callers give the engine and what they get back."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prfaas.errors import PrfaasError


class FinishReason(enum.StrEnum):
    """Why a sequence ended by itself: a stop token, or `max_tokens` (or the context) reached."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the answer is drawn; OpenAI's names and meanings.

    `temperature` 0 is greedy. `top_p` 1, `top_k` 0 and `min_p` 0 are off. Without `seed` the engine
    draws one. `stop_token_ids` end the answer besides the model's own end tokens, which
    `ignore_eos` disables. `logit_bias`: (token, what is added to its logit), each token once.
    `logprobs`: tell those of each token drawn and of so many most likely ones; None: of none.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log-probabilities at one place: of the token drawn, and of the most likely ones.

    The model's own: before temperature, biases, penalties and cuts. `top`: (token, logprob), the
    most likely first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One prompt to answer. `request_id` is unique among the engine's live requests.

    `cache_salt` separates tenants in the prefix cache. `kv_transfer_params` are passed to the agent
    as they came; without them the prompt is prefilled here.
    """

    request_id: str
    prompt_tokens: tuple[int, ...]
    sampling: SamplingParams
    cache_salt: str = ""
    kv_transfer_params: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class RequestTimings:
    """Where a request's time went, in seconds; zero for phases it has not been through.

    `queue_s`: submit to first work (fetch, prefill chunk or decode step). `kv_wait_s`: Fetch to
    FetchDone. `import_s`: FetchDone to KV in the pool. `prefill_s`: first to last local chunk, with
    the decode steps between them. `ttft_s`: submit to first token.
    """

    queue_s: float = 0.0
    kv_wait_s: float = 0.0
    import_s: float = 0.0
    prefill_s: float = 0.0
    ttft_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """New tokens of one request; the last event has a `finish_reason` or an `error`, never both.

    A stop or end token is the last of `token_ids` (it counts as generated; do not show its text).
    `cached_tokens`: prompt tokens not computed here, from the prefix cache and imported together;
    `imported_tokens` is the imported share. Both are final from the first event on.
    `logprobs`: one for each token, if the request asked for them.
    `kv_status` and `kv_reason`: the outcome of `kv_transfer_params` (`staged`, `partial`, `local`,
    empty if none were given), and why it is not `staged`. `kv_quality`: class of what was imported.
    """

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    imported_tokens: int = 0
    kv_status: str = ""
    kv_reason: str = ""
    kv_quality: str = ""
    error: PrfaasError | None = None
    timings: RequestTimings = RequestTimings()
    logprobs: tuple[TokenLogprobs, ...] = ()

    @property
    def last(self) -> bool:
        """Nothing follows this event."""
        return self.finish_reason is not None or self.error is not None


@dataclass(frozen=True, slots=True)
class EngineStats:
    """State and counters of an engine at one moment. Counters never fall; tokens unless said.

    `queue_tokens`: prompt tokens admitted and not yet computed. `waiting`: requests not yet
    decoding (`waiting_kv` of them wait for remote KV). `running`: sequences in the decode batch.
    `context_tokens`: KV the batch reads in a step. `free_blocks` counts cached blocks that nobody
    uses, `cached_blocks` are those; so with `free_states` and `kept_states`, of a model that has
    recurrent layers.
    """

    waiting: int = 0
    waiting_kv: int = 0
    running: int = 0
    exporting: int = 0
    queue_tokens: int = 0
    context_tokens: int = 0
    free_blocks: int = 0
    cached_blocks: int = 0
    total_blocks: int = 0
    free_states: int = 0
    kept_states: int = 0
    total_states: int = 0
    block_tokens: int = 0
    decode_step_s: float = 0.0
    prefill_base_s: float = 0.0
    prefill_token_s: float = 0.0
    prefill_token_context_s: float = 0.0
    draining: bool = False
    port_connected: bool = False
    requests_finished: Mapping[str, int] = field(default_factory=dict)
    """By `stop`, `length`, `abort` (client went away) and `error`."""
    preemptions: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    imported_tokens: int = 0
    exported_tokens: int = 0
    computed_tokens: int = 0
    """Prompt tokens run through the model here, recomputed ones included."""
    kv_outcomes: Mapping[str, int] = field(default_factory=dict)
    """Requests with `kv_transfer_params`, by `staged` or the reason why not."""
    integrity_failures: int = 0
