"""What a request passes before anything is done for it: its key, its tenant's limits, its turn."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import msgspec

from gateway.quality import quality_of
from gateway.records import RequestRecord
from gateway.relay import Relayed, WholeAnswer
from gateway.tenancy.audit import AuditLine, AuditLog
from gateway.tenancy.directory import TenantDirectory
from gateway.tenancy.fair_queue import FairQueue
from gateway.tenancy.metrics import TenantMetrics
from gateway.tenancy.quotas import Quotas
from prfaas.clock import Clock
from prfaas.errors import (
    Cancelled,
    Forbidden,
    PrfaasError,
    RateLimited,
    Unauthorized,
)
from prfaas.quality import Quality
from prfaas.settings import GatewaySettings
from prfaas.snapshot import Snapshot
from prfaas.tenants import Tenant

TOKEN_BYTES = 4
"""Of a body, for the estimate that is taken from a budget before anything is tokenised."""
ANSWER_TOKENS = 256
"""Of an answer, where the request does not bound it."""
MOST_ANSWER_TOKENS = 1 << 20
"""Of an answer, whatever the request says: numbers beyond any answer would drown those of others in
the queue's clock.
"""


class Visit:
    """One request of one tenant, from its head to its end; `leave` it in any case.

    Without tenants every request has the same one, which lets everything pass.
    """

    __slots__ = (
        "_door", "_entered", "_prompt_tokens", "_started_at", "_taken", "_turn", "key_id",
        "refusal", "tenant",
    )  # fmt: skip

    def __init__(self, door: Door | None, tenant: Tenant | None, key_id: str, now: float) -> None:
        self._door = door
        self._started_at = now
        self._prompt_tokens = 0
        self._taken = 0
        self._turn = False
        self._entered = False
        self.tenant = tenant
        self.key_id = key_id
        self.refusal: PrfaasError | None = None
        """Why it goes no further than the door."""

    @property
    def name(self) -> str:
        """Its tenant's; empty: nobody's in particular."""
        return "" if self.tenant is None else self.tenant.name

    def passed_headers(self, headers: Mapping[str, str]) -> Mapping[str, str]:
        """What goes on to an engine: the key of a tenant is for nobody but the gateway."""
        if self._door is None:
            return headers
        return {name: value for name, value in headers.items() if name != "authorization"}

    def quality(self, header: str, settings: GatewaySettings) -> Quality:
        """Raises InvalidRequest and Forbidden."""
        return quality_of(header, settings, self.tenant)

    def entered(self) -> None:
        self._entered = True

    async def admit(self, body_bytes: int, max_tokens: int) -> None:
        """Take its tokens from the budget and wait for its turn, before it costs anything more.

        Raises RateLimited and Overloaded.
        """
        door, tenant = self._door, self.tenant
        if door is None or tenant is None:
            return
        self._prompt_tokens = body_bytes // TOKEN_BYTES
        answer_tokens = min(max_tokens, MOST_ANSWER_TOKENS) if max_tokens > 0 else ANSWER_TOKENS
        tokens = self._prompt_tokens + answer_tokens
        door.quotas.take_tokens(tenant, tokens, door.clock.now())
        self._taken = tokens
        before = door.clock.now()
        await door.queue.enter(tenant, tokens)
        self._turn = True
        door.metrics.waited(tenant.priority, door.clock.now() - before)

    def seen(self, snapshot: Snapshot) -> Snapshot:
        """Less the peers that this tenant's prompts may not go to."""
        tenant = self.tenant
        if tenant is None or all(tenant.may_use(remote.peer) for remote in snapshot.remotes):
            return snapshot
        remotes = tuple(remote for remote in snapshot.remotes if tenant.may_use(remote.peer))
        return replace(snapshot, remotes=remotes)

    def check_peers(self, peers: Iterable[str]) -> None:
        """Of a plan that a trusted client brought. Raises Forbidden."""
        for peer in peers:
            if self.tenant is not None and not self.tenant.may_use(peer):
                raise Forbidden(
                    f"prompts of tenant {self.name} may not go to peer {peer!r}",
                    param="kv_transfer_params",
                )

    def over(self, record: RequestRecord, answer: WholeAnswer | Relayed | None) -> None:
        """It has ended: charge what it used, count it, and write the audit line."""
        door, tenant = self._door, self.tenant
        if door is None or tenant is None:
            return
        now = door.clock.now()
        prompt, completion = _used(record, answer, self._prompt_tokens)
        door.quotas.settle_tokens(tenant, prompt + completion - self._taken, now)
        self._taken = 0
        door.metrics.request(tenant.name, _result(record))
        door.metrics.tokens(tenant.name, prompt, completion)
        plan = record.decision.plan if record.decision is not None and record.transfer_id else ()
        door.audit(
            self,
            record.request_id,
            record.trace_id,
            record.api,
            status=record.status,
            error=record.error,
            engine=record.engine,
            target=record.target_name,
            peers=tuple(dict.fromkeys(peer for peer, _ in plan)),
            kv_quality=record.kv_quality,
            prompt_tokens=prompt,
            completion_tokens=completion,
            limit=record.limit,
            seconds=now - self._started_at,
        )

    def refused(self, request_id: str, trace_id: str, api: str) -> None:
        """It ends at the door: write the audit line."""
        door, error = self._door, self.refusal
        if door is None or error is None:
            return
        limit = error.param or "" if isinstance(error, RateLimited) else ""
        result = "unauthorised" if isinstance(error, Unauthorized) else limit or error.kind
        door.metrics.request(self.name, result)
        door.audit(
            self,
            request_id,
            trace_id,
            api,
            status=str(error.http_status),
            error=error.kind,
            limit=limit,
            seconds=door.clock.now() - self._started_at,
        )

    def leave(self) -> None:
        """Its place is another's. Idempotent."""
        door, tenant = self._door, self.tenant
        if door is None or tenant is None:
            return
        if self._turn:
            self._turn = False
            door.queue.leave()
        if self._entered:
            self._entered = False
            door.quotas.leave(tenant)


