"""The parts of telling tenants apart, put together for one gateway."""

from __future__ import annotations

from gateway.tenancy.audit import AuditLog
from gateway.tenancy.directory import TenantDirectory
from gateway.tenancy.door import Door
from gateway.tenancy.fair_queue import FairQueue
from gateway.tenancy.metrics import TenantMetrics
from gateway.tenancy.quotas import Quotas
from prfaas.clock import Clock
from prfaas.errors import ConfigError
from prfaas.limits import Limits
from prfaas.settings import GatewaySettings


class Tenancy:
    """Owns the directory of tenants and the audit log; close it with `close`, after the last
    request. `run` follows the file until cancelled.
    """

    def __init__(
        self, settings: GatewaySettings, limits: Limits, metrics: TenantMetrics, clock: Clock
    ) -> None:
        """Raises ConfigError, also where the audit log cannot be written."""
        chosen = settings.tenants
        assert chosen.file is not None
        if not settings.cache_secret.get_secret_value():
            raise ConfigError(
                "gateway.cache_secret: tenants' caches are kept apart by salts that are made "
                "with it",
                field="gateway.cache_secret",
            )
        self._metrics = metrics
        self._clock = clock
        self._audit_log: AuditLog | None = None
        if chosen.audit_log is not None:
            try:
                self._audit_log = AuditLog(chosen.audit_log, metrics.lost_lines)
            except OSError as exc:
                raise ConfigError(
                    f"gateway.tenants.audit_log: cannot write {chosen.audit_log}: {exc.strerror}",
                    field="gateway.tenants.audit_log",
                ) from exc
        self.directory = TenantDirectory(chosen.file, clock, self._reloaded)
        self.quotas = Quotas()
        self.quotas.take_tenants(self.directory.tenants.values(), clock.now())
        self.queue = FairQueue(chosen.active_requests, limits.tenant_waiting, limits.tenant_wait_s)
        self.door = Door(self.directory, self.quotas, self.queue, self._audit_log, metrics, clock)

    async def run(self) -> None:
        """Follow the file until cancelled."""
        await self.directory.run()

    def close(self) -> None:
        """Write what of the audit log is not written yet."""
        if self._audit_log is not None:
            self._audit_log.close()

    def _reloaded(self, result: str) -> None:
        self._metrics.reloaded(result)
        if result == "loaded":
            self.quotas.take_tenants(self.directory.tenants.values(), self._clock.now())


def tenancy_of(
    settings: GatewaySettings, limits: Limits, metrics: TenantMetrics, clock: Clock
) -> Tenancy | None:
    """None where the settings name no file of tenants. Raises ConfigError."""
    if settings.tenants.file is not None:
        return Tenancy(settings, limits, metrics, clock)
    if settings.tenants.audit_log is not None or settings.tenants.active_requests:
        raise ConfigError(
            "gateway.tenants: audit_log and active_requests need gateway.tenants.file",
            field="gateway.tenants.file",
        )
    return None
