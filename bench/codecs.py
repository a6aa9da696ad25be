"""KV codecs on real KV: bytes, CPU time of one core, and what they do to answers.

`near` is the codec without a basis, which is fast; `near_basis`, `compact` and `tight` change basis
over spans of layers. KL is over positions of text from other sources than the calibration's. What a
codec does to answers does not depend on the machine's load: it is found once (`codec_work`), and a
run that is started again goes on where it was. Speeds, and TTFT over a thin link, are measured in
every run, at its end.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import zstandard

from bench.codec_models import biased, demo_path
from bench.codec_ttft import add_ttft
from bench.codec_work import FOUND, CodecWork
from bench.harness import Report, Samples
from local_engine.kv_calibration.evaluate import tiles
from local_engine.kv_calibration.run import FULL, Sizes
from local_engine.kv_calibration.rungs import spans_for
from local_engine.kv_calibration.tape import Tape
from local_engine.loader import load_model
from prfaas.codecs import Bytes, Calibration, Codec, Quality, Tile, merge_planes, split_planes
from prfaas.codecs.calibration import Measured
from prfaas.codecs.exponent import ExponentCodec
from prfaas.codecs.gate import misses
from prfaas.codecs.int8 import Int8Codec
from prfaas.codecs.native import Native, native
from prfaas.codecs.transform import make_codec
from prfaas.errors import ConfigError
from prfaas.layout import GroupKind, LayerGroup

QUICK = Sizes((1024,) * 3, (384,), (512,) * 3, 100, 1, 192, 64, 24)
QUICK_BIASED = Sizes((1024,) * 2, (384,), (512,) * 2, 100, 1, 96, 32, 24)
BIASED = Sizes((2048,) * 3, (768,) * 2, FULL.evaluate, 200, 1, 256, 96)
SPEED_TOKENS = 512
ROUNDS = 5
ROWS = {
    "near-channels": "near", "near-basis": "near_basis",
    "compact-basis": "compact", "tight-basis": "tight",
}  # fmt: skip

Piece = tuple[Bytes, Tile]


@dataclass(frozen=True, slots=True)
class Arm:
    """Something that encodes pieces and decodes them again."""

    encode: Callable[[Piece], object]
    decode: Callable[[object, Piece], object]
    pieces: Sequence[Piece]
    size: Callable[[object], int]

    @property
    def raw_bytes(self) -> int:
        return sum(raw.nbytes for raw, _ in self.pieces)


@dataclass(frozen=True, slots=True)
class Speed:
    """GB of raw KV a second on one core, and raw over encoded bytes."""

    encode: Samples
    decode: Samples
    ratio: float


def run(quick: bool) -> None:
    """All rows; `quick` learns from less text, and measures too few positions for any lossy codec
    to be offered, so no TTFT.
    """
    if native is None:
        raise ConfigError("the codecs' C extension was not built: is there a C compiler?")
    torch.set_num_threads(1)
    report = Report("codecs", quick=quick)
    path = demo_path(report.say)
    with torch.inference_mode():
        # Found anew by a quick run: it is what tests run.
        folder = None if quick else FOUND
        work = CodecWork(load_model(path), QUICK if quick else FULL, folder, report.say)
        other = CodecWork(biased(path), QUICK_BIASED if quick else BIASED, folder, report.say)
        measured = add_quality(report, "", native, work)
        add_quality(report, "qkv_bias.", native, other)
        add_speeds(report, native, work.calibration, work.tape(0), 3 if quick else ROUNDS)
    if not quick:
        with tempfile.TemporaryDirectory(prefix="prfaas-") as name:
            file = Path(name) / "calibration.npz"
            work.calibration.with_measured(measured).save(file)
            asyncio.run(add_ttft(report, path, file))
    report.finish()


def add_speeds(
    report: Report, native: Native, calibration: Calibration, tape: Tape, rounds: int
) -> None:
    """Speed rows, all arms in turn in each round. CPU time of the process: zipnn has threads."""
    arms = speed_arms(native, calibration, tape)
    found = measure_speeds(arms, rounds)
    for name, speed in found.items():
        both = f"{speed.encode.median:8.3f} {speed.decode.median:8.3f} GB/s"
        report.say(f"{name:<16} {speed.ratio:6.3f} {both}")
    exact, planes = found["exponent"], found["planes_zstd1"]
    note = f"{exact.encode.median:.3g} and {exact.decode.median:.3g} GB/s of raw KV on one core"
    report.add("exact.ratio", exact.ratio, "raw over wire", "256 tokens of one layer a frame")
    if "zipnn" in found:
        other = found["zipnn"]
        against = f"{note}; zipnn {other.ratio:.3f} at {other.encode.median:.3g} and "
        against += f"{other.decode.median:.3g}, on the same frames"
        report.add("exact.encode_over_zipnn", *over(exact.encode, other.encode, against))
        report.add("exact.decode_over_zipnn", *over(exact.decode, other.decode, against))
    else:
        report.say("zipnn is not installed: pip install zipnn for the rows against it")
    near = found["near-channels"]
    slower = min(
        over(near.encode, planes.encode, "encode"), over(near.decode, planes.decode, "decode")
    )
    report.add("near.speed_over_zstd1_planes", *slower)
    memcpy = found["memcpy"]
    slower = min(
        over(found["int8"].encode, memcpy.encode, "encode"),
        over(found["int8"].decode, memcpy.encode, "decode"),
    )
    report.add("near_fast.speed_over_memcpy", *slower)
    for name, row in ROWS.items():
        speed = found[name]
        for way, value in (("encode", speed.encode), ("decode", speed.decode)):
            report.add(f"{row}.{way}_gb_per_s", value.median, "GB/s", f"raw KV; {value.spread}")


def over(mine: Samples, other: Samples, note: str) -> tuple[float, str, str]:
    """Median of the rounds' quotients."""
    quotients = Samples(tuple(a / b for a, b in zip(mine.values, other.values, strict=True)))
    return quotients.median, "ratio", f"{note}; {quotients.spread}"


