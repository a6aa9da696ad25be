"""Profiles and a scenario out of a live fleet: what its engines and link take for prompts asked one
at a time."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from prfaas.errors import ConfigError, PrfaasError
from prfaas.up.client import StreamedAnswer
from prfaas.up.cluster import Gets, wait_record

LENGTHS = (200, 1000, 3700, 16000)
"""Not whole chunks: from those nobody could tell what is paid for each chunk from what is for each
token.
"""
STEP_TOKENS = 24
"""Tokens of answers that time decode steps."""
STEP_LENGTH = 64
BATCHES = (1, 2, 3, 4, 8)
"""Small ones each: kernels take leaps there."""
LEAST_ROUNDS = 2
_GOODPUT_RANGE = 8.0
"""Factor by which the meter may be wrong, up and down."""
_BETTER = 0.99
"""An error that is not smaller than so is no better."""
_SEEN = 0.005
"""Of a TTFT, on average: what explains less of it explains noise."""
_ON_A_LINE = 0.1
"""Relative errors of decode steps up to which a line describes them."""
_REWEIGHTED = 50
_EXACT = 1e-6
"""Relative errors below are none."""
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_MOST_HEADS = 1024
_MOST_DIM = 4096


class Asks(Gets, Protocol):
    """A client of a gateway or an engine."""

    async def complete(
        self, prompt: str | Sequence[int], *, max_tokens: int, **fields: Any
    ) -> StreamedAnswer: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """What to ask. `lengths`: characters of prompts, about as many tokens as the tokenizer makes of
    them; `batches`: answers at once that time decode steps; `step_length`: characters of their
    prompts."""

    model: str
    lengths: tuple[int, ...] = LENGTHS
    rounds: int = 3
    batches: tuple[int, ...] = BATCHES
    seed: int = 0
    step_length: int = STEP_LENGTH


@dataclass(frozen=True, slots=True)
class Prefilled:
    """One prompt that was alone: tokens computed, and seconds that took."""

    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Carried:
    """Its KV on the way from a peer."""

    tokens: int
    raw_bytes: int
    wire_bytes: int
    token_bytes: int
    state_bytes: int
    goodput_bytes_per_s: float
    """By the gateway's meter, which bursts can mislead."""
    rtt_s: float
    compute_s: float
    took_s: float
    """TTFT without its decode step: computing, bytes, round trips and hand-overs."""


@dataclass(slots=True)
class Samples:
    """All that was measured; curves are made of it by `profiles`."""

    model: str
    local: list[Prefilled] = field(default_factory=list)
    remote: dict[str, list[Prefilled]] = field(default_factory=dict)
    """By peer."""
    carried: dict[str, list[Carried]] = field(default_factory=dict)
    steps: list[tuple[int, float]] = field(default_factory=list)
    """Sequences in a batch, and the seconds of a step."""
    chunks: dict[str, int] = field(default_factory=dict)
    """Tokens of a prefill chunk, by peer; D's under the empty name."""
    instances: dict[str, int] = field(default_factory=dict)
    """Likewise: how many there are."""
    token_bytes: int = 0
    state_bytes: int = 0


async def measure(
    gateway: Asks, engine: Asks, plan: Plan, say: Callable[[str], None] = lambda _: None
) -> Samples:
    """Ask a fleet that does nothing else. `engine`: D's own address, past the gateway.

    Raises ConfigError for a plan that measures nothing, PrfaasError where a request fails.
    """
    if plan.rounds < LEAST_ROUNDS or len(set(plan.lengths)) < LEAST_ROUNDS:
        raise ConfigError(f"a curve needs {LEAST_ROUNDS} lengths and rounds at least")
    samples, words = Samples(plan.model), random.Random(plan.seed)
    await _look(gateway, samples)
    for batch in plan.batches:
        seconds = await _step_s(engine, plan, batch, words)
        samples.steps.append((batch, seconds))
        say(f"decode step with {batch} in the batch: {1e3 * seconds:.3g} ms")
    step_s = samples.steps[0][1] if samples.steps else 0.0
    for _ in range(plan.rounds):
        for length in plan.lengths:
            answer = await engine.complete(_text(words, length), max_tokens=1, model=plan.model)
            tokens = _tokens(answer)
            samples.local.append(Prefilled(tokens, max(0.0, answer.ttft_s - step_s)))
            said = f"{tokens:,} tokens: D {answer.ttft_s:.3g} s"
            answer = await gateway.complete(_text(words, length), max_tokens=1, model=plan.model)
            peer = await _offloaded(gateway, answer, step_s, samples)
            say(f"{said}, gateway {answer.ttft_s:.3g} s by {peer or 'D'}")
    return samples


async def _look(gateway: Asks, samples: Samples) -> None:
    cluster = await gateway.get("/prfaas/cluster")
    samples.chunks[""] = cluster["local"]["curve"]["chunk_tokens"]
    samples.instances[""] = len(cluster["engines"])
    for remote in cluster["remotes"]:
        peer = remote["peer"]
        samples.chunks[peer] = remote["curve"]["chunk_tokens"]
        samples.instances[peer] = samples.instances.get(peer, 0) + 1


