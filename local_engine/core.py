"""The engine's heart: commands in, one step at a time, events out. No threads and no waiting."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator

from local_engine.admission import Admission
from local_engine.answer import Answer
from local_engine.kv.blocks import BlockManager
from local_engine.kv.events import CacheEventLog
from local_engine.kv.pool import KvPool
from local_engine.kv.state_book import StateBook
from local_engine.kv_encode import KvEncoder
from local_engine.kv_export import Export, ExportLimits, ExportRefused, KvExporter, invalid
from local_engine.kv_import import KvImporter
from local_engine.port import KvPort
from local_engine.profile import MovingMean, PrefillFit
from local_engine.requests import EngineStats, FinishReason, TokenLogprobs
from local_engine.runner import DecodeRow, LayerDone, ModelRunner, PrefillChunk
from local_engine.scheduler import Scheduler
from local_engine.sequence import Phase, Sequence
from local_engine.stream import TokenStream
from local_engine.warm_up import measure, warm_up
from prfaas.clock import Clock
from prfaas.errors import Cancelled, Overloaded, PrfaasError
from prfaas.hashing import BlockHash
from prfaas.limits import Limits
from prfaas.settings import EngineSettings
from prfaas_connect.device.staging import Staging
from prfaas_connect.port.messages import (
    FetchDone,
    PortMessage,
    PrefillCancel,
    PrefillEnd,
    PrefillStart,
    PrepareFor,
)

IDLE_MEASURE_SPREAD = 32
"""An engine that stays idle times itself at most so many times less often than at first."""


class EngineCore:
    """Owns scheduler, importer, exporter and counters; used by one thread, which calls `step`.

    `touched` collects streams that got events; whoever calls `step` wakes them and empties it.
    """

    def __init__(
        self,
        runner: ModelRunner,
        pool: KvPool,
        settings: EngineSettings,
        limits: Limits,
        admission: Admission,
        *,
        vocab_size: int,
        max_context: int,
        epoch: str,
        clock: Clock,
    ) -> None:
        self.draining = False
        self.touched: list[TokenStream] = []
        self.orders = itertools.count()
        self.events = CacheEventLog(epoch)
        self._runner = runner
        self._pool = pool
        self._settings = settings
        self._limits = limits
        self._admission = admission
        self._epoch = epoch
        self._clock = clock
        self._states = StateBook(pool.states, self.events) if pool.states is not None else None
        self._blocks = BlockManager(pool.blocks, pool.block_tokens, self._states or self.events)
        if self._states is not None:
            self._states.attach(self._blocks)
        self._scheduler = Scheduler(
            self._blocks,
            chunk_tokens=settings.chunk_tokens,
            max_batch=settings.max_batch,
            on_preempt=self._preempted,
            on_admit=self._begin_export,
            states=self._states,
        )
        self._export_limits = ExportLimits(
            vocab_size=vocab_size,
            max_tokens=min(max_context, pool.blocks * pool.block_tokens),
            chunk_tokens=settings.chunk_tokens,
        )
        self._port: KvPort | None = None
        self._importer: KvImporter | None = None
        self._exporter: KvExporter | None = None
        self._answers: dict[str, Answer] = {}
        self._exports: dict[tuple[str, int], Export] = {}
        self._slow: set[Answer] = set()
        self._chunk_gave_way = False
        self._timed_at = clock.now()
        self._measured_idle = 0
        self._fit = PrefillFit(settings.chunk_tokens)
        self._decode_step = MovingMean()
        self._finished: Counter[str] = Counter()
        self._outcomes: Counter[str] = Counter()
        self._prefix_query_tokens = 0
        self._prefix_hit_tokens = 0
        self._prompt_tokens = 0
        self._generated_tokens = 0
        self._computed_tokens = 0

    def attach(
        self, port: KvPort, staging: Staging | None = None, encoders: Iterable[KvEncoder] = ()
    ) -> None:
        """Exchange KV through `port`; before the first step. `staging`: of a pool that is on an
        accelerator; `encoders`: what can be prepared there.
        """
        self._port = port
        self._importer = KvImporter(
            self._pool, port, self._scheduler, self._clock, self._epoch, self._outcomes
        )
        self._exporter = KvExporter(
            self._pool, port, self._states, staging=staging, encoders=encoders
        )

    # --- commands -------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Measure the prefill curve and the decode step; leaves cache and counters as they are."""
        warm_up(
            self._runner, self._pool, self._blocks, self._fit, self._decode_step,
            self._settings.chunk_tokens, self._clock,
        )  # fmt: skip
        self._timed_at = self._clock.now()

    def measure_if_due(self) -> bool:
        """An idle engine times itself anew, less and less often while nothing comes."""
        first_s = self._settings.idle_measure_s
        if not first_s or not self.idle:
            return False
        due_s = min(first_s * 2**self._measured_idle, first_s * IDLE_MEASURE_SPREAD)
        if self._clock.now() - self._timed_at < due_s:
            return False
        measure(
            self._runner, self._pool, self._blocks, self._fit, self._decode_step,
            self._settings.chunk_tokens, self._clock,
        )  # fmt: skip
        self._timed_at = self._clock.now()
        self._measured_idle += 1
        return True

    def add(self, answer: Answer) -> None:
        """Start to work on a request."""
        self._answers[answer.name] = answer
        if answer.request.kv_transfer_params is None:
            self._scheduler.enqueue(answer)
        elif self._importer is not None:
            self._importer.fetch(answer)
        else:
            self._scheduler.enqueue(answer)
            answer.kv_status, answer.kv_reason = "local", "no_agent"
            self._outcomes["no_agent"] += 1

    def cancel(self, request_id: str) -> None:
        """End a request in whatever phase it is; unknown ids are ignored."""
        answer = self._answers.get(request_id)
        if answer is not None:
            self.fail(answer, Cancelled("the request was cancelled"))

    def fail(self, answer: Answer, error: PrfaasError) -> None:
        """End a live request with an error, and free everything it holds."""
        if self._importer is not None:
            self._importer.cancel(answer)
        self._leave(answer, "abort" if isinstance(error, Cancelled) else "error")
        self._push(answer, (), error=error)

    def fail_all(self, error: PrfaasError) -> None:
        """End every request and every export."""
        for answer in list(self._answers.values()):
            self.fail(answer, error)
        for export in list(self._exports.values()):
            self._end_export(export, "failed", error.message)

    def handle(self, message: PortMessage, blob: bytes) -> None:
        """A message of the agent."""
        match message:
            case FetchDone():
                self._fetch_done(message)
            case PrefillStart():
                self._start_export(message, blob)
            case PrepareFor():
                asked = self._exports.get((message.session, message.epoch))
                if asked is not None:
                    asked.codec = message.codec
            case PrefillCancel():
                export = self._exports.get((message.session, message.epoch))
                if export is not None:
                    self._end_export(export, "cancelled")

    def suspend_transfers(self) -> None:
        """The agent is gone and `disconnected` follows; callable from any thread."""
        if self._importer is not None:
            self._importer.suspended = True
        if self._exporter is not None:
            self._exporter.suspended = True

    def disconnected(self) -> None:
        """The agent is gone: requests that waited for it go on alone, exports are void."""
        if self._importer is not None:
            self._importer.disconnected()
            self._importer.suspended = False
        if self._exporter is not None:
            self._exporter.drop_all()
            self._exporter.suspended = False
        for export in self._exports.values():
            self._scheduler.finish(export)
        self._exports.clear()

    def clear_cache(self) -> None:
        """Forget all cached KV."""
        self._scheduler.clear_cache()

    def cached_names(self) -> list[BlockHash]:
        """Hashes of all blocks that a prompt may match."""
        return self._blocks.names()

    def check(self) -> None:
        """Raise AssertionError unless all books balance."""
        self._scheduler.check()
        live: set[Sequence] = {*self._answers.values(), *self._exports.values()}
        if live != set(self._scheduler.live()):
            raise AssertionError(f"engine and scheduler disagree on what is live: {live}")
        if self._importer is not None:
            self._importer.check()
        if self._exporter is not None:
            self._exporter.check()

    def live(self) -> Iterator[Sequence]:
        """Every sequence that is not done, for inspection."""
        return self._scheduler.live()

    @property
    def copying(self) -> bool:
        """KV is on its way from an accelerator: look again soon."""
        return self._exporter is not None and self._exporter.copying

    @property
    def idle(self) -> bool:
        """Nothing is live."""
        return self._scheduler.idle

    # --- one step -------------------------------------------------------------------------------

    def step(self) -> bool:
        """Bounded imports, at most one prefill chunk, one decode step. False: nothing to do now."""
        self._watch_slow_clients()
        budget = self._settings.import_bytes_per_step
        worked = self._importer.step(budget) if self._importer is not None else False
        # A request whose KV has just been imported needs one row, not another's chunk first. Never
        # twice running, so that imports do not starve prefill.
        self._chunk_gave_way = not self._chunk_gave_way and self._first_token_waits()
        if self._chunk_gave_way:
            return self._decode() or worked
        worked |= self._prefill()
        if self._exporter is not None:
            self._exporter.drain(budget)
            self._finish_exports()
        return self._decode() or worked

    def _prefill(self) -> bool:
        found = self._scheduler.next_prefill()
        if found is None:
            return False
        seq, end = found
        on_layer = self._layer_hook(seq, end)
        started = self._clock.now()
        chunk = PrefillChunk(seq.tokens[seq.computed : end], seq.computed, seq.table, seq.state)
        self._runner.prefill_chunk(chunk, on_layer)
        now = self._clock.now()
        self._fit.observe(len(chunk.token_ids), chunk.start, now - started)
        self._timed_at, self._measured_idle = now, 0
        self._computed_tokens += len(chunk.token_ids)
        if isinstance(seq, Answer):
            seq.prefilled(started, now)
        elif isinstance(seq, Export):
            seq.computed_at = now
        self._scheduler.computed(seq, end)
        return True

    def _first_token_waits(self) -> bool:
        batch = self._scheduler.queue(Phase.DECODING)[: self._settings.max_batch]
        return any(isinstance(seq, Answer) and seq.first_token_at is None for seq in batch)

    def _decode(self) -> bool:
        batch = [seq for seq in self._scheduler.next_batch() if isinstance(seq, Answer)]
        if not batch:
            return False
        rows = [
            DecodeRow(seq.tokens[-1], len(seq.tokens) - 1, seq.table, seq.next_draw(), seq.state)
            for seq in batch
        ]
        started = self._clock.now()
        drawn = self._runner.decode(rows)
        now = self._clock.now()
        self._decode_step.observe(now - started)
        self._generated_tokens += len(drawn)
        for answer, one in zip(batch, drawn, strict=True):
            if answer.first_token_at is None:
                answer.started(started)
                answer.first_token_at = now
                self._admission.started(answer.name)
                self._count_prompt(answer.prompt_tokens, answer.cached_tokens, answer)
            self._scheduler.decoded(answer, one.token_id)
            reason = answer.finish_reason()
            if reason is not None:
                self._leave(answer, reason.value)
            logprobs = () if one.logprobs is None else (one.logprobs,)
            self._push(answer, (one.token_id,), reason, logprobs=logprobs)
        return True

    def _count_prompt(self, tokens: int, cached: int, answer: Answer | None = None) -> None:
        self._prompt_tokens += tokens
        self._prefix_query_tokens += tokens
        self._prefix_hit_tokens += cached - (answer.imported_tokens if answer else 0)

    # --- requests -------------------------------------------------------------------------------

    def _push(
        self,
        answer: Answer,
        token_ids: tuple[int, ...],
        reason: FinishReason | None = None,
        error: PrfaasError | None = None,
        logprobs: tuple[TokenLogprobs, ...] = (),
    ) -> None:
        answer.stream.push(answer.event(token_ids, reason, error, logprobs))
        self.touched.append(answer.stream)
        if answer.stream.full and answer.phase is not Phase.DONE:
            answer.paused = True
            self._slow.add(answer)
            self._admission.paused(answer.name)

    def _leave(self, answer: Answer, label: str) -> None:
        self._scheduler.finish(answer)
        self._slow.discard(answer)
        del self._answers[answer.name]
        self._finished[label] += 1
        self._admission.leave(answer.name)

    def _watch_slow_clients(self) -> None:
        for answer in list(self._slow):
            if not answer.stream.full:
                answer.paused = False
                self._slow.discard(answer)
                self._admission.started(answer.name)
            elif self._clock.now() - answer.stream.read_at > self._limits.slow_client_timeout_s:
                seconds = self._limits.slow_client_timeout_s
                self.fail(answer, Cancelled(f"the client read nothing for {seconds:g} s"))

    def _preempted(self, seq: Sequence, before: Phase) -> None:
        if isinstance(seq, Answer):
            if self._importer is not None:
                self._importer.preempted(seq, before)
            if seq.generated == 0:
                seq.imported_tokens = 0

    # --- agent ----------------------------------------------------------------------------------

    def _fetch_done(self, message: FetchDone) -> None:
        assert self._importer is not None
        answer = self._importer.answer_of(message.session)
        error = self._importer.done(message)
        if answer is not None and error is not None:
            self.fail(answer, error)

    def _start_export(self, start: PrefillStart, blob: bytes) -> None:
        assert self._exporter is not None
        assert self._port is not None
        try:
            self._check_export(start)
            export = self._exporter.open(
                start,
                blob,
                next(self.orders),
                self._export_limits,
                shares=start.use_cache and self._settings.prefix_cache,
                now=self._clock.now(),
            )
        except ExportRefused as refusal:
            self._port.send(PrefillEnd(start.session, start.epoch, "failed", reason=str(refusal)))
            return
        self._exports[export.key] = export
        self._scheduler.enqueue(export)

    def _check_export(self, start: PrefillStart) -> None:
        # The numeric probe, which uses no cache, is every engine's to answer.
        if start.use_cache and "prefill" not in self._settings.roles:
            raise invalid("this engine has no prefill role")
        if (start.session, start.epoch) in self._exports:
            raise invalid("the session exists already")
        if self.draining:
            raise ExportRefused("draining")
        if len(self._exports) >= self._limits.engine_max_waiting:
            raise ExportRefused(Overloaded.kind)

    def _begin_export(self, seq: Sequence) -> None:
        """It has just got its blocks, from the prefix cache as far as that has them."""
        if isinstance(seq, Export):
            assert self._exporter is not None
            self._exporter.begin(seq, self._clock.now())
            self._count_prompt(seq.prompt_tokens, seq.cached_tokens)

    def _layer_hook(self, seq: Sequence, end: int) -> LayerDone | None:
        """What an export does as soon as a layer of its chunk up to `end` is there."""
        exporter = self._exporter
        if exporter is None or not isinstance(seq, Export):
            return None
        return lambda layer: exporter.layer_done(seq, end, layer)

    def _finish_exports(self) -> None:
        for seq in list(self._scheduler.queue(Phase.DRAINING)):
            if isinstance(seq, Export) and seq.records_sent == seq.records:
                self._end_export(seq, "done")

    def _end_export(self, export: Export, status: str, reason: str = "") -> None:
        assert self._exporter is not None
        assert self._port is not None
        self._exporter.drop(export)
        last = export.end(status, reason)
        self._scheduler.finish(export)
        del self._exports[export.key]
        self._port.send(last)

    # --- stats ----------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """State and counters now."""
        queue, curve = self._scheduler.queue, self._fit.curve
        early = (Phase.WAITING, Phase.REMOTE, Phase.STAGED, Phase.IMPORTING)
        decoding = [seq for seq in queue(Phase.DECODING) if not seq.paused]
        batch = decoding[: self._settings.max_batch]
        importer, exporter = self._importer, self._exporter
        return EngineStats(
            waiting=sum(len(queue(phase)) for phase in early) + len(decoding) - len(batch),
            waiting_kv=sum(len(queue(phase)) for phase in early[1:]),
            running=len(batch),
            exporting=len(self._exports),
            queue_tokens=sum(seq.left_to_compute for seq in queue(Phase.WAITING)),
            context_tokens=sum(len(seq.tokens) for seq in batch),
            free_blocks=self._blocks.available,
            cached_blocks=self._blocks.cached,
            total_blocks=self._blocks.total,
            free_states=self._states.available if self._states is not None else 0,
            kept_states=self._states.kept if self._states is not None else 0,
            total_states=self._states.total if self._states is not None else 0,
            block_tokens=self._blocks.block_tokens,
            decode_step_s=self._decode_step.mean_s,
            prefill_base_s=curve.base_s,
            prefill_token_s=curve.token_s,
            prefill_token_context_s=curve.token_context_s,
            draining=self.draining,
            port_connected=self._port is not None and self._port.connected,
            requests_finished=dict(self._finished),
            preemptions=self._scheduler.preemptions,
            prefix_query_tokens=self._prefix_query_tokens,
            prefix_hit_tokens=self._prefix_hit_tokens,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            imported_tokens=importer.imported_tokens if importer else 0,
            exported_tokens=exporter.sent_tokens if exporter else 0,
            computed_tokens=self._computed_tokens,
            kv_outcomes=dict(self._outcomes),
        )
