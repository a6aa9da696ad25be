"""vLLM's KV events over ZMQ: read in order, gaps replayed where vLLM keeps them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from prfaas.errors import ConfigError, ProtocolError
from remote_prefill.vllm_events import Batch, decode_batch

log = logging.getLogger(__name__)

REPLAY_TIMEOUT_S = 2.0
END_OF_REPLAY = (1 << 64) - 1
RECEIVE_QUEUE = 100_000


class EventStream:
    """Owns the sockets to one publisher; `close` ends them.

    `run` hands every batch to `on_batch`, and calls `on_gap` where batches are lost for good, at
    the start among others: whatever was known before is void then.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str,
        *,
        on_batch: Callable[[Batch], None],
        on_gap: Callable[[str], None],
    ) -> None:
        """Raises ConfigError where pyzmq is not installed or an endpoint is none."""
        try:
            import zmq
            import zmq.asyncio
        except ImportError as exc:
            raise ConfigError(
                "vLLM's KV events need pyzmq: pip install 'prfaas[vllm]', or set vllm.kv_events "
                "to nothing",
                field="kv_events",
            ) from exc
        self._zmq = zmq
        self._context = zmq.asyncio.Context()
        self._replay_endpoint = replay_endpoint
        self._on_batch = on_batch
        self._on_gap = on_gap
        self._next: int | None = None
        """Number of the next batch."""
        self._last_heard = -1
        """Number of the last batch that was published to us, rather than replayed."""
        self._replayed: dict[int, int] = {}
        """Hashes of replayed batches, which may be published to us as well."""
        self._socket = self._context.socket(zmq.SUB)
        self._socket.set(zmq.RCVHWM, RECEIVE_QUEUE)
        self._socket.set(zmq.SUBSCRIBE, b"")
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as exc:
            self.close()
            raise ConfigError(
                f"vllm.kv_events: {endpoint!r} is no endpoint: {exc}", field="kv_events"
            ) from exc

    def close(self) -> None:
        """Idempotent."""
        self._context.destroy(linger=0)

    async def run(self) -> None:
        """Until cancelled."""
        await self._begin("the feed begins")
        while True:
            parts = await self._socket.recv_multipart()
            if len(parts) != 3 or len(parts[1]) != 8:
                log.warning("a message that is not vLLM's came on its KV events")
                continue
            number = int.from_bytes(parts[1], "big")
            if number <= self._last_heard or not self._follows(number, parts[2]):
                await self._begin("vLLM has restarted")
            elif self._next is not None and number > self._next:
                await self._fill(self._next, number)
            self._last_heard = number
            if self._next is None or number >= self._next:
                self._take(number, parts[2])

    def _follows(self, number: int, payload: bytes) -> bool:
        """Whether a batch is news, or one that replay has brought before."""
        if self._next is None or number >= self._next:
            self._replayed.clear()
            return True
        return self._replayed.pop(number, None) == hash(payload)

    async def _begin(self, reason: str) -> None:
        """Nothing is known; what vLLM still has of its past is."""
        self._on_gap(reason)
        self._next, self._last_heard = None, -1
        self._take_all(await self._replay(0))

    async def _fill(self, first: int, until: int) -> None:
        """Batches [first, until) did not come: ask for them, or void what is known."""
        replayed = await self._replay(first)
        if not replayed or replayed[0][0] != first:
            self._on_gap(f"batches {first} to {until - 1} are lost")
            self._next = None
        self._take_all(replayed)

    def _take_all(self, replayed: list[tuple[int, bytes]]) -> None:
        self._replayed = {number: hash(payload) for number, payload in replayed}
        for number, payload in replayed:
            self._take(number, payload)

    def _take(self, number: int, payload: bytes) -> None:
        self._next = number + 1
        try:
            self._on_batch(decode_batch(payload))
        except ProtocolError as exc:
            log.warning("batch %d of vLLM's KV events: %s", number, exc.message)
            self._on_gap("a batch could not be read")

    async def _replay(self, first: int) -> list[tuple[int, bytes]]:
        """Batches from number `first` on that vLLM still has."""
        if not self._replay_endpoint:
            return []
        found: list[tuple[int, bytes]] = []
        socket: Any = self._context.socket(self._zmq.DEALER)
        try:
            socket.connect(self._replay_endpoint)
            async with asyncio.timeout(REPLAY_TIMEOUT_S):
                # As REQ would say it, which takes one answer only.
                await socket.send_multipart((b"", first.to_bytes(8, "big")))
                while True:
                    parts = await socket.recv_multipart()
                    number = int.from_bytes(parts[-2], "big") if len(parts) > 1 else END_OF_REPLAY
                    if number == END_OF_REPLAY:
                        return found
                    found.append((number, parts[-1]))
        except (TimeoutError, self._zmq.ZMQError) as exc:
            log.warning("vLLM's KV events were not replayed: %s", exc or "no answer")
            return []
        finally:
            socket.close(linger=0)
