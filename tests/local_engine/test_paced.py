from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch

from local_engine.kv.pool import KvPool
from local_engine.kv.table import BlockTable
from local_engine.paced import PacedRunner, SeededKv, answer_tokens
from local_engine.paced_profile import (
    PacedDecode,
    PacedModel,
    PacedPrefill,
    PacedProfile,
)
from local_engine.requests import SamplingParams
from local_engine.runner import DecodeRow, PrefillChunk
from local_engine.sampler import TokenDraw
from prfaas.layout import GroupKind, KvLayout, LayerGroup
from prfaas.tokens import Tokenizer

BYTE_TOKENIZER = Path(__file__).parents[2] / "deploy" / "profiles" / "byte-tokenizer"
MODEL = PacedModel(layers=3, kv_heads=2, head_dim=4, dtype="bfloat16", max_context=512)
PROFILE = PacedProfile(
    name="test",
    source="made up",
    tokenizer=BYTE_TOKENIZER,
    model=MODEL,
    prefill=PacedPrefill(base_s=0.3, token_s=0.01, token_context_s=0.001, chunk_tokens=8),
    decode=PacedDecode(step_s=0.02, sequence_s=0.003, context_token_s=0.0001, max_batch=8),
)
DRAW = TokenDraw(SamplingParams(max_tokens=9), seed=0, index=0)
PROMPT = [*range(40, 63)]


@dataclass
class FakeTime:
    """Sleeping moves the clock; so does `work_s`, a little at each look."""

    at: float = 100.0
    work_s: float = 0.0
    sleeps: list[float] = field(default_factory=list)

    def now(self) -> float:
        self.at += self.work_s
        return self.at

    def wall(self) -> float:
        return self.at

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.at += seconds


