"""An engine that replays a tape: real KvPort, real KV bytes, no model.

As a process (`python -m prfaas.testing.replayer`) it takes one JSON object a line on standard input
and answers each with one on standard output; it ends with its input:

    {"do": "fetch", "params": {...}, "tokens": 2000, "seed": 7}   -> a `Replayed`
    {"do": "counters"}                                            -> `ReplayCounters`
"""

from __future__ import annotations

import json
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import click
import numpy as np

from prfaas.errors import PrefillTimeout, ProtocolError
from prfaas.layout import chunk_spans
from prfaas.testing.kv_tape import KvTape, Tokens
from prfaas_connect.port.engine import EnginePort
from prfaas_connect.port.messages import (
    PORT_VERSION,
    Fetch,
    FetchDone,
    Hello,
    KvEvents,
    PortMessage,
    PrefillCancel,
    PrefillEnd,
    PrefillStart,
    Record,
    Release,
    RingFree,
    Stats,
    Welcome,
)

VOCAB_SIZE = 49152
MAX_TOKENS = 1 << 20
STATS_S = 0.25
CONNECT_TIMEOUT_S = 15.0
FETCH_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Replayed:
    """One fetch as its engine saw it; times are of the monotonic clock, all processes share it."""

    status: str
    reason: str
    message: str
    tokens: int
    raw_bytes: int
    """Staged; 0 where nothing was."""
    sent_s: float
    """Fetch sent."""
    done_s: float
    """FetchDone received."""
    exact: bool
    """Whether every staged byte is the tape's."""

    @property
    def elapsed_s(self) -> float:
        return self.done_s - self.sent_s


@dataclass(frozen=True, slots=True)
class ReplayCounters:
    """CPU of the process, the part of it that stands for an engine's own work, and exports."""

    process_cpu_s: float
    engine_cpu_s: float
    """Copying KV from the tape and comparing with it: a real engine does other things there."""
    exported_sessions: int
    exported_bytes: int
    export_s: float
    """From the first record of a session to its last, summed."""
    ring_wait_s: float
    """The part of it that passed while the ring was full."""