async def _step_s(engine: Asks, plan: Plan, batch: int, words: random.Random) -> float:
    """Median time between two tokens while so many are answered at once."""
    prompts = [_text(words, plan.step_length) for _ in range(batch)]
    answers = await asyncio.gather(
        *(
            engine.complete(prompt, max_tokens=STEP_TOKENS, model=plan.model, ignore_eos=True)
            for prompt in prompts
        )
    )
    first = max(answer.token_at[0] for answer in answers)
    last = min(answer.token_at[-1] for answer in answers)
    gaps = [gap for answer in answers for gap in answer.itl_between(first, last)]
    if not gaps:
        raise PrfaasError(f"{batch} answers at once did not overlap: the engine's batch is smaller")
    return statistics.median(gaps)


async def _offloaded(gateway: Asks, answer: StreamedAnswer, step_s: float, into: Samples) -> str:
    """The peer that prefilled it, noted with what its KV took; empty where D did."""
    record = await wait_record(gateway, answer.request_id)
    outcome = record["outcome"]
    if record["target"] == "local" or outcome is None or outcome["status"] != "staged":
        return ""
    snapshot = record["snapshot"]
    peer, phases = outcome["peer"], outcome["phases"]
    tokens = outcome["want_tokens"] - outcome["remote_cached_tokens"]
    compute_s = phases["remote_compute"]
    link = next(r["link"] for r in snapshot["remotes"] if r["peer"] == peer)
    into.token_bytes, into.state_bytes = snapshot["token_bytes"], snapshot["state_bytes"]
    into.remote.setdefault(peer, []).append(Prefilled(tokens, compute_s))
    into.carried.setdefault(peer, []).append(
        Carried(
            tokens,
            outcome["raw_bytes"],
            outcome["wire_bytes"],
            snapshot["token_bytes"],
            snapshot["state_bytes"],
            link["goodput_bytes_per_s"],
            link["rtt_s"],
            compute_s,
            answer.ttft_s - step_s,
        )
    )
    return str(peer)


def profiles(samples: Samples, max_batch: int, source: str) -> dict[str, dict[str, Any]]:
    """Profiles as data: D's under `decode`, each peer's under its name.

    Raises ConfigError where no request was offloaded: KV was not seen, nor the link.
    """
    if not samples.remote:
        raise ConfigError(
            "the gateway kept every prompt at D, so neither a peer nor the link was measured: run "
            "it with gateway.policy.name always_remote, or with longer prompts"
        )
    decode = {**_decode(samples.steps), "max_batch": max_batch}
    found = {}
    for name, rows in (("", samples.local), *sorted(samples.remote.items())):
        longest = max(row.tokens for row in rows)
        chunk = samples.chunks[name]
        found[name or "decode"] = {
            "name": name or "decode",
            "label": "measured",
            "source": source,
            "model": _model(samples, longest),
            "prefill": {**_prefill(rows, chunk), "chunk_tokens": chunk},
            "decode": decode,
        }
    return found


def scenario(samples: Samples, name: str, interval_s: float) -> dict[str, Any]:
    """The scenario of the fleet as data, with the files that `profiles` belong in. `interval_s`:
    the longest time between two reports of load, of which the gateway believes one that is so much
    younger than what it sent to D itself.
    """
    peers = []
    for peer, carried in sorted(samples.carried.items()):
        goodput, beyond_s = link(carried, samples.chunks[peer], _shape(samples)[0])
        rtt_s = min(beyond_s, statistics.median(c.rtt_s for c in carried))
        peers.append(
            {
                "name": peer,
                "profile": f"{peer}.yaml",
                "instances": samples.instances[peer],
                "central_queue": False,
                "link": {
                    "gbit_per_s": 8e-9 * goodput,
                    "rtt_ms": 1e3 * rtt_s,
                    "opening_ms": 1e3 * (beyond_s - rtt_s),
                },
            }
        )
    return {
        "scenario_version": 1,
        "name": name,
        "local": {
            "prefill": "decode.yaml", "instances": samples.instances[""], "colocated": True,
        },
        "peers": peers,
        "telemetry": {"interval_s": interval_s, "settle_s": interval_s},
    }  # fmt: skip


def link(carried: Sequence[Carried], chunk_tokens: int, layers: int) -> tuple[float, float]:
    """Bytes a second that explain best how long KV took, and the seconds beyond them.

    KV leaves while it is computed, but for the last layer of the last chunk, so it takes the longer
    of the two. Where computing is always that, little can be told of the link, and the gateway's
    meter is believed.
    """
    metered = statistics.median(c.goodput_bytes_per_s for c in carried)
    # Of all that is sent, what leaves only when all is computed.
    tails = [min(1.0, chunk_tokens / c.tokens) / layers * c.wire_bytes for c in carried]

    def tried(goodput: float) -> tuple[float, float]:
        rest = [
            c.took_s - max(c.compute_s + tail / goodput, c.wire_bytes / goodput)
            for c, tail in zip(carried, tails, strict=True)
        ]
        beyond_s = max(0.0, statistics.median(rest))
        error = sum(abs(r - beyond_s) / c.took_s for r, c in zip(rest, carried, strict=True))
        return error, beyond_s

    best = metered
    for goodput in np.geomspace(metered / _GOODPUT_RANGE, metered * _GOODPUT_RANGE, 401).tolist():
        if tried(goodput)[0] < _BETTER * tried(best)[0] - _EXACT:
            best = goodput
    if tried(best)[0] > tried(metered)[0] - _SEEN * len(carried):
        best = metered
    return best, tried(best)[1]