class Rig:
    """One runner over a pool of its own."""

    def __init__(
        self,
        *,
        block_tokens: int = 4,
        dtype: str = "bfloat16",
        time_scale: float = 1.0,
        seed: int = 0,
        scrambled: bool = False,
    ) -> None:
        group = LayerGroup(GroupKind.FULL, (0, 1, 2), MODEL.kv_heads, MODEL.head_dim, dtype)
        self.pool = KvPool(KvLayout((group,)), 256 // block_tokens, block_tokens)
        model = MODEL.model_copy(update={"seed": seed})
        profile = PROFILE.model_copy(update={"time_scale": time_scale, "model": model})
        self.time = FakeTime()
        self.runner = PacedRunner(
            profile, self.pool, range(97, 123), clock=self.time, sleep=self.time.sleep
        )
        self.scrambled = scrambled
        self._free = list(range(self.pool.blocks))
        if scrambled:
            np.random.default_rng(7).shuffle(self._free)

    def table(self, tokens: int) -> BlockTable:
        table = self.pool.new_table()
        count = -(-tokens // self.pool.block_tokens)
        table.extend([self._free.pop() for _ in range(count)])
        return table

    def prefill(self, table: BlockTable, tokens: list[int], cuts: list[int]) -> None:
        for start, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
            self.runner.prefill_chunk(PrefillChunk(tokens[start:end], start, table))

    def answer(self, tokens: list[int], count: int, cuts: list[int]) -> list[int]:
        """Prefill all but the last token, then decode."""
        table = self.table(len(tokens) + count)
        self.prefill(table, tokens[:-1], cuts)
        return self.go_on(table, tokens, count)

    def go_on(self, table: BlockTable, tokens: list[int], count: int) -> list[int]:
        drawn = [tokens[-1]]
        for at in range(count):
            row = DecodeRow(drawn[-1], len(tokens) - 1 + at, table, DRAW)
            drawn += [one.token_id for one in self.runner.decode([row])]
        return drawn[1:]


@pytest.mark.parametrize(
    "rig",
    [
        {"block_tokens": 16},
        {"block_tokens": 64, "scrambled": True},
        {"dtype": "float32"},
        {"dtype": "float16"},
        {"time_scale": 3.0},
    ],
    ids=str,
)
def test_answers_are_the_same_in_any_blocks_chunks_dtype_and_pace(rig: dict) -> None:
    expected = Rig().answer(PROMPT, 12, [8, 16])
    assert Rig(**rig).answer(PROMPT, 12, [5]) == expected


def test_answers_differ_with_prompt_and_seed() -> None:
    answers = [
        Rig().answer(PROMPT, 12, []),
        Rig().answer([*PROMPT[:-2], 1, 2], 12, []),
        Rig().answer([1, *PROMPT[1:]], 12, []),
        Rig(seed=1).answer(PROMPT, 12, []),
    ]
    assert len({tuple(answer) for answer in answers}) == 4


def test_a_batch_answers_as_each_of_its_rows_alone() -> None:
    rig = Rig()
    prompts = [PROMPT, PROMPT[:9], [*range(80, 95)]]
    tables = [rig.table(64) for _ in prompts]
    for table, prompt in zip(tables, prompts, strict=True):
        rig.prefill(table, prompt[:-1], [])
    rows = [
        DecodeRow(prompt[-1], len(prompt) - 1, table, DRAW)
        for table, prompt in zip(tables, prompts, strict=True)
    ]
    together = [one.token_id for one in rig.runner.decode(rows)]
    assert together == [Rig().answer(prompt, 1, [])[0] for prompt in prompts]


@pytest.mark.parametrize("layer", range(3))
def test_kv_lost_in_one_layer_changes_the_answer(layer: int) -> None:
    expected = Rig().answer(PROMPT, 30, [])
    rig = Rig()
    table = rig.table(64)
    rig.prefill(table, PROMPT[:-1], [])
    rig.pool.layers[layer].zero_()
    assert rig.go_on(table, PROMPT, 30) != expected


def test_exported_kv_of_another_engine_gives_the_same_answer() -> None:
    """What crosses the wire is enough: nothing of an answer is hidden in the runner."""
    p, d = Rig(block_tokens=16), Rig(block_tokens=4, scrambled=True)
    n = len(PROMPT) - 1
    p_table, d_table = p.table(n), d.table(64)
    p.prefill(p_table, PROMPT[:-1], [8, 16])
    for layer in range(3):
        data = np.empty(2 * n * 2 * 4 * 2, dtype=np.uint8)
        p.pool.export(layer, p_table, 0, n, data)
        d.pool.load(layer, d_table, 0, n, data)
    assert d.go_on(d_table, PROMPT, 12) == Rig().answer(PROMPT, 12, [])


def test_kv_depends_on_token_position_layer_and_seed_only() -> None:
    kv = SeededKv(MODEL)
    whole = kv.values(1, [5, 6, 7], [10, 11, 12])
    assert whole.shape == (2, 3, 2, 4)
    assert torch.equal(whole[:, 1:2], kv.values(1, [6], [11]))
    assert torch.equal(whole, SeededKv(MODEL).values(1, [5, 6, 7], [10, 11, 12]))
    for other in (
        kv.values(2, [5], [10]),
        kv.values(1, [6], [10]),
        kv.values(1, [5], [11]),
        SeededKv(MODEL.model_copy(update={"seed": 1})).values(1, [5], [10]),
    ):
        assert not torch.equal(whole[:, :1], other)
    assert not torch.equal(whole[0], whole[1])


def test_kv_is_known_bit_by_bit() -> None:
    """Every release and machine must make these bytes (found with plain Python integers)."""
    values = SeededKv(MODEL).values(2, [65, 66], [0, 1])
    assert values.view(torch.int16).flatten().tolist() == KNOWN


def test_kv_values_survive_every_kv_dtype() -> None:
    values = SeededKv(MODEL).values(0, range(200), range(200))
    for dtype in (torch.float16, torch.float32):
        assert torch.equal(values.to(dtype).to(torch.bfloat16), values)
    assert values.float().std() == pytest.approx(1.1, abs=0.2)


def test_prefill_takes_the_time_of_the_curve_layer_by_layer() -> None:
    rig = Rig(time_scale=0.5)
    seen = []
    chunk = PrefillChunk(PROMPT[:8], 16, rig.table(64))
    rig.runner.prefill_chunk(chunk, lambda layer: seen.append((layer, rig.time.at - 100)))
    seconds = 0.5 * (0.3 + 8 * 0.01 + 8 * (16 + 4) * 0.001)
    assert [layer for layer, _ in seen] == [0, 1, 2]
    assert [at for _, at in seen] == pytest.approx([seconds / 3, seconds * 2 / 3, seconds])
    assert rig.runner.late_s == 0


def test_a_layers_kv_is_in_the_pool_when_it_is_announced() -> None:
    rig = Rig()
    table = rig.table(8)

    def look(layer: int) -> None:
        written = [bool(rig.pool.layers[i][:, table.slots(0, 8)].any()) for i in range(3)]
        assert written == [i <= layer for i in range(3)]

    rig.runner.prefill_chunk(PrefillChunk(PROMPT[:8], 0, table), look)


def test_a_decode_step_takes_its_time_for_batch_and_context() -> None:
    rig = Rig()
    rows = [DecodeRow(1, position, rig.table(16), DRAW) for position in (3, 9)]
    rig.runner.decode(rows)
    assert rig.time.at - 100 == pytest.approx(0.02 + 2 * 0.003 + (4 + 10) * 0.0001)


def test_a_machine_too_slow_for_the_profile_is_told() -> None:
    rig = Rig()
    rig.time.work_s = 0.5
    rig.runner.decode([DecodeRow(1, 0, rig.table(4), DRAW)])
    assert rig.time.sleeps == []
    assert rig.runner.late_s == pytest.approx(0.5 - 0.0231)


def test_answers_are_made_of_plain_words() -> None:
    tokenizer = Tokenizer.load(BYTE_TOKENIZER)
    ids = answer_tokens(tokenizer)
    assert tokenizer.decode(ids) == " abcdefghijklmnopqrstuvwxyz"


KNOWN = [
    -17015, -16400, -16645, -16384, 16001, 16207, 16150, 16256,
    -16620, 16175, 16092, -16835, 16002, 16264, 16289, -16775,
    -16575, -16516, -16474, 15594, 16339, -17384, 16127, 16220,
    16178, 16128, 15915, 16206, 16246, -16760, 16001, -17095,
]  # fmt: skip
