"""From a decision to signed transfer parameters, and the books that are kept until it is over."""

from __future__ import annotations

from msgspec import UNSET, Raw

from gateway.admission import RETRY_AFTER_S, FallbackBudget
from gateway.cluster_view import ClusterView
from gateway.records import RequestRecord
from prfaas.clock import Clock
from prfaas.errors import PrefillUnavailable
from prfaas.limits import Limits
from prfaas.settings import GatewaySettings
from prfaas.snapshot import Decision, Snapshot, Target
from prfaas.transfer import PARAMS_VERSION, PlanStep, Signer, TransferParams


class Dispatcher:
    """Signs plans and counts what was sent and granted until `prefill_over`; nothing to close."""

    def __init__(
        self,
        settings: GatewaySettings,
        limits: Limits,
        view: ClusterView,
        budget: FallbackBudget,
        clock: Clock,
    ) -> None:
        self._ttl_s = settings.transfer_ttl_s
        self._rejects = settings.on_failure == "reject"
        self._deadline_s = min(limits.transfer_timeout_s, limits.request_timeout_s)
        self._signer = Signer(settings.transfer_key.get_secret_value().encode())
        self._view = view
        self._budget = budget
        self._clock = clock

    def dispatch(self, record: RequestRecord, salt: str, tenant: str = "") -> Raw | None:
        """Account for a decided request; the parameters for D's agent, in JSON, where it is to be
        offloaded.

        Raises PrefillUnavailable where the policy insists on remote, no instance can take the
        request and `on_failure` forbids D.
        """
        decision, snapshot = record.decision, record.snapshot
        assert decision is not None
        assert snapshot is not None
        if not decision.plan:
            if decision.target is Target.REMOTE and self._rejects:
                raise PrefillUnavailable(
                    f"no prefill instance can take this request ({decision.reason.value}) and "
                    "on_failure is reject",
                    retry_after_s=RETRY_AFTER_S,
                )
            # A prefix that another request brings there just now is not computed twice.
            coming = max(0, record.recent_tokens - snapshot.local.matched_tokens)
            tokens = max(0, decision.uncached_tokens - coming)
            self._view.sent.add_local(record.key, snapshot.local.name, tokens, self._clock.now())
            return None
        record.transfer_id = record.key
        record.on_failure = self._on_failure(record.key, decision)
        self._count_sent(record.key, decision, snapshot)
        return self._signer.signed(self._params(record, decision, salt, tenant))

    def relayed(self, record: RequestRecord, params: TransferParams) -> None:
        """A trusted client decided and signed itself: only the books are kept."""
        assert record.decision is not None
        assert record.snapshot is not None
        record.transfer_id, record.on_failure = params.transfer_id, params.on_failure
        self._count_sent(params.transfer_id, record.decision, record.snapshot)

    def prefill_over(self, record: RequestRecord) -> None:
        """First token, outcome or end: nothing of this request is ahead of others any more."""
        self._view.sent.finish(record.transfer_id or record.key)
        self._budget.finish(record.key)

    def _on_failure(self, transfer_id: str, decision: Decision) -> str:
        if self._rejects:
            return "reject"
        granted = self._budget.grant(transfer_id, decision.uncached_tokens)
        return "local" if granted else "reject"

    def _params(
        self, record: RequestRecord, decision: Decision, salt: str, tenant: str
    ) -> TransferParams:
        return TransferParams(
            version=PARAMS_VERSION,
            transfer_id=record.transfer_id,
            plan=tuple([PlanStep(peer, instance) for peer, instance in decision.plan]),
            on_failure=record.on_failure,
            quality=record.kv_quality,
            deadline_s=self._deadline_s,
            salt=salt,
            expires=self._clock.wall() + self._ttl_s,
            tenant=tenant,
            traceparent=record.trace.traceparent if record.trace is not None else UNSET,
        )

    def _count_sent(self, key: str, decision: Decision, snapshot: Snapshot) -> None:
        peer, instance = decision.plan[0]
        engine, place = snapshot.local.name, f"{peer}/{instance}"
        self._view.breakers.sent_remote(engine, place)
        ratio = 1.0
        for remote in snapshot.remotes:
            if remote.instance == instance and remote.peer == peer:
                ratio = remote.link.wire_ratio
        raw_bytes = snapshot.token_bytes * decision.uncached_tokens
        self._view.sent.add_remote(
            key, engine, place, decision.uncached_tokens, raw_bytes, round(raw_bytes / ratio)
        )