def speed_arms(native: Native, calibration: Calibration, tape: Tape) -> dict[str, Arm]:
    """Everything whose speed is measured, on the same KV."""
    kv = tape.kv[:, :, :SPEED_TOKENS]
    layers = kv.shape[0]
    single = cut(kv, [(i, i + 1) for i in range(layers)])
    arms = {
        "memcpy": Arm(lambda p: p[0].copy(), lambda e, p: None, single, lambda e: e.nbytes),
        "planes_zstd1": zstd_arm(single),
        "exponent": codec_arm(ExponentCodec(native), single),
        "int8": codec_arm(Int8Codec(native), single),
    }
    if (other := zipnn_arm(single)) is not None:
        arms["zipnn"] = other
    for rung in calibration.header.rungs:
        pieces = cut(kv, spans_for(calibration, rung))
        arms[rung.codec] = codec_arm(make_codec(native, calibration, rung), pieces)
    return arms


def cut(kv: torch.Tensor, spans: Sequence[tuple[int, int]]) -> list[Piece]:
    """Pieces as frames carry them."""
    layers, _, tokens, heads, dim = kv.shape
    group = LayerGroup(GroupKind.FULL, tuple(range(layers)), heads, dim, "bfloat16")
    source = kv.view(torch.uint16).numpy()
    return [
        (np.ascontiguousarray(source[low, :, at]).view(np.uint8).reshape(-1), tile)
        for low, at, tile in tiles(group, tokens, spans)
    ]


def codec_arm(codec: Codec, pieces: Sequence[Piece]) -> Arm:
    def decode(encoded: object, piece: Piece) -> object:
        assert isinstance(encoded, bytes)
        out = np.empty(piece[0].nbytes, dtype=np.uint8)
        codec.decode_into(memoryview(encoded), out, piece[1])
        return out

    return Arm(lambda p: codec.encode(*p) or b"", decode, pieces, len)


