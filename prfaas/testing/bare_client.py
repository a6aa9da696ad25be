"""A client of P's service without an agent: one session and one lane over real gRPC."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import numpy as np
import numpy.typing as npt

from prfaas.codecs import default_codecs
from prfaas.frames import Frame, FrameType, parse_all
from prfaas.ledger import piece_digest
from prfaas.placement import StagingMap
from prfaas.receive_session import ReceiveSession, ReceiveState
from prfaas.rpc import convert
from prfaas.rpc.v1 import prefill_pb2 as pb
from prfaas.session_messages import LaneAttach, SessionOpen
from prfaas.testing.scripted_port import SCRIPTED_LAYOUT, ScriptedEngine

CODECS = default_codecs()
CREDIT = 1 << 22
_SERVICE = pb.DESCRIPTOR.services_by_name["Prefill"].full_name
SESSION = f"/{_SERVICE}/Session"
DATA = f"/{_SERVICE}/Data"


class BareClient:
    """A bare client of one session and one lane, driving the receive machine."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        link: bytes,
        tokens: npt.NDArray[np.int32],
        *,
        session: int = 77,
        **changes: Any,
    ) -> None:
        request = SessionOpen(
            transfer_id="t",
            model="scripted-model",
            tokens=tokens.astype("<i4").tobytes(),
            send_from=0,
            salt="",
            use_cache=True,
            quality="exact",
            codecs=CODECS.names,
            deadline_s=20,
            lease_s=10,
            engine_epoch="epoch-1",
            link=link,
            credit_bytes=CREDIT,
        )
        request = replace(request, **changes)
        self.tokens = tokens
        self.machine = ReceiveSession(
            session=session,
            epoch=1,
            request=request,
            layout=SCRIPTED_LAYOUT,
            codecs=CODECS,
            chunk_tokens=8,
        )
        nbytes = SCRIPTED_LAYOUT.session_bytes(request.send_from, max(len(tokens), 1))
        self.staging = np.zeros(nbytes, dtype=np.uint8)
        self.frames: list[Frame] = []
        self.channel = channel
        self.call = self.channel.stream_stream(SESSION)(timeout=20)
        self.lane: Any = None
        self._messages: asyncio.Queue[object] = asyncio.Queue()
        self._readers: list[asyncio.Task[None]] = []

    async def open(self) -> BareClient:
        await self.attach()
        await self.call.write(self.machine.open().serialize())
        self._readers.append(asyncio.create_task(self._read(self.call)))
        return self

    async def attach(self, number: int = 0) -> None:
        self.lane = self.channel.stream_stream(DATA)(timeout=20)
        attach = convert.attach_to_bytes(LaneAttach(self.machine.request.link, number))
        await self.lane.write(Frame(FrameType.ATTACH, 0, payload=attach).serialize())
        await self.lane.read()
        self._readers.append(asyncio.create_task(self._read(self.lane)))

    async def resume(self) -> None:
        """Another control stream, after `call` has ended."""
        self.call = self.channel.stream_stream(SESSION)(timeout=20)
        await self.call.write(self.machine.resume((0,), 1).serialize())
        self._readers.append(asyncio.create_task(self._read(self.call)))

    async def _read(self, call: Any) -> None:
        try:
            while isinstance(data := await call.read(), bytes):
                self._messages.put_nowait(data)
        except (grpc.RpcError, asyncio.CancelledError):
            pass
        if call is self.call:
            self._messages.put_nowait(None)

    async def ack(self) -> None:
        await self.call.write(self.machine.ack(0.0, (0,), 1).serialize())

    async def cancel(self) -> None:
        await self.call.write(self.machine.cancel().serialize())

    async def step(self) -> bool:
        """Take one message; False at the end of the control stream."""
        data = await self._messages.get()
        if not isinstance(data, bytes):
            return False
        ledger = self.machine.ledger
        staging = StagingMap(SCRIPTED_LAYOUT, ledger.start, ledger.end, 8, self.staging)
        for frame in parse_all(data):
            self.frames.append(frame)
            arrival = self.machine.receive(frame)
            if arrival is not None:
                assert frame.intact
                raw = np.empty(frame.raw_bytes, dtype=np.uint8)
                CODECS.by_id(frame.codec).decode_into(memoryview(frame.payload), raw, 2)
                staging.scatter(arrival.piece, raw)
                self.machine.decoded(arrival, piece_digest(raw))
        if self.machine.state is ReceiveState.COMPLETE:
            await self.ack()
        return True

    async def until(self, frame_type: FrameType) -> None:
        while not any(f.type is frame_type for f in self.frames):
            assert await self.step()

    async def run(self) -> BareClient:
        """Open and take everything. Raises what an ERROR frame carries."""
        return await (await self.open()).rest()

    async def rest(self) -> BareClient:
        """Everything that still comes."""
        async with asyncio.timeout(10):
            more = True
            while more:
                more = await self.step()
        self.lane.cancel()
        return self

    def staged_is_right(self, engine: ScriptedEngine) -> bool:
        ledger = self.machine.ledger
        for extent in SCRIPTED_LAYOUT.extents(ledger.start, ledger.watermark, 8):
            kv = engine.kv(self.tokens, extent.group, extent.layer)
            rows = kv[:, extent.span.start : extent.span.end]
            found = self.staging[extent.offset : extent.offset + extent.nbytes]
            if found.tobytes() != rows.tobytes():
                return False
        return True
