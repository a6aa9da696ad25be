"""KV out of the engine beside this agent, as a source."""

from __future__ import annotations

from prfaas.errors import BY_KIND, EngineUnavailable, PrfaasError, ProtocolError, from_kind
from prfaas.session_messages import PrefillReport, SessionOpen
from prfaas_connect.port.messages import PrefillEnd
from remote_prefill.exports import Export, ExportHub, RecordView


class EngineSource:
    """A `KvSource` of one prefill; owns the export, which `cancel` ends."""

    def __init__(self, export: Export) -> None:
        self._export = export
        self._records = 0

    @staticmethod
    def start(hub: ExportHub, request: SessionOpen, epoch: int) -> EngineSource:
        """Have the engine prefill. Raises EngineUnavailable."""
        return EngineSource(
            hub.start(
                request.tokens,
                epoch=epoch,
                send_from=request.send_from,
                salt=request.salt,
                use_cache=request.use_cache,
            )
        )

    async def next(self) -> RecordView | PrefillReport:
        """Raises EngineUnavailable where the engine has left, what it ended the prefill with, and
        ProtocolError where records are missing.
        """
        event = await self._export.next()
        if isinstance(event, RecordView):
            self._records += 1
            return event
        if event.status != "done":
            raise _engine_error(event)
        if event.records != self._records:
            raise ProtocolError(f"the engine counts {event.records} records, {self._records} came")
        return PrefillReport(
            cached_tokens=event.cached_tokens,
            computed_tokens=event.computed_tokens,
            queue_s=event.queue_s,
            compute_s=event.compute_s,
        )

    def prepare_for(self, codec: str) -> None:
        """Records may come prepared for this codec from now on."""
        self._export.prepare_for(codec)

    def cancel(self) -> None:
        self._export.cancel()


def _engine_error(end: PrefillEnd) -> PrfaasError:
    """Why the engine did not finish: its reason where that is one of our kinds."""
    message = f"the prefill engine ended the session: {end.status} {end.reason}".rstrip()
    kind = end.reason.partition(":")[0]
    if kind in BY_KIND:
        return from_kind(kind, message)
    return EngineUnavailable(message)