def zstd_arm(pieces: Sequence[Piece]) -> Arm:
    """Byte planes, each through zstd at level 1 as it comes."""
    compressor, decompressor = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()

    def decode(encoded: object, piece: Piece) -> object:
        assert isinstance(encoded, list)
        out = np.empty(piece[0].nbytes, dtype=np.uint8)
        planes = [np.frombuffer(decompressor.decompress(part), np.uint8) for part in encoded]
        merge_planes(planes, out)
        return out

    return Arm(
        lambda p: [compressor.compress(plane.data) for plane in split_planes(p[0], 2)],
        decode,
        pieces,
        lambda e: sum(map(len, e)),
    )


def zipnn_arm(pieces: Sequence[Piece]) -> Arm | None:
    try:
        import zipnn
    except ImportError:
        return None
    codec = zipnn.ZipNN(bytearray_dtype="bfloat16", threads=1)
    return Arm(
        lambda p: codec.compress(bytearray(p[0])), lambda e, p: codec.decompress(e), pieces, len
    )


def measure_speeds(arms: dict[str, Arm], rounds: int) -> dict[str, Speed]:
    """Every arm once a round."""
    encode: dict[str, list[float]] = {name: [] for name in arms}
    decode: dict[str, list[float]] = {name: [] for name in arms}
    ratios = {}
    for _ in range(rounds):
        for name, arm in arms.items():
            start = time.process_time()
            encoded = [arm.encode(piece) for piece in arm.pieces]
            middle = time.process_time()
            for each, piece in zip(encoded, arm.pieces, strict=True):
                arm.decode(each, piece)
            end = time.process_time()
            encode[name].append(arm.raw_bytes / max(middle - start, 1e-9) / 1e9)
            decode[name].append(arm.raw_bytes / max(end - middle, 1e-9) / 1e9)
            ratios[name] = arm.raw_bytes / sum(map(arm.size, encoded))
    return {
        name: Speed(Samples(tuple(encode[name])), Samples(tuple(decode[name])), ratios[name])
        for name in arms
    }


def add_quality(
    report: Report, prefix: str, native: Native, work: CodecWork
) -> dict[str, Measured]:
    """Ratio, KL, top-1 and the worst tensor of every lossy codec; by codec."""
    calibration = work.calibration
    single = [(i, i + 1) for i in range(len(calibration.header.layers))]
    found = work.measured(Int8Codec(native), single)
    add_measured(report, f"{prefix}near_fast", Quality.NEAR, found, "int8")
    measured = {Int8Codec.name: found}
    for rung in calibration.header.rungs:
        found = work.measured(make_codec(native, calibration, rung), spans_for(calibration, rung))
        measured[rung.codec] = found
        longest = max(b - a for a, b in calibration.header.spans) if rung.columns else 1
        note = (
            f"step {rung.step:.4g}, spans of up to {longest} layers: the wire runs so many behind"
        )
        add_measured(report, prefix + ROWS[rung.codec], rung.quality, found, note)
    return measured


def add_measured(report: Report, row: str, quality: Quality, found: Measured, note: str) -> None:
    wrong = misses(quality, found)
    note += f"; {found.positions} positions; " + (
        f"not offered: {', '.join(wrong)}" if wrong else f"within {quality}"
    )
    report.say(f"{row}: ratio {found.ratio:.3f}, KL {found.kl:.3g}; {note}")
    loss = (found.top1_floor - found.top1) * 100
    report.add(f"{row}.ratio", found.ratio, "raw over wire", note)
    report.add(f"{row}.kl", found.kl, "nats", note)
    report.add(f"{row}.kl_p99", found.kl_p99, "nats", note)
    report.add(f"{row}.kl_free_running", found.free_running_kl, "nats", note)
    floor = f"{note}; noise floor {found.top1_floor:.4f}"
    report.add(f"{row}.top1_loss_points", loss, "points", floor)
    report.add(f"{row}.tensor_nmse_max", found.nmse_max, "share of variance", note)
    report.add(f"{row}.offered", float(not wrong), "1: yes", note)