class ReplayEngine:
    """Owns its port and one prefill thread; `close` ends them.

    `fetch` blocks, one at a time. Both roles are offered: the numeric probe prefills at both ends.
    """

    def __init__(
        self,
        path: Path,
        tape: KvTape,
        *,
        chunk_tokens: int = 256,
        bytes_per_s: float | None = None,
    ) -> None:
        """`bytes_per_s`: raw KV made a second; None: as fast as the ring takes it."""
        self.tape = tape
        self.hello = Hello(
            version=PORT_VERSION,
            engine="replayer",
            roles=["prefill", "decode"],
            model="replay",
            layout=tape.layout.to_dict(),
            chunk_tokens=chunk_tokens,
            block_tokens=16,
            max_tokens=MAX_TOKENS,
            vocab_size=VOCAB_SIZE,
            model_identity=f"tape:{tape.digest}",
            config_digest="replay",
            tokenizer_digest="replay",
            ranks=[[0, max(g.kv_heads for g in tape.layout.groups)]],
            epoch=f"{time.time_ns():x}",
            paced=True,
        )
        self._bytes_per_s = bytes_per_s
        self._port = EnginePort(str(path), self.hello, self, reconnect_s=0.05)
        self._answers: queue.SimpleQueue[FetchDone] = queue.SimpleQueue()
        self._connected = threading.Event()
        self._work = threading.Condition()
        self._todo: deque[tuple[PrefillStart, Tokens]] = deque()
        self._cancelled: set[tuple[str, int]] = set()
        self._freed = threading.Event()
        self._closing = False
        self._fetches = 0
        self._engine_cpu_s = 0.0
        self._exported_sessions = 0
        self._exported_bytes = 0
        self._export_s = 0.0
        self._ring_wait_s = 0.0
        self._worker = threading.Thread(target=self._prefill_loop, name="replay", daemon=True)

    def start(self) -> None:
        """Raises PrefillTimeout where no agent listens."""
        self._worker.start()
        self._port.start()
        if not self._connected.wait(CONNECT_TIMEOUT_S):
            raise PrefillTimeout("no agent took the replayer", phase="connect")

    def close(self) -> None:
        """Disconnect and end the threads."""
        self._port.close()
        with self._work:
            self._closing = True
            self._work.notify_all()
        self._freed.set()
        if self._worker.is_alive():
            self._worker.join(5)

    def counters(self) -> ReplayCounters:
        """Since the start."""
        return ReplayCounters(
            process_cpu_s=time.process_time(),
            engine_cpu_s=self._engine_cpu_s,
            exported_sessions=self._exported_sessions,
            exported_bytes=self._exported_bytes,
            export_s=self._export_s,
            ring_wait_s=self._ring_wait_s,
        )

    # --- decode role ---

    def fetch(self, params: dict[str, Any], tokens: int, seed: int) -> Replayed:
        """Have KV of `tokens` tokens brought for a seeded prompt, compare it, release it.

        `params` is the signed `kv_transfer_params`. Raises PrefillTimeout, ProtocolError.
        """
        prompt = seeded_prompt(tokens + 1, seed)
        self._fetches += 1
        session = f"r{self._fetches}"
        message = Fetch(session, params, 0, tokens, tokens)
        blob = prompt.astype("<i4").tobytes()
        sent_s = time.monotonic()
        if not self._port.send(message, blob):
            raise ProtocolError("the replayer is not connected to an agent")
        try:
            done = self._answers.get(timeout=FETCH_TIMEOUT_S)
        except queue.Empty:
            raise PrefillTimeout("the agent did not answer a fetch", phase="total") from None
        done_s = time.monotonic()
        if done.session != session:
            raise ProtocolError(f"the agent answered {done.session!r}, not {session!r}")
        raw_bytes, exact = 0, False
        if done.status in ("staged", "partial"):
            raw_bytes = self.tape.layout.session_bytes(0, done.token_end)
            exact = self._staged_is_exact(done, prompt)
            self._port.send(Release(session, "imported", done.token_end))
        return Replayed(
            status=done.status,
            reason=done.reason,
            message=done.message,
            tokens=done.token_end,
            raw_bytes=raw_bytes,
            sent_s=sent_s,
            done_s=done_s,
            exact=exact,
        )

    def _staged_is_exact(self, done: FetchDone, prompt: Tokens) -> bool:
        began = time.thread_time()
        start = self.tape.start_of(prompt[:-1])  # P never sees the last token
        exact = all(
            self.tape.equals(
                self._port.staging(done.staging_offset + extent.offset, extent.nbytes),
                start,
                extent.group,
                extent.layer,
                extent.span.start,
                extent.span.end,
            )
            for extent in self.tape.layout.extents(0, done.token_end, done.chunk_tokens)
        )
        self._engine_cpu_s += time.thread_time() - began
        return exact

    # --- EngineHandler, on the port's reader thread ---

    def on_connected(self, welcome: Welcome) -> None:
        self._port.send(KvEvents(self.hello.epoch, 1, cleared=True))
        self._send_stats()
        self._connected.set()

    def on_disconnected(self, reason: str) -> None:
        with self._work:
            self._todo.clear()
        self._connected.clear()
        self._freed.set()

    def on_message(self, message: PortMessage, blob: bytes) -> None:
        if isinstance(message, RingFree):
            self._freed.set()
        elif isinstance(message, FetchDone):
            self._answers.put(message)
        elif isinstance(message, PrefillStart):
            tokens = np.frombuffer(blob, dtype="<i4").astype(np.int32)
            with self._work:
                self._todo.append((message, tokens))
                self._work.notify_all()
        elif isinstance(message, PrefillCancel):
            with self._work:
                self._cancelled.add((message.session, message.epoch))
            self._freed.set()

    # --- prefill role, on a thread of its own ---

    def _prefill_loop(self) -> None:
        while True:
            with self._work:
                self._work.wait_for(lambda: self._todo or self._closing, STATS_S)
                if self._closing:
                    return
                item = self._todo.popleft() if self._todo else None
            if item is not None:
                end = self._export(*item)
                with self._work:
                    self._cancelled.discard((end.session, end.epoch))
                self._port.send(end)
            if self._connected.is_set():
                self._send_stats()

    def _export(self, start: PrefillStart, tokens: Tokens) -> PrefillEnd:
        """All records of one session, at the pace asked for."""
        layout, tape = self.tape.layout, self.tape
        order = sorted((layer, gi) for gi, g in enumerate(layout.groups) for layer in g.layers)
        place = tape.start_of(tokens)
        records, made_bytes = 0, 0
        began_s = time.monotonic()
        for span in chunk_spans(start.send_from, len(tokens), self.hello.chunk_tokens):
            for layer, gi in order:
                group = layout.groups[gi]
                nbytes = group.token_bytes * span.tokens
                made_bytes += nbytes
                self._keep_pace(began_s, made_bytes)
                offset = self._reserve(start, nbytes)
                if offset is None:
                    return PrefillEnd(start.session, start.epoch, "cancelled", records)
                cpu_s = time.thread_time()
                ring = self._port.ring(offset, nbytes)
                tape.copy(ring, place, gi, layer, span.start, span.end)
                self._engine_cpu_s += time.thread_time() - cpu_s
                heads = (0, group.kv_heads)
                where = (span.index, gi, layer, span.start, span.end, *heads, offset, nbytes)
                self._port.send(Record(start.session, start.epoch, *where))
                records += 1
        took_s = time.monotonic() - began_s
        self._export_s += took_s
        self._exported_sessions += 1
        self._exported_bytes += made_bytes
        computed = len(tokens) - start.send_from
        return PrefillEnd(
            start.session,
            start.epoch,
            "done",
            records,
            cached_tokens=start.send_from,
            computed_tokens=computed,
            compute_s=took_s,
        )

    def _keep_pace(self, began_s: float, made_bytes: int) -> None:
        if self._bytes_per_s is not None:
            time.sleep(max(0.0, began_s + made_bytes / self._bytes_per_s - time.monotonic()))

    def _reserve(self, start: PrefillStart, nbytes: int) -> int | None:
        """Ring space, waiting for it; None once the session is cancelled or the port is gone."""
        waited_from_s: float | None = None
        try:
            while not self._gone(start):
                self._freed.clear()
                offset = self._port.ring_reserve(nbytes)
                if offset is not None:
                    return offset
                if waited_from_s is None:
                    waited_from_s = time.monotonic()
                self._freed.wait(STATS_S)
            return None
        finally:
            if waited_from_s is not None:
                self._ring_wait_s += time.monotonic() - waited_from_s

    def _gone(self, start: PrefillStart) -> bool:
        with self._work:
            cancelled = (start.session, start.epoch) in self._cancelled
        return cancelled or self._closing or not self._connected.is_set()

    def _send_stats(self) -> None:
        self._port.send(
            Stats(
                queue_tokens=0,
                waiting=0,
                running=0,
                context_tokens=0,
                free_blocks=MAX_TOKENS // 16,
                total_blocks=MAX_TOKENS // 16,
                decode_step_s=0.0,
                prefill_base_s=0.0,
                prefill_token_s=0.0,
                prefill_token_context_s=0.0,
            )
        )


