"""Records are encoded together while a codec thread is busy, and alone while none is."""

from __future__ import annotations

import time
from typing import Any

import pytest

from prfaas.testing.waiting import eventually
from remote_prefill import sender
from remote_prefill.sender import BATCH_BYTES

PROMPT = 200


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Raw bytes of each batch, which takes a while to encode."""
    seen: list[int] = []
    encode = sender.encode_batch

    def slow(batch: Any, groups: Any) -> Any:
        seen.append(sum(view.raw.nbytes for view, *_ in batch))
        time.sleep(0.02)
        return encode(batch, groups)

    monkeypatch.setattr(sender, "encode_batch", slow)
    return seen


async def test_records_that_come_while_others_are_encoded_are_encoded_together(
    prefill_site: Any, decode_site: Any, tokens: Any, batches: list[int]
) -> None:
    p = await prefill_site()
    d = await decode_site({"fra/p0": p})
    await d.ready("fra/p0")
    batches.clear()
    prompt = tokens(PROMPT)
    done = await d.engine.fetch(d.params("fra/p0"), prompt)
    assert (done.status, done.reason) == ("staged", "")
    assert d.engine.staged_is_right(done, prompt)
    d.engine.release(done)
    assert max(batches[1:]) > batches[0]  # the first record went alone, then as many as waited
    assert max(batches) < BATCH_BYTES + batches[0]
    await d.clean(p)


async def test_what_waits_to_be_encoded_is_given_back_when_the_session_is_cancelled(
    prefill_site: Any, decode_site: Any, tokens: Any, batches: list[int]
) -> None:
    p = await prefill_site()
    d = await decode_site({"fra/p0": p})
    await d.ready("fra/p0")
    batches.clear()
    session, _ = d.engine.begin_fetch(d.params("fra/p0"), tokens(PROMPT))
    await eventually(lambda: bool(batches))
    d.engine.abort(session)
    await d.clean(p)
    await eventually(lambda: p.agent._hub.unfreed_records == 0)
