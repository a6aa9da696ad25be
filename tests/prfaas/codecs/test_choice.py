"""The codec of a chunk: soonest across, less loss before more, never slower than as it is."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from prfaas.codecs import KNOWN_CODECS, RAW, PlanesZstdCodec, Quality
from prfaas.codecs.choice import EXPECTED, Pace, choose

GBIT = 125e6
PLANES = PlanesZstdCodec()


def named(name: str, number: int, quality: Quality = Quality.EXACT) -> Any:
    return SimpleNamespace(name=name, id=number, quality=quality)


EXPONENT = named("exponent", 2)
INT8 = named("int8", 3, Quality.NEAR)
CHANNELS = named("near-channels@digest", 4, Quality.NEAR)
ALL = (CHANNELS, INT8, EXPONENT, PLANES, RAW)
COMPACT = named("compact-basis@digest", 6, Quality.COMPACT)


def chosen(gbit_per_s: float, codecs: Any = ALL, **changes: Any) -> str:
    fields: dict[str, Any] = {"threads": 1, "paces": {}, **changes}
    paces = fields.pop("paces")
    return choose(codecs, paces, goodput_bytes_per_s=gbit_per_s * GBIT, **fields).name


@pytest.mark.parametrize(
    ("gbit_per_s", "codec"),
    [
        (0.1, "near-channels@digest"),
        (1, "near-channels@digest"),
        (5, "int8"),
        (8, "int8"),
        (30, "raw"),
    ],
)
def test_the_faster_the_link_the_less_is_done_to_the_bytes(gbit_per_s: float, codec: str) -> None:
    assert chosen(gbit_per_s) == codec


@pytest.mark.parametrize(("gbit_per_s", "codec"), [(1, "exponent"), (5, "exponent"), (20, "raw")])
def test_exact_sessions_do_without_a_loss(gbit_per_s: float, codec: str) -> None:
    assert chosen(gbit_per_s, (EXPONENT, PLANES, RAW)) == codec


def test_threads_make_a_slow_codec_worth_it() -> None:
    assert chosen(20, (PLANES, RAW)) == "raw"
    assert chosen(20, (PLANES, RAW), threads=16) == "planes-zstd"


def test_what_is_as_fast_with_less_loss_wins() -> None:
    same = {name: Pace(1e9, 1.5) for name in ("exponent", "int8", "near-channels@digest")}
    assert chosen(1, (CHANNELS, INT8, EXPONENT), paces=same) == "exponent"


def test_a_link_that_nobody_has_measured_gets_fewest_bytes() -> None:
    assert chosen(0) == "near-channels@digest"
    assert chosen(0, (EXPONENT, PLANES, RAW)) == "exponent"


def test_what_encodes_slowly_waits_until_the_link_is_known_to_be_slower() -> None:
    codecs = (COMPACT, *ALL)
    assert chosen(0, codecs) == "near-channels@digest"
    assert chosen(0, codecs, threads=4) == "compact-basis@digest"
    assert chosen(0.05, codecs) == "compact-basis@digest"
    assert chosen(1, codecs) == "near-channels@digest"
    paces = {"compact-basis@digest": Pace(1e9, 5.5)}
    assert chosen(1, codecs, paces=paces) == "compact-basis@digest"
    assert chosen(0, (COMPACT,)) == "compact-basis@digest"


def test_without_a_codec_bytes_go_as_they_are() -> None:
    assert chosen(1, ()) == "raw"


def test_a_codec_stays_until_another_is_clearly_better() -> None:
    paces = {"exponent": Pace(1e9, 1.5), "int8": Pace(1e9, 1.65)}
    pair = (INT8, EXPONENT)
    assert chosen(1, pair, paces=paces) == "int8"
    assert chosen(1, pair, paces=paces, current=EXPONENT) == "exponent"
    paces["int8"] = Pace(1e9, 1.9)
    assert chosen(1, pair, paces=paces, current=EXPONENT) == "int8"


def test_it_is_never_slower_than_raw() -> None:
    """Whatever was measured and used before."""
    speeds, ratios = (1e7, 1e8, 1e9, 4e9), (1.0, 1.5, 4.0)
    for speed, other, ratio, gbit in itertools.product(speeds, speeds, ratios, (0.01, 1, 10, 100)):
        paces = {"raw": Pace(2e9, 1.0), "exponent": Pace(speed, ratio), "int8": Pace(other, 2.0)}
        for current in (None, RAW, EXPONENT, INT8):
            name = chosen(gbit, (INT8, EXPONENT, RAW), paces=paces, current=current)
            goodput = gbit * GBIT
            assert paces[name].seconds(goodput, 1) <= paces["raw"].seconds(goodput, 1)


def test_every_codec_is_expected_to_do_something() -> None:
    assert set(EXPECTED) == set(KNOWN_CODECS)
