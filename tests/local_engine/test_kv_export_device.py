"""KV leaving a pool on an accelerator: nothing is sent before it is there, nor read after it may
have changed; a stand-in does each copy only when it is told to."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from local_engine import kv_export
from local_engine.kv_encode import ChannelsEncoder, KvEncoder
from local_engine.testing import CHAIN_LAYERS, CHAIN_LAYOUT, CHAIN_VOCAB, CoreHarness, chain_kv
from prfaas.codecs import Calibration, Quality, Tile
from prfaas.codecs.calibration import Header, Rung
from prfaas.layout import chunk_spans
from prfaas.testing.fake_device import FakeDevice
from prfaas.testing.fake_port import FakePort
from prfaas_connect.device.staging import Staging
from prfaas_connect.port.messages import PrefillCancel, PrefillEnd, PrefillStart, PrepareFor, Record

GROUP = CHAIN_LAYOUT.groups[0]


def encoder(step: float) -> ChannelsEncoder:
    """KV of the chain model is below 1e7: steps below 1220 leave some of it out."""
    eye = np.broadcast_to(np.eye(2, dtype=np.float32), (CHAIN_LAYERS, 2, 1, 2, 2)).copy()
    made = Calibration(
        Header(1, "m", GROUP.layers, 1, 2, ((0, CHAIN_LAYERS),),
               (Rung("near-channels", Quality.NEAR, step),)),
        np.zeros(0, np.float32), np.zeros((CHAIN_LAYERS, 2, 2), np.float32),
        np.ones((CHAIN_LAYERS, 2, 2), np.float32), eye,
        (np.eye(2 * CHAIN_LAYERS, dtype=np.float32),) * 2,
    )  # fmt: skip
    return ChannelsEncoder(made, torch.device("cpu"))


def tokens(count: int, seed: int = 0) -> list[int]:
    return [(seed * 131 + i * 7 + i * i) % CHAIN_VOCAB for i in range(count)]


class Site:
    """An engine whose pool is on an accelerator that does what it is told."""

    def __init__(self, *encoders: KvEncoder, ring_bytes: int = 1 << 16, blocks: int = 64) -> None:
        self.device = FakeDevice()
        self.port = FakePort(ring_bytes=ring_bytes)
        self.engine = CoreHarness(
            port=self.port, staging=Staging(self.device), encoders=encoders, blocks=blocks
        )
        self.records: list[tuple[Record, bytes]] = []
        self.ends: dict[str, PrefillEnd] = {}

    def start(self, session: str, ids: list[int]) -> None:
        self.engine.core.handle(PrefillStart(session, 1, 0), np.asarray(ids, "<i4").tobytes())

    def receive(self) -> int:
        taken = self.port.take(Record)
        for record, _ in taken:
            assert record.session not in self.ends, "a record after the end"
            self.records.append((record, self.port.record_bytes(record)))
        self.ends |= {end.session: end for end, _ in self.port.take(PrefillEnd)}
        self.port.allocator.free(len(taken))
        return len(taken)

    def run(self) -> None:
        for _ in range(2000):
            worked, moved = self.engine.step(), self.receive()
            if not (worked or moved or self.engine.core.copying):
                return
            self.device.advance(1)
        raise AssertionError("still busy")

    def assert_whole(self, session: str, ids: list[int]) -> None:
        """All of it came once, as it is or as the encoder makes it."""
        seen = dict.fromkeys(GROUP.layers, 0)
        for record, data in self.records:
            if record.session == session:
                kv = chain_kv(ids, record.layer)[:, record.token_start : record.token_end]
                assert record.token_start == seen[record.layer]
                seen[record.layer] = record.token_end
                assert data == self.expected(record, kv)
        assert set(seen.values()) == {len(ids)}
        mine = sum(record.session == session for record, _ in self.records)
        assert (self.ends[session].status, self.ends[session].records) == ("done", mine)

    def expected(self, record: Record, kv: np.ndarray) -> bytes:
        if not record.codec:
            return kv.tobytes()
        (coder,) = self.engine.core._exporter._encoders.values()  # type: ignore[union-attr]
        assert record.codec == coder.name
        tile = Tile.of(GROUP, (record.layer,), (record.token_start, record.token_end))
        made = coder.prepare(torch.from_numpy(np.ascontiguousarray(kv)), tile).numpy()
        assert made[-1] == 1
        return made[:-1].tobytes()


def test_a_record_is_sent_only_once_its_bytes_are_there_and_in_order() -> None:
    site, ids = Site(), tokens(20)
    site.start("s", ids)
    for _ in range(6):
        site.engine.step()
    assert site.engine.core.copying
    assert (site.receive(), site.device.ran) == (0, 0)
    for count in range(1, 10):
        site.device.advance(1)
        site.engine.step()
        assert site.receive() == 1
        assert len(site.records) == count
    site.run()
    site.assert_whole("s", ids)
    assert not site.engine.core.copying
    site.engine.assert_empty()


def test_blocks_are_kept_until_they_have_been_read() -> None:
    site, ids = Site(blocks=12), tokens(32)
    site.start("s", ids)
    for _ in range(10):
        site.engine.step()
    assert site.engine.core.stats().free_blocks == 4
    site.engine.submit("other", tokens(30, 3), 2)  # waits for blocks: those are not free
    for _ in range(4):
        site.engine.step()
    site.run()
    site.assert_whole("s", ids)
    site.engine.run()
    site.engine.assert_answered("other")


@pytest.mark.parametrize("steps", range(7))
@pytest.mark.parametrize("ran", [0, 2])
def test_a_cancelled_session_leaves_no_hole_in_the_ring(steps: int, ran: int) -> None:
    site, ids = Site(ring_bytes=24 * GROUP.token_bytes), tokens(12, 1)
    site.start("s", tokens(40))
    site.start("next", ids)
    for _ in range(steps):
        site.engine.step()
    site.device.advance(ran)
    site.engine.core.handle(PrefillCancel("s", 1), b"")
    site.receive()
    assert site.ends["s"].status == "cancelled"
    assert site.ends["s"].records == sum(r.session == "s" for r, _ in site.records)
    site.run()
    site.assert_whole("next", ids)
    assert site.port.allocator.used_bytes == 0
    site.engine.assert_empty()


def test_when_the_agent_goes_nothing_is_read_from_blocks_that_go_on() -> None:
    site = Site()
    site.start("s", tokens(24))
    for _ in range(5):
        site.engine.step()
    waiting = len(site.device.jobs)
    assert waiting
    site.port.disconnect()
    site.engine.core.suspend_transfers()
    site.engine.step()
    site.engine.core.disconnected()
    # Fenced: the copies came before whatever is written to those blocks now.
    assert (len(site.device.jobs), site.device.ran) == (0, waiting)
    assert not site.engine.core.copying
    site.engine.assert_empty()


def test_records_are_prepared_from_when_the_agent_asks_and_cut_to_frames(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_export, "PREPARED_BYTES", 3 * GROUP.token_bytes)
    coder = encoder(step=1300)
    site, ids = Site(coder), tokens(40)
    site.start("s", ids)
    site.engine.step()
    site.engine.core.handle(PrepareFor("s", 1, coder.name), b"")
    site.engine.core.handle(PrepareFor("gone", 1, coder.name), b"")
    site.run()
    site.assert_whole("s", ids)
    spans = len(chunk_spans(0, 40, 8))
    plain = [record for record, _ in site.records if not record.codec]
    coded = [record for record, _ in site.records if record.codec]
    # The first four tokens are sinks, more than a cut of three: those go as they are.
    assert plain
    assert all(r.token_end - r.token_start <= 3 for r in coded)
    assert len(plain) + len(coded) > spans * CHAIN_LAYERS
    site.start("t", tokens(8, 2))
    site.run()
    site.assert_whole("t", tokens(8, 2))


def test_what_cannot_be_encoded_leaves_as_it_is() -> None:
    coder = encoder(step=800)
    site, ids = Site(coder), tokens(64)
    site.start("s", ids)
    site.engine.core.handle(PrepareFor("s", 1, coder.name), b"")
    site.run()
    site.assert_whole("s", ids)
    assert {bool(record.codec) for record, _ in site.records} == {True, False}
    for record, _ in site.records:
        kv = chain_kv(ids, record.layer)[:, record.token_start : record.token_end]
        rest = kv[:, max(0, 4 - record.token_start) :]
        assert bool(record.codec) == bool((np.abs(rest) < 8191.5 * 800).all())


@pytest.mark.parametrize("seed", range(6))
def test_whatever_the_device_is_slow_at_every_byte_is_right(seed: int) -> None:
    rng = random.Random(seed)
    coder = encoder(step=1000)
    site = Site(coder, ring_bytes=40 * GROUP.token_bytes, blocks=40)
    prompts: dict[str, list[int]] = {}
    cancelled = set()
    for turn in range(300):
        if turn < 150 and rng.random() < 0.1:
            name = f"s{turn}"
            prompts[name] = tokens(rng.randrange(1, 50), turn)
            site.start(name, prompts[name])
            if rng.random() < 0.6:
                site.engine.core.handle(PrepareFor(name, 1, coder.name), b"")
        if prompts and rng.random() < 0.03:
            name = rng.choice(sorted(prompts))
            if name not in site.ends:
                cancelled.add(name)
                site.engine.core.handle(PrefillCancel(name, 1), b"")
        if turn < 150 and rng.random() < 0.05:
            site.engine.submit(f"a{turn}", tokens(rng.randrange(1, 30), turn), 3)
        site.engine.step()
        site.device.advance(rng.choice((0, 0, 1, 2, 5)))
        if rng.random() < 0.7:
            site.receive()
    site.run()
    for name, ids in prompts.items():
        if site.ends[name].status == "done":
            site.assert_whole(name, ids)
        else:
            assert name in cancelled
    site.engine.assert_empty()
