"""The quality class of a request's KV, and what keeps KV of different classes apart."""

from __future__ import annotations

from functools import cache

from prfaas.errors import Forbidden, InvalidRequest
from prfaas.quality import Quality
from prfaas.settings import GatewaySettings
from prfaas.tenants import Tenant

QUALITY_HEADER = "x-prfaas-kv-quality"


def quality_of(header: str, settings: GatewaySettings, tenant: Tenant | None = None) -> Quality:
    """What a request asks for, or else the default, where its tenant may have that.

    Raises InvalidRequest for what is no class or is worse than requests may ask for, Forbidden for
    what is worse than this tenant's may.
    """
    of_tenant = None if tenant is None else tenant.kv_quality
    if not header:
        return _default(settings.kv_quality, settings.kv_quality_limit, of_tenant)
    limit = Quality(settings.kv_quality_limit)
    worst = limit if of_tenant is None else Quality(of_tenant)
    allowed = limit.allowed
    if header not in list(allowed):
        raise InvalidRequest(
            f"{QUALITY_HEADER}: {header[:40]!r} is not one of {', '.join(allowed)}",
            param=QUALITY_HEADER,
        )
    if Quality(header).rank > worst.rank:
        raise Forbidden(
            f"{QUALITY_HEADER}: this tenant may not have {header}, only {', '.join(worst.allowed)}",
            param=QUALITY_HEADER,
        )
    return Quality(header)


@cache
def _default(wanted: str, limit: str, of_tenant: str | None) -> Quality:
    """Of a request that asks for nothing."""
    worst = Quality(limit if of_tenant is None else of_tenant)
    return min(Quality(wanted), worst, key=lambda quality: quality.rank)


def salt_of(salt: str, quality: Quality) -> str:
    """The cache salt of a request: only requests of one class share cached KV, so that exact ones
    never meet what came with a loss.
    """
    return salt if quality is Quality.EXACT else f"{quality}.{salt}"
