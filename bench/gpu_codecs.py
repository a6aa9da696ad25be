"""What the GPU does of the codecs' work: the pace of what can be prepared there, against one core,
and whether both make the same bytes."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from bench.harness import Samples
from local_engine.kv_encode import ChannelsEncoder, Int8Encoder, KvEncoder
from prfaas.codecs import Calibration, Codec, Preparable, Quality, Tile
from prfaas.codecs.calibration import Header, Rung
from prfaas.codecs.int8 import Int8Codec
from prfaas.codecs.native import Native
from prfaas.codecs.transform import make_codec
from prfaas.errors import PrfaasError
from prfaas.layout import GroupKind, LayerGroup
from prfaas.testing.fake_device import FakeDevice
from prfaas_connect.device.staging import Staging, TorchDevice

HEADS, DIM, TOKENS, LAYERS, ROUNDS = 8, 128, 256, 16, 7
Add = Callable[[str, float, str, str], None]


def calibration() -> Calibration:
    """As of a model of that size; its numbers do not matter to the pace."""
    rng, width = np.random.default_rng(1), HEADS * DIM
    freq = (10000.0 ** -(np.arange(DIM // 2) / (DIM // 2))).astype(np.float32)
    metric = np.broadcast_to(np.eye(DIM, dtype=np.float32), (LAYERS, 2, HEADS, DIM, DIM)).copy()
    rungs = (Rung("near-channels", Quality.NEAR, 0.06),)
    spans = tuple((at, at + 1) for at in range(LAYERS))
    return Calibration(
        Header(1, "random", tuple(range(LAYERS)), HEADS, DIM, spans, rungs),
        freq,
        rng.normal(0, 1, (LAYERS, 2, width)).astype(np.float32),
        rng.uniform(0.5, 2, (LAYERS, 2, width)).astype(np.float32),
        metric,
        (np.ones((width, 1), dtype=np.float32),) * (2 * LAYERS),
    )


def measure(native: Native, device: torch.device, add: Add) -> None:
    """A row each; on the CPU the same steps with a stand-in, whose times mean nothing. Raises
    PrfaasError where GPU and CPU make different bytes.
    """
    made = calibration()
    pairs: list[tuple[KvEncoder, Codec]] = [
        (Int8Encoder(), Int8Codec(native)),
        (ChannelsEncoder(made, device), make_codec(native, made, made.header.rungs[0])),
    ]
    generator = torch.Generator().manual_seed(1)
    kv = torch.randn((LAYERS, 2, TOKENS, HEADS, DIM), generator=generator).to(torch.bfloat16)
    group = LayerGroup(GroupKind.FULL, tuple(range(LAYERS)), HEADS, DIM, "bfloat16")
    tiles = [Tile.of(group, (layer,), (1024, 1024 + TOKENS)) for layer in range(LAYERS)]
    raw = [layer.view(torch.uint8).reshape(-1).numpy() for layer in kv]
    there = kv.to(device)
    staging = Staging(FakeDevice() if device.type == "cpu" else TorchDevice(device))
    raw_bytes = sum(part.nbytes for part in raw)
    for encoder, codec in pairs:
        assert isinstance(codec, Preparable)
        sizes = [codec.prepared_bytes(tile) for tile in tiles]
        ring = np.empty((LAYERS, max(sizes) + 1), dtype=np.uint8)
        gpu, cpu, finish = [], [], []
        for number in range(ROUNDS + 1):
            start_s = time.perf_counter()
            copies = [
                staging.start(
                    partial(encoder.prepare, there[at], tiles[at]),
                    sizes[at] + 1,
                    ring[at],
                )
                for at in range(LAYERS)
            ]
            for copy in copies:
                copy.wait()
            ready_s = time.perf_counter()
            payloads = [codec.finish(ring[at, : sizes[at]], tiles[at]) for at in range(LAYERS)]
            finished_s = time.perf_counter()
            alone = [codec.encode(raw[at], tiles[at]) for at in range(LAYERS)]
            alone_s = time.perf_counter()
            if payloads != alone or not all(ring[at, sizes[at]] for at in range(LAYERS)):
                raise PrfaasError(f"{encoder.name}: the GPU does not make the CPU's bytes")
            if number:  # The first one compiles and takes memory.
                gpu.append(raw_bytes / (ready_s - start_s) / 1e9)
                finish.append(raw_bytes / (finished_s - ready_s) / 1e9)
                cpu.append(raw_bytes / (alone_s - finished_s) / 1e9)
        name = encoder.name.partition("@")[0]
        note = f"raw KV, with the way to host memory; {sum(sizes) / raw_bytes:.2f} of its bytes"
        found = Samples(tuple(gpu))
        add(f"codec.{name}.gpu_gb_per_s", found.median, "GB/s", f"{note}; {found.spread}")
        left = Samples(tuple(finish))
        add(f"codec.{name}.left_gb_per_s", left.median, "GB/s", "the rest on one core of the CPU")
        whole = Samples(tuple(cpu))
        add(f"codec.{name}.cpu_gb_per_s", whole.median, "GB/s", "all of it on one core of the CPU")
    add("codec.bytes_equal", 1.0, "1: yes", "GPU and CPU make the same payloads")
