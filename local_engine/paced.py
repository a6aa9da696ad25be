"""The paced runner: real KV bytes and deterministic tokens, step times from a profile.

Nothing is computed, everything else is real: scheduler, pool, prefix cache, transfers. The KV of a
token is a function of the token, its position and the layer, so it is the same wherever and in
whatever chunks it is made. The next token is read off the KV in the pool: an engine that decodes
from wrong or missing KV gives another answer than one that made its KV itself.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from local_engine.kv.pool import KvPool
from local_engine.kv.table import BlockTable
from local_engine.paced_profile import PacedModel, PacedProfile
from local_engine.runner import DecodeRow, LayerDone, PrefillChunk
from local_engine.sampler import Drawn
from prfaas.clock import SYSTEM_CLOCK, Clock
from prfaas.errors import ConfigError
from prfaas.tokens import Tokenizer

_Words = npt.NDArray[np.uint64]

_TABLE_BYTES = 32 << 20
_SAMPLED_TOKENS = 8
# Of 256 values, how many lie in [2, 4), [1, 2), [1/2, 1), ...: about a unit normal, so that the
# bytes compress as those of real KV do. All are exact in bfloat16, float16 and float32.
_EXPONENT_COUNTS = (12, 70, 77, 48, 25, 12, 6, 3, 2, 1)
_TOP_EXPONENT = 1
_BF16_BIAS = 127


class SeededKv:
    """KV as a function of (token, position, layer); owns a table of values, nothing to close.

    Integer arithmetic only, so that every machine makes the same bytes.
    """

    def __init__(self, model: PacedModel) -> None:
        self._shape = (model.kv_heads, model.head_dim)
        self._seed = np.uint64(model.seed)
        row = model.kv_heads * model.head_dim
        self._rows = min(max(1024, _TABLE_BYTES // (2 * row)), 1 << 16)
        self._table = _normal_table(model.seed, self._rows * row).view(self._rows, *self._shape)

    def values(self, layer: int, tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
        """K and V of tokens at positions in one layer, bfloat16 [2, tokens, kv_heads, head_dim]."""
        words = np.asarray(tokens, dtype=np.uint64) << np.uint64(32)
        words |= np.asarray(positions, dtype=np.uint64)
        words = _mix(words ^ _mix(np.full_like(words, layer + 1) << np.uint64(32) | self._seed))
        rows = np.stack((words % np.uint64(self._rows), _mix(words) % np.uint64(self._rows)))
        picked = self._table.index_select(0, torch.from_numpy(rows.astype(np.int64)).flatten())
        return picked.view(2, len(tokens), *self._shape)


class PacedRunner:
    """A `ModelRunner` that sleeps; its owner drops it, nothing to close.

    `token_ids` are what answers are made of. How tokens would be drawn is not looked at: an answer
    is a function of the prompt, and has no log-probabilities.
    """

    def __init__(
        self,
        profile: PacedProfile,
        pool: KvPool,
        token_ids: Sequence[int],
        *,
        clock: Clock = SYSTEM_CLOCK,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._profile = profile
        self._pool = pool
        self._token_ids = tuple(token_ids)
        self._kv = SeededKv(profile.model)
        self._layers = profile.model.layers
        self._clock = clock
        self._sleep = sleep
        self.late_s = 0.0
        """How far steps overran the profile's times, in all: this machine was too slow for it."""

    def prefill_chunk(self, chunk: PrefillChunk, on_layer: LayerDone | None = None) -> None:
        step = self._begin(self._profile.prefill.seconds(len(chunk.token_ids), chunk.start))
        positions = range(chunk.start, chunk.end)
        for layer in range(self._layers):
            kv = self._kv.values(layer, chunk.token_ids, positions)
            self._pool.write(layer, chunk.table, chunk.start, chunk.end, kv)
            step.wait((layer + 1) / self._layers)
            if on_layer is not None:
                on_layer(layer)
        self.late_s += step.late_s

    def decode(self, rows: Sequence[DecodeRow]) -> list[Drawn]:
        context = sum(row.position + 1 for row in rows)
        step = self._begin(self._profile.decode.seconds(len(rows), context))
        tokens = [row.token_id for row in rows]
        positions = [row.position for row in rows]
        slots = torch.cat([row.table.slots(row.position, row.position + 1) for row in rows])
        for layer, stored in enumerate(self._pool.layers):
            kv = self._kv.values(layer, tokens, positions)
            stored.index_copy_(1, slots, kv.to(stored.device, stored.dtype))
        drawn = [Drawn(self._next_token(row.table, row.position)) for row in rows]
        step.wait(1.0)
        self.late_s += step.late_s
        return drawn

    def _begin(self, seconds: float) -> _Step:
        # A curve measured on another grid pays its base here as often as this engine's chunks.
        return _Step(seconds * self._profile.time_scale, self._clock, self._sleep)

    def _next_token(self, table: BlockTable, position: int) -> int:
        """Read the KV of this token and a few more, picked by the position, from one layer."""
        words = _mix(np.arange(_SAMPLED_TOKENS, dtype=np.uint64) + np.uint64(position << 8))
        picks = [position, *(words % np.uint64(position + 1)).tolist()]
        slots = torch.cat([table.slots(at, at + 1) for at in picks])
        kv = self._pool.layers[position % self._layers][:, slots].float().cpu()
        digest = hashlib.blake2b(kv.numpy().tobytes(), digest_size=8).digest()
        return self._token_ids[int.from_bytes(digest, "little") % len(self._token_ids)]


class _Step:
    """One step of so many seconds, from now on."""

    def __init__(self, seconds: float, clock: Clock, sleep: Callable[[float], None]) -> None:
        self._seconds = seconds
        self._clock = clock
        self._sleep = sleep
        self._start = clock.now()
        self.late_s = 0.0

    def wait(self, share: float) -> None:
        """Sleep until this share of the step is over; notes how late it already is."""
        left = self._start + share * self._seconds - self._clock.now()
        if left > 0:
            self._sleep(left)
        self.late_s = max(0.0, -left)


def answer_tokens(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Tokens that answers may have: plain words and spaces, so that they are text in any encoding.

    Raises ConfigError for a tokenizer that has none.
    """
    ids = tuple(
        token
        for token in range(tokenizer.vocab_size)
        if not tokenizer.token_is_special(token) and _is_plain(tokenizer.decode([token]))
    )
    if not ids:
        raise ConfigError("the profile's tokenizer has no token of plain letters")
    return ids


def _is_plain(text: str) -> bool:
    word = text.removeprefix(" ")
    return text == " " or (word.isascii() and word.isalpha() and word.islower())


def _normal_table(seed: int, values: int) -> Tensor:
    """So many bfloat16 values: random sign and mantissa, exponents by `_EXPONENT_COUNTS`."""
    # random_raw is the one stream numpy promises never to change.
    raw = np.random.PCG64(seed).random_raw(-(-values // 4)).view(np.uint16)[:values]
    top = _BF16_BIAS + _TOP_EXPONENT
    exponents = np.repeat(np.arange(top, top - len(_EXPONENT_COUNTS), -1), _EXPONENT_COUNTS)
    sign_mantissa = raw & 0xFF
    bits = (
        (sign_mantissa & 0x80) << 8
        | exponents.astype(np.uint16)[raw >> 8] << 7
        | (sign_mantissa & 0x7F)
    )
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def _mix(words: _Words) -> _Words:
    """The finaliser of splitmix64, element by element, modulo 2**64."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
