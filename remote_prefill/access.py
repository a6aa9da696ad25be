"""Who may open sessions at P, for which models and tenants, and how many at once."""

from __future__ import annotations

from dataclasses import dataclass

from prfaas.errors import ConfigError, Forbidden, Unauthorized
from prfaas.limits import Limits
from prfaas.settings import PrefillSettings
from prfaas.tls import AuthContext, peer_identity

ALL = "*"
MAX_TENANT_CHARS = 128


@dataclass(frozen=True, slots=True)
class Client:
    """A client of P as the configuration has it; its sessions are its own."""

    identity: str
    """Name in its certificate; empty: without TLS, whoever is on this host."""
    models: tuple[str, ...]
    tenants: tuple[str, ...]
    max_sessions: int

    def require_model(self, model: str) -> None:
        """Raises Forbidden."""
        if not {ALL, model} & set(self.models):
            raise Forbidden(f"{self.identity} may not use model {model!r} here", param="model")

    def require_tenant(self, tenant: str) -> None:
        """Raises Forbidden, also for names that are too long to be one."""
        if len(tenant) > MAX_TENANT_CHARS:
            raise Forbidden(f"a tenant's name has {len(tenant)} characters", param="tenant")
        if not {ALL, tenant} & set(self.tenants):
            raise Forbidden(f"{self.identity} may not act for tenant {tenant!r}", param="tenant")

    def counted_tenant(self, tenant: str) -> str:
        """Under which name a tenant is counted: those of the configuration only, so that nobody
        makes metrics without end.
        """
        return tenant if not tenant or tenant in self.tenants else "other"


class Access:
    """Knows the clients of the configuration; nothing to close. Raises ConfigError where the list
    and TLS do not go together.
    """

    def __init__(self, settings: PrefillSettings, limits: Limits) -> None:
        if settings.tls is not None and not settings.authorised:
            raise ConfigError("prefill.authorised: with tls, name the clients that may prefill")
        if settings.tls is None and settings.authorised:
            raise ConfigError("prefill.authorised: without tls nobody can be told from anybody")
        most = limits.agent_max_sessions
        self._anyone = Client("", (ALL,), (ALL,), most) if settings.tls is None else None
        self._clients = {
            each.identity: Client(
                each.identity, each.models, each.tenants, each.max_sessions or most
            )
            for each in settings.authorised
        }
        if len(self._clients) < len(settings.authorised):
            raise ConfigError("prefill.authorised: an identity is there twice")

    def client(self, context: AuthContext) -> Client:
        """Who calls. Raises Unauthorized without a good certificate, Forbidden for strangers."""
        if self._anyone is not None:
            return self._anyone
        try:
            return self._clients[peer_identity(context, self._clients)]
        except Unauthorized:
            name = peer_identity(context)
        raise Forbidden(f"{name} may not prefill here: it is not in prefill.authorised")
