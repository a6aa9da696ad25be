"""Pull on demand over real gRPC: the same machine, agents and bytes as push."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from prfaas.clock import Deadline
from prfaas.errors import PrefillTimeout
from prfaas.placement import StagingMap
from prfaas.session_messages import Feature, SessionOpen
from prfaas.testing.kv_contracts import Carried, KvStreamContract, Question, summary
from prfaas.testing.link import BendableLink, LinkShape
from prfaas.testing.scripted_port import PrefillScript
from prfaas.testing.waiting import eventually
from remote_prefill.receiver import OwnMemory, Receiver

PROMPT = np.arange(7, 31, dtype=np.int32)


class Pull:
    """One session from D's agent to P's, without an engine at D that asks for it."""

    def __init__(self, d: Any, tokens: np.ndarray = PROMPT, *, on_demand: bool = True) -> None:
        self.link = d.link("fra/p0")
        remote = self.link.require_ready()
        layout = d.engine.layout
        self.buffer = np.zeros(layout.session_bytes(0, len(tokens)), dtype=np.uint8)
        self.sink = StagingMap(layout, 0, len(tokens), 8, self.buffer)
        self.receivers: list[Receiver] = []
        self.came: list[tuple[int, int]] = []
        request = SessionOpen(
            transfer_id="t", model=remote.model, tokens=tokens.astype("<i4").tobytes(),
            send_from=0, salt="", use_cache=True, quality="exact", codecs=("planes-zstd", "raw"),
            deadline_s=10, lease_s=5, engine_epoch=remote.engine_epoch, on_demand=on_demand,
        )  # fmt: skip
        self.work = asyncio.create_task(
            self.link.fetch(
                request,
                session=4711,
                epoch=1,
                staging=self.sink,
                target=OwnMemory(),
                deadline=Deadline.after(10),
                watch=self._watch,
            )
        )

    def _watch(self, receiver: Receiver) -> None:
        machine = receiver.machine
        decoded = machine.decoded

        def noted(arrival: Any, digest: bytes) -> bool:
            self.came.append((arrival.piece.chunk, arrival.piece.layer))
            return decoded(arrival, digest)

        machine.decoded = noted  # type: ignore[method-assign]
        self.receivers.append(receiver)

    @property
    def receiver(self) -> Receiver:
        return self.receivers[0]

    async def begun(self) -> None:
        await eventually(lambda: self.receivers and self.receiver.times.started_s > 0)

    async def answered(self) -> None:
        await eventually(lambda: not self.receiver.machine.expecting or self.work.done())


@pytest.fixture
async def pair(prefill_site: Any, decode_site: Any) -> Callable[..., Any]:
    async def start(**limits: float) -> tuple[Any, Any]:
        p = await prefill_site(limits=limits)
        d = await decode_site({"fra/p0": p}, limits=limits)
        await d.ready("fra/p0")
        return p, d

    return start


class TestOverGrpc(KvStreamContract):
    @pytest.fixture(autouse=True)
    async def _sites(self, pair: Any) -> None:
        self.p, self.d = await pair()

    async def carry(self, questions: list[Question] | None) -> Carried:
        sent: list[Any] = []
        end = self.p.agent._end
        self.p.agent._end = lambda served, reason: (
            sent.append(served.machine),
            end(served, reason),
        )
        pull = Pull(self.d, on_demand=questions is not None)
        await pull.begun()
        for question in questions or ():
            pull.receiver.want(*question)
            await pull.answered()
        await pull.work
        await self.p.clean()
        self.p.agent._end = end
        engine = self.p.engine
        expected = b"".join(
            engine.kv(PROMPT, extent.group, extent.layer)[
                :, extent.span.start : extent.span.end
            ].tobytes()
            for extent in engine.layout.extents(0, len(PROMPT), 8)
        )
        (machine,) = sent
        return Carried(
            pull.buffer.tobytes(),
            expected,
            summary(machine.ledger),
            summary(pull.receiver.machine.ledger),
            tuple(pull.came),
        )


async def test_p_keeps_what_nobody_has_asked_for_and_frees_it_with_the_session(pair: Any) -> None:
    p, d = await pair()
    pull = Pull(d)
    await pull.begun()
    await eventually(lambda: pull.receiver.machine.seal is not None)
    (served,) = p.agent.sessions.values()
    assert (served.machine.handed_bytes, served.machine.outstanding_bytes) == (0, 0)
    assert served.machine.retained_bytes > 0
    pull.work.cancel()
    await asyncio.gather(pull.work, return_exceptions=True)
    await p.clean()


async def test_only_silence_after_a_question_is_a_fault(pair: Any) -> None:
    p, d = await pair(progress_timeout_s=0.4, first_frame_timeout_s=0.4)
    p.engine.script.stop_before = (1, 0)
    pull = Pull(d)
    await pull.begun()
    await asyncio.sleep(1.0)
    assert not pull.work.done()
    pull.receiver.want(range(1))
    await pull.answered()
    assert {chunk for chunk, _ in pull.came} == {0}
    await asyncio.sleep(1.0)
    assert not pull.work.done()
    asked_s = time.monotonic()
    pull.receiver.want(range(1, 2))  # which P does not compute
    with pytest.raises(PrefillTimeout) as caught:
        await pull.work
    assert caught.value.phase == "progress"
    assert 0.3 < time.monotonic() - asked_s < 2.0
    p.engine.script.go.set()
    await p.clean()


async def test_what_was_asked_for_survives_a_cut(
    prefill_site: Any, decode_site: Any, stack: AsyncExitStack
) -> None:
    p = await prefill_site(engine={"script": PrefillScript()})
    link = await stack.enter_async_context(BendableLink(LinkShape()))
    d = await decode_site({"fra/p0": await link.forward("127.0.0.1", p.port)})
    await d.ready("fra/p0")
    p.engine.script.stop_before = (1, 0)
    pull = Pull(d)
    await pull.begun()
    pull.receiver.want(range(1, 3))  # not computed yet
    link.drop_connections()
    await eventually(lambda: pull.receiver.resumes == 1)
    p.engine.script.go.set()
    await pull.answered()
    assert {chunk for chunk, _ in pull.came} == {1, 2}
    pull.receiver.want()
    await pull.work
    assert pull.receiver.machine.ledger.whole
    await p.clean()


async def test_an_instance_that_cannot_is_asked_for_everything_at_once(pair: Any) -> None:
    p, d = await pair()
    link = d.link("fra/p0")
    assert Feature.ON_DEMAND in link.remote.features
    link.remote = replace(link.remote, features=Feature.NONE)
    pull = Pull(d)
    await pull.work
    assert not pull.receiver.machine.request.on_demand
    assert pull.receiver.machine.ledger.whole
    await p.clean()
