"""Somebody on the path between D and P reads and changes bytes: with TLS neither helps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prfaas.testing.link import BendableLink, Direction, LinkShape
from prfaas.testing.pki import Pki
from prfaas.testing.waiting import eventually

SALT = "a salt that would be seen"


class Tap:
    """Sees all bytes of a link, and flips the middle bit of the next ones while `flips` is left."""

    def __init__(self) -> None:
        self.seen: dict[int, bytearray] = {}
        self.flips = 0

    def __call__(self, way: Direction, data: bytes) -> bytes:
        self.seen.setdefault(id(way), bytearray()).extend(data)
        if self.flips and data:
            self.flips -= 1
            middle = len(data) // 2
            data = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        return data

    def saw(self, what: bytes) -> bool:
        return any(what in each for each in self.seen.values())


@pytest.fixture
def tap(monkeypatch: pytest.MonkeyPatch) -> Tap:
    tap = Tap()
    monkeypatch.setattr(Direction, "bend", lambda way, data: tap(way, data))
    return tap


@pytest.fixture
def pair(prefill_site: Any, decode_site: Any, stack: AsyncExitStack, tmp_path: Path) -> Any:
    """D and P on two sides of a link, with or without TLS."""

    async def pair(tls: bool) -> tuple[Any, Any, BendableLink]:
        pki = Pki(tmp_path / "pki")
        at_p = {"tls": pki.settings("p0"), "authorised": ({"identity": "d0"},)} if tls else {}
        p = await prefill_site(**at_p)
        link = await stack.enter_async_context(BendableLink(LinkShape()))
        port = await link.forward("127.0.0.1", p.port)
        d = await decode_site({"fra/p0": port}, **({"tls": pki.settings("d0")} if tls else {}))
        await d.ready("fra/p0")
        return d, p, link

    return pair


@pytest.mark.parametrize("tls", [True, False])
async def test_prompts_and_kv_are_on_the_wire_without_tls_only(
    pair: Any, tap: Tap, tokens: Callable[..., np.ndarray], tls: bool
) -> None:
    d, p, _ = await pair(tls)
    prompt = tokens(22)
    done = await d.engine.fetch(d.params("fra/p0", salt=SALT), prompt)
    assert done.status == "staged"
    d.engine.release(done)
    in_clear = tap.saw(SALT.encode()), tap.saw(prompt[:-1].astype("<i4").tobytes())
    assert in_clear == (not tls, not tls)
    await d.clean(p)


async def test_any_bit_that_is_flipped_ends_the_connection_and_wrong_kv_is_never_staged(
    pair: Any, tap: Tap, tokens: Callable[..., np.ndarray]
) -> None:
    d, p, _ = await pair(True)
    broken = 0
    for seed in range(8):
        await d.ready("fra/p0")
        prompt = tokens(22, seed)
        tap.flips = 1 + seed % 2
        done = await d.engine.fetch(d.params("fra/p0"), prompt)
        tap.flips = 0
        if done.status in ("staged", "partial"):
            assert d.engine.staged_is_right(done, prompt)
            d.engine.release(done)
        else:
            assert done.status == "local"
        if done.status != "staged":
            assert done.reason == "peer_unavailable"
            broken += 1
    lanes = d.agent.metrics.lanes_opened.labels("fra", "p0")._value.get()
    resumes = d.agent.metrics.resumes.labels("fra", "p0")._value.get()
    assert broken + lanes + resumes > 2  # there were two lanes before

    async def staged_again() -> bool:
        done = await d.engine.fetch(d.params("fra/p0"), tokens(22, 99))
        if done.status in ("staged", "partial"):
            d.engine.release(done)
        return bool(done.status == "staged")

    await eventually(staged_again, within_s=10)
    await d.clean(p)