ANYBODY = Visit(None, None, "", 0.0)
"""Of a gateway without tenants."""


class Door:
    """Holds what visits need; whoever made its parts closes them."""

    def __init__(
        self,
        directory: TenantDirectory,
        quotas: Quotas,
        queue: FairQueue,
        audit_log: AuditLog | None,
        metrics: TenantMetrics,
        clock: Clock,
    ) -> None:
        self.quotas = quotas
        self.queue = queue
        self.metrics = metrics
        self.clock = clock
        self._directory = directory
        self._audit_log = audit_log
        metrics.watch(self)

    @property
    def tenants(self) -> Mapping[str, Tenant]:
        return self._directory.tenants

    def in_flight(self, tenant: str) -> int:
        return self.quotas.in_flight(tenant)

    def waiting(self, tenant: str) -> int:
        return self.queue.waiting_of(tenant)

    def enter(self, authorization: str) -> Visit:
        """By the head of a request alone; the visit says where it is refused."""
        now = self.clock.now()
        try:
            caller = self._directory.caller(authorization)
        except Unauthorized as exc:
            visit = Visit(self, None, "", now)
            visit.refusal = exc
            return visit
        visit = Visit(self, caller.tenant, caller.key_id, now)
        try:
            self.quotas.enter(caller.tenant, now)
        except RateLimited as exc:
            visit.refusal = exc
        else:
            visit.entered()
        return visit

    def check_admin(self, authorization: str) -> None:
        """For what tells of everybody's requests. Raises Unauthorized and Forbidden."""
        if not self._directory.caller(authorization).tenant.admin:
            raise Forbidden("this is for tenants with `admin: true`")

    def check(self, authorization: str) -> None:
        """Any tenant. Raises Unauthorized."""
        self._directory.caller(authorization)

    def audit(
        self,
        visit: Visit,
        request_id: str,
        trace_id: str,
        api: str,
        *,
        status: str,
        error: str,
        seconds: float,
        limit: str = "",
        engine: str = "",
        target: str = "",
        peers: tuple[str, ...] = (),
        kv_quality: str = "",
        prompt_tokens: int = 0,
        completion_tokens: int = 0,
    ) -> None:
        """Where there is an audit log."""
        if self._audit_log is None:
            return
        self._audit_log.add(
            AuditLine(
                time=self.clock.wall(),
                request_id=request_id,
                trace_id=trace_id,
                tenant=visit.name,
                key_id=visit.key_id,
                api=api,
                status=status,
                error=error,
                limit=limit,
                engine=engine,
                target=target,
                peers=peers,
                kv_quality=kv_quality,
                prompt_tokens=prompt_tokens,
                completion_tokens=completion_tokens,
                seconds=seconds,
            )
        )


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


_ANSWER = msgspec.json.Decoder(_Answer)


def _used(
    record: RequestRecord, answer: WholeAnswer | Relayed | None, guessed: int
) -> tuple[int, int]:
    """Tokens of prompt and completion: as the engine says where it answered whole, else by the
    gateway's count of the prompt, or what its bytes let guess, and of events. Nothing where no
    engine worked for it.
    """
    if not record.tried or (record.status not in ("200", "499") and not record.events):
        return 0, 0
    if isinstance(answer, WholeAnswer):
        try:
            usage = _ANSWER.decode(answer.body).usage
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            usage = None
        if usage is not None:
            prompt = usage.prompt_tokens or usage.input_tokens
            return max(0, prompt), max(0, usage.completion_tokens or usage.output_tokens)
        guessed = 0  # /tokenize and the like: no model has run
    return (record.facts.prompt_tokens if record.facts is not None else guessed), record.events


def _result(record: RequestRecord) -> str:
    if record.limit:
        return record.limit
    if record.status == str(Cancelled.http_status):
        return "left"
    return "served" if record.status == "200" and not record.error else "failed"