def fitted(
    columns: npt.NDArray[np.float64], seconds: npt.NDArray[np.float64], required: int
) -> tuple[float, ...]:
    """Coefficients of the columns, none negative, with the least sum of relative errors: one that
    was measured while the machine did something else then weighs no more than one that was not.

    `required`: the column that must have a part in it. Raises ConfigError where it has none.
    """
    scaled = columns / seconds[:, None]
    count = columns.shape[1]
    best: tuple[float, tuple[float, ...]] | None = None
    others = [at for at in range(count) if at != required]
    for size in range(count):
        for chosen in combinations(others, size):
            used = sorted((required, *chosen))
            solved = _least_sum(scaled[:, used])
            if (solved < 0).any() or not solved[used.index(required)] > 0:
                continue
            error = float(np.abs(scaled[:, used] @ solved - 1).sum())
            if best is None or error < best[0] * (1 - 1e-6):
                by_column = dict(zip(used, solved.tolist(), strict=True))
                best = error, tuple(by_column.get(at, 0.0) for at in range(count))
    if best is None:
        raise ConfigError("times do not grow with what was asked: was the fleet idle?")
    return best[1]


def _least_sum(scaled: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """What makes each row about 1, by squares in which large errors weigh less and less."""
    weights = np.ones(len(scaled))
    for _ in range(_REWEIGHTED):
        solved, *_rest = np.linalg.lstsq(scaled * weights[:, None], weights, rcond=None)
        weights = 1 / np.sqrt(np.maximum(np.abs(scaled @ solved - 1), _EXACT))
    return np.asarray(solved)


def _prefill(rows: Iterable[Prefilled], chunk: int) -> dict[str, float]:
    tokens = np.array([float(row.tokens) for row in rows])
    seconds = np.array([row.seconds for row in rows])
    columns = np.stack([np.ceil(tokens / chunk), tokens, tokens**2 / 2], axis=1)
    base_s, token_s, token_context_s = fitted(columns, seconds, required=1)
    return {"base_s": base_s, "token_s": token_s, "token_context_s": token_context_s}


def _decode(steps: Sequence[tuple[int, float]]) -> dict[str, Any]:
    """Coefficients where a line through them is near enough, points where it is not."""
    sequences = np.array([[1.0, batch] for batch, _ in steps])
    step_s, sequence_s = fitted(sequences, np.array([s for _, s in steps]), required=0)
    points = [
        (batch, statistics.median(s for size, s in steps if size == batch))
        for batch in sorted({batch for batch, _ in steps})
    ]
    off = max(abs((step_s + sequence_s * batch) / seconds - 1) for batch, seconds in points)
    if off > _ON_A_LINE and points[0][0] == 1 and len(points) > 1:
        return {"points_batch_s": [list(point) for point in points]}
    return {"step_s": step_s, "sequence_s": sequence_s}


def _shape(samples: Samples) -> tuple[int, int, int]:
    """Layers, KV heads and values of a head that make KV of the size that was seen; how it is cut
    in them says nothing here."""
    values = samples.token_bytes // 4
    return next(
        (layers, heads, values // (layers * heads))
        for heads in range(1, _MOST_HEADS + 1)
        for layers in (32, 24, 16, 8, 4, 3, 2, 1)
        if values % (layers * heads) == 0 and values // (layers * heads) <= _MOST_DIM
    )


def _model(samples: Samples, longest: int) -> dict[str, Any]:
    layers, heads, dim = _shape(samples)
    carried = [c for rows in samples.carried.values() for c in rows]
    ratio = statistics.median(
        (c.raw_bytes - c.state_bytes) / max(1, c.wire_bytes - c.state_bytes) for c in carried
    )
    return {
        "layers": layers,
        "kv_heads": heads,
        "head_dim": dim,
        "dtype": "bfloat16",
        "max_context": 2 * longest,
        "state_bytes": samples.state_bytes,
        "wire_ratios": {"exact": max(1.0, ratio)},
    }


def _text(words: random.Random, characters: int) -> str:
    """Words that no prompt before had."""
    return "".join(words.choices(f"{_LETTERS} ", k=max(2, characters)))


def _tokens(answer: StreamedAnswer) -> int:
    tokens = answer.usage.get("prompt_tokens")
    if not isinstance(tokens, int) or tokens < 1:
        raise PrfaasError("the server does not say how many tokens a prompt has (usage)")
    return tokens
