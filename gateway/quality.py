"""The quality class of a request's KV, and what keeps KV of different classes apart."""

from __future__ import annotations

from prfaas.errors import InvalidRequest
from prfaas.quality import Quality
from prfaas.settings import GatewaySettings

QUALITY_HEADER = "x-prfaas-kv-quality"


def quality_of(header: str, settings: GatewaySettings) -> Quality:
    """What a request asks for, or else the default. Raises InvalidRequest for what is no class or
    is worse than requests may ask for.
    """
    limit = Quality(settings.kv_quality_limit)
    if not header:
        return Quality(settings.kv_quality)
    allowed = limit.allowed
    if header not in list(allowed):
        raise InvalidRequest(
            f"{QUALITY_HEADER}: {header[:40]!r} is not one of {', '.join(allowed)}",
            param=QUALITY_HEADER,
        )
    return Quality(header)


def salt_of(salt: str, quality: Quality) -> str:
    """The cache salt of a request: only requests of one class share cached KV, so that exact ones
    never meet what came with a loss.
    """
    return salt if quality is Quality.EXACT else f"{quality}.{salt}"