def seeded_prompt(tokens: int, seed: int) -> Tokens:
    """A prompt that is the same for the same seed."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, VOCAB_SIZE, tokens, dtype=np.int32)


def serve(engine: ReplayEngine, commands: IO[str], answer: Callable[[str], None]) -> None:
    """Carry out commands until there are no more. Raises ProtocolError for an unknown one."""
    for line in commands:
        command = json.loads(line)
        match command.pop("do", None):
            case "fetch":
                answer(json.dumps(asdict(engine.fetch(**command))))
            case "counters":
                answer(json.dumps(asdict(engine.counters())))
            case other:
                raise ProtocolError(f"the replayer cannot {other!r}")


@click.command()
@click.option("--socket", type=click.Path(path_type=Path), required=True, help="Its agent's.")
@click.option("--tape", type=click.Path(path_type=Path), required=True, help="What to replay.")
@click.option("--chunk-tokens", type=click.IntRange(1), default=256, show_default=True)
@click.option("--bytes-per-s", type=float, help="Raw KV made a second; default: no limit.")
def main(socket: Path, tape: Path, chunk_tokens: int, bytes_per_s: float | None) -> None:
    """Replay a tape for the agent at SOCKET; commands come on standard input."""
    engine = ReplayEngine(
        socket, KvTape.load(tape), chunk_tokens=chunk_tokens, bytes_per_s=bytes_per_s
    )
    try:
        engine.start()
        serve(engine, sys.stdin, lambda text: print(text, flush=True))
    finally:
        engine.close()


if __name__ == "__main__":
    main()
