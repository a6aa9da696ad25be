"""What a codec does to answers: KL, top-1 and the error of every tensor, on prompts given."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from local_engine.kv_calibration.tape import Tape, continued, free_running
from local_engine.models.llama import LlamaModel
from prfaas.codecs import RAW, Codec, Tile, encode
from prfaas.codecs.calibration import Measured
from prfaas.layout import GroupKind, LayerGroup

CHUNK_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Prompt:
    """KV of a prompt, what follows it in the text, and what bf16 KV makes of both.

    `reference`: log probabilities behind each of `following`. `free`: greedy tokens behind the
    prompt and `following[0]`, that one first; `free_reference` behind each of them.
    """

    tape: Tape
    following: tuple[int, ...]
    reference: Tensor
    free: tuple[int, ...] = ()
    free_reference: Tensor | None = None


def prompt(model: LlamaModel, tape: Tape, following: Sequence[int], *, free: int = 0) -> Prompt:
    """A prompt with its references, and `free` greedy tokens."""
    reference = continued(model, tape.kv, following)
    if not free:
        return Prompt(tape, tuple(following), reference)
    run = [following[0], *free_running(model, tape.kv, following[0], free - 1)]
    return Prompt(tape, tuple(following), reference, tuple(run), continued(model, tape.kv, run))


@dataclass(frozen=True, slots=True)
class Coded:
    """KV that went through a codec, and its encoded size."""

    kv: Tensor
    nbytes: int


def tiles(
    group: LayerGroup, tokens: int, spans: Sequence[tuple[int, int]]
) -> Iterator[tuple[slice, slice, Tile]]:
    """(layers, tokens, tile) of KV [layers, k|v, tokens, ...] on the grid of chunks."""
    for at in range(0, tokens, CHUNK_TOKENS):
        stop = min(tokens, at + CHUNK_TOKENS)
        for low, high in spans:
            yield (
                slice(low, high),
                slice(at, stop),
                Tile.of(group, group.layers[low:high], (at, stop)),
            )


def through(codec: Codec, kv: Tensor, spans: Sequence[tuple[int, int]]) -> Coded:
    """Encode and decode bf16 KV [layers, k|v, tokens, heads, dim], tile by tile."""
    layers, _, tokens, heads, dim = kv.shape
    group = LayerGroup(GroupKind.FULL, tuple(range(layers)), heads, dim, "bfloat16")
    source = kv.view(torch.uint16).numpy()
    found = torch.empty_like(kv)
    target = found.view(torch.uint16).numpy()
    nbytes = 0
    for low, at, tile in tiles(group, tokens, spans):
        raw = np.ascontiguousarray(source[low, :, at])
        number, payload = encode(codec, raw.view(np.uint8).reshape(-1), tile)
        nbytes += len(payload)
        out = np.empty(tile.nbytes, dtype=np.uint8)
        (codec if number == codec.id else RAW).decode_into(memoryview(payload), out, tile)
        target[low, :, at] = out.view(np.uint16).reshape(raw.shape)
    return Coded(found, nbytes)


def kl(reference: Tensor, found: Tensor) -> Tensor:
    """KL of each position, in nats, of log probabilities."""
    return (reference.exp() * (reference - found)).sum(-1).clamp(min=0)


def mean_kl(
    model: LlamaModel, prompts: Sequence[Prompt], change: Callable[[Tape], Tensor]
) -> float:
    """Mean KL over all positions, with changed KV."""
    return float(
        torch.cat(
            [kl(p.reference, continued(model, change(p.tape), p.following)) for p in prompts]
        ).mean()
    )


def top1_floor(model: LlamaModel, exact: Sequence[tuple[Prompt, Tensor]]) -> float:
    """Share of positions where bf16 and fp32 KV agree; `exact`: prompts with fp32 KV."""
    same = [
        p.reference.argmax(-1) == continued(model, kv, p.following).argmax(-1) for p, kv in exact
    ]
    return float(torch.cat(same).float().mean())


def worst_tensor(prompts: Sequence[Prompt], coded: Sequence[Coded]) -> float:
    """Largest squared error of a tensor (layer, K or V) over the variance of its channels."""
    error = variance = torch.zeros(1)
    for p, c in zip(prompts, coded, strict=True):
        x = p.tape.kv.float()
        error = error + (c.kv.float() - x).square().sum((2, 3, 4))
        variance = variance + (x - x.mean(2, keepdim=True)).square().sum((2, 3, 4))
    return float((error / variance).max())


def measure(
    model: LlamaModel,
    prompts: Sequence[Prompt],
    codec: Codec,
    spans: Sequence[tuple[int, int]],
    floor: float,
) -> Measured:
    """All that the gate wants to know of a codec; `spans`: layers of its tiles. Raises ValueError
    where no prompt has greedy tokens.
    """
    kls, same, free = [], [], []
    raw = encoded = 0
    coded_all: list[Coded] = []
    for p in prompts:
        coded = through(codec, p.tape.kv, spans)
        raw += p.tape.kv.nbytes
        encoded += coded.nbytes
        found = continued(model, coded.kv, p.following)
        kls.append(kl(p.reference, found))
        same.append(p.reference.argmax(-1) == found.argmax(-1))
        if p.free_reference is not None:
            free.append(kl(p.free_reference, continued(model, coded.kv, p.free)))
        coded_all.append(coded)
    if not free:
        raise ValueError("nothing to measure free running on")
    forced, greedy = torch.cat(kls), torch.cat(free)
    return Measured(
        positions=len(forced),
        kl=float(forced.mean()),
        kl_p99=float(max(forced.quantile(0.99), greedy.quantile(0.99))),
        top1=float(torch.cat(same).float().mean()),
        top1_floor=floor,
        nmse_max=worst_tensor(prompts, coded_all),
        ratio=raw / encoded,
        free_running_kl=float(greedy.mean()),
    )
