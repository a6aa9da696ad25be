"""What an engine exports over its real port, as a source of KV."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from prfaas.errors import CorruptKv, EngineUnavailable, Overloaded, PrfaasError, ProtocolError
from prfaas.interfaces import KvSource
from prfaas.placement import StagingMap
from prfaas.session_messages import PrefillReport, SessionOpen
from prfaas.testing.kv_contracts import KvSourceContract, records_of
from prfaas.testing.waiting import eventually
from prfaas_connect.port.messages import PrefillEnd
from remote_prefill.engine_source import EngineSource

TOKENS = np.arange(5, 26, dtype=np.int32)


def request(tokens: np.ndarray = TOKENS) -> SessionOpen:
    return SessionOpen(
        transfer_id="t", model="m", tokens=tokens.astype("<i4").tobytes(), send_from=0, salt="",
        use_cache=True, quality="exact", codecs=("raw",), deadline_s=9, lease_s=9,
        engine_epoch="e",
    )  # fmt: skip


class TestEngineSource(KvSourceContract):
    @pytest.fixture(autouse=True)
    async def _site(self, prefill_site: Any) -> None:
        self.site = await prefill_site()

    async def make(self) -> tuple[KvSource, StagingMap]:
        engine, hub = self.site.engine, self.site.agent._hub
        layout = engine.layout
        kv = np.zeros(layout.session_bytes(0, len(TOKENS)), dtype=np.uint8)
        there = StagingMap(layout, 0, len(TOKENS), 8, kv)
        for extent in layout.extents(0, len(TOKENS), 8):
            rows = engine.kv(TOKENS, extent.group, extent.layer)
            there.tensor(extent)[:] = rows[:, extent.span.start : extent.span.end]
        return EngineSource.start(hub, request(), 1), there

    def assert_free(self) -> None:
        assert self.site.agent._hub.unfreed_records == 0


class Export:
    """Events put by the test."""

    def __init__(self, *events: object) -> None:
        self.events = list(events)

    async def next(self) -> object:
        return self.events.pop(0)


def end(status: str, reason: str = "", records: int = 0) -> PrefillEnd:
    return PrefillEnd("x1", 1, status, records, 3, 4, 0.5, 0.25, reason)


async def next_of(*events: object) -> object:
    export: Any = Export(*events)
    return await EngineSource(export).next()


async def test_the_report_is_the_engines() -> None:
    report = await next_of(end("done"))
    assert isinstance(report, PrefillReport)
    assert report.cached_tokens + report.computed_tokens == 7
    assert (report.queue_s, report.compute_s) == (0.5, 0.25)


@pytest.mark.parametrize(
    ("event", "error", "says"),
    [
        (end("failed", "overloaded: full"), Overloaded, "failed overloaded: full"),
        (end("failed", "corrupt_kv"), CorruptKv, "failed corrupt_kv"),
        (end("failed", "boom"), EngineUnavailable, "failed boom"),
        (end("cancelled"), EngineUnavailable, "the session: cancelled$"),
        (end("done", records=2), ProtocolError, "counts 2 records, 0 came"),
    ],
)
async def test_an_end_that_is_none_is_an_error_by_its_kind(
    event: PrefillEnd, error: type[PrfaasError], says: str
) -> None:
    with pytest.raises(error, match=says):
        await next_of(event)


async def test_an_engine_that_leaves_ends_its_sources(prefill_site: Any) -> None:
    site = await prefill_site()
    site.engine.script.stop_before = (1, 0)
    source = EngineSource.start(site.agent._hub, request(), 1)
    first = await source.next()
    assert not isinstance(first, PrefillReport)
    await site.engine.close()
    with pytest.raises(EngineUnavailable, match="disconnected"):
        await records_of(source)
    first.done()
    source.cancel()
    await eventually(lambda: site.agent.engine is None)
