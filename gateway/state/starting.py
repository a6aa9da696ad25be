"""The store that the settings name, and the loop that keeps a gateway in touch with it."""

from __future__ import annotations

from collections.abc import Iterable

from gateway.cluster_view import ClusterView
from gateway.live_policy import LivePolicy
from gateway.shared_prefixes import SharedPrefixes
from gateway.state.metrics import StateMetrics
from gateway.state.sync import StateSync
from gateway.tenancy.tenancy import Tenancy
from prfaas.clock import Clock
from prfaas.cluster_state import ClusterStore
from prfaas.errors import ConfigError
from prfaas.settings import GatewaySettings, StateSettings
from prfaas.tenants import Tenant


def state_of(
    settings: StateSettings,
    view: ClusterView,
    tenancy: Tenancy | None,
    policy: LivePolicy,
    metrics: StateMetrics,
    clock: Clock,
    store: ClusterStore | None = None,
    prefixes: SharedPrefixes | None = None,
) -> StateSync | None:
    """None where the gateway is alone. `store` in place of Redis. Raises ConfigError."""
    if store is None:
        if settings.redis is None:
            return None
        store = redis_store(settings)

    def tenants() -> Iterable[Tenant]:
        return tenancy.directory.tenants.values() if tenancy is not None else ()

    return StateSync(
        settings,
        store,
        view,
        None if tenancy is None else tenancy.quotas,
        tenants,
        policy if settings.share_policy else None,
        metrics,
        clock,
        prefixes,
    )


def prefixes_of(
    settings: GatewaySettings, clock: Clock, store: ClusterStore | None = None
) -> SharedPrefixes | None:
    """None where the gateway is alone, or has no secret to name prefixes with."""
    secret = settings.cache_secret.get_secret_value()
    state = settings.state
    shares = store is not None or state.redis is not None
    return (
        SharedPrefixes(secret.encode(), clock)
        if shares and state.share_prefixes and secret
        else None
    )


def redis_store(settings: StateSettings) -> ClusterStore:
    """Raises ConfigError."""
    try:
        from gateway.state.redis_store import RedisStore
    except ModuleNotFoundError as exc:
        raise ConfigError(
            "gateway.state.redis: the client is not installed; install prfaas[redis]",
            field="gateway.state.redis",
        ) from exc
    return RedisStore(settings)
