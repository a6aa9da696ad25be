"""What D keeps where everything has come and the seal has not, or disagrees."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from prfaas.errors import EngineUnavailable
from prfaas.rpc import convert
from prfaas.session_messages import PrefillReport, SessionSeal
from prfaas.testing.waiting import eventually
from remote_prefill.engine_source import EngineSource

PROMPT = 22


async def test_nothing_is_kept_of_a_session_whose_seal_disagrees(
    prefill_site: Any, decode_site: Any, tokens: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = await prefill_site()
    d = await decode_site({"fra/p0": p})
    await d.ready("fra/p0")
    seal_to_bytes = convert.seal_to_bytes

    def other(seal: SessionSeal) -> bytes:
        return seal_to_bytes(replace(seal, root_digest=bytes(16)))

    monkeypatch.setattr(convert, "seal_to_bytes", other)
    done = await d.engine.fetch(d.params("fra/p0"), tokens(PROMPT))
    assert (done.status, done.reason) == ("local", "corrupt_kv")
    await d.clean(p)


async def test_nobody_is_asked_for_more_where_only_the_seal_is_missing(
    prefill_site: Any, decode_site: Any, tokens: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = await prefill_site("p0"), await prefill_site("p1")
    d = await decode_site({"fra/p0": first, "fra/p1": second})
    await d.ready("fra/p0", "fra/p1")
    take = EngineSource.next

    async def gone_at_the_end(source: EngineSource) -> Any:
        event = await take(source)
        if isinstance(event, PrefillReport):
            await eventually(lambda: all(m.ledger.whole for m in d.link("fra/p0").sessions))
            raise EngineUnavailable("gone")
        return event

    monkeypatch.setattr(EngineSource, "next", gone_at_the_end)
    prompt, params = tokens(PROMPT), d.params("fra/p0", "fra/p1")
    done = await d.engine.fetch(params, prompt)
    assert (done.status, done.reason) == ("partial", "engine_unavailable")
    assert done.token_end == PROMPT - 1
    assert d.engine.staged_is_right(done, prompt)
    d.engine.release(done)
    assert (await d.outcome(params)).tried == ("fra/p0",)
    await d.clean(first, second)
