"""May this fetch be carried out? `kv_transfer_params` parsed, verified and used once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prfaas.codecs import Quality
from prfaas.errors import InvalidRequest, Unauthorized
from prfaas.transfer import SeenTransfers, TransferParams, parse, verify
from remote_prefill.peer_link import PeerLink
from remote_prefill.peer_pool import PeerPool


@dataclass(frozen=True, slots=True)
class Admission:
    """The parameters and the links of their plan, or why nobody is dialled.

    `params` is there only where a gateway's key signed them; the rest of the world gets `local`.
    """

    reason: str = ""
    """Empty: admitted. Else a stable word."""
    message: str = ""
    params: TransferParams | None = None
    links: list[PeerLink] = field(default_factory=list)
    replay: bool = False
    """The transfer id was used before: its outcome belongs to the first use."""

    @property
    def rejects(self) -> bool:
        """Whether the gateway did not grant a local prefill."""
        return self.params is not None and self.params.on_failure == "reject"


@dataclass(slots=True)
class Admitter:
    """Judges fetches; keeps the ids seen."""

    keys: Sequence[bytes]
    pool: PeerPool
    seen: SeenTransfers = field(default_factory=SeenTransfers)

    def judge(self, data: Mapping[str, Any], now: float) -> Admission:
        """Pure but for the id it claims; `now` in Unix seconds."""
        try:
            params = parse(data)
        except InvalidRequest as exc:
            return Admission("invalid_request", exc.message)
        try:
            verify(params, self.keys, now=params.expires)  # the signature alone
        except Unauthorized as exc:
            return Admission("unauthorized", exc.message)
        if now > params.expires:
            return Admission("expired", "kv_transfer_params: expired", params)
        if not self.seen.claim(params.transfer_id, params.expires, now):
            text = f"transfer id {params.transfer_id!r} was used before"
            return Admission("replayed", text, params, replay=True)
        if params.quality not in list(Quality):
            return Admission("unsupported_quality", f"quality {params.quality!r}", params)
        if params.deadline_s <= 0:
            return Admission("invalid_request", "deadline_s must be positive", params)
        if not params.plan:
            return Admission("no_plan", "the plan names no instance", params)
        try:
            return Admission(params=params, links=self.pool.find(params.plan))
        except InvalidRequest as exc:
            return Admission("unknown_peer", exc.message, params)
