"""The file of tenants: who may call, with which keys (hashed), and how much; made and read here."""

from __future__ import annotations

import hashlib
import os
import secrets
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal, Self

import yaml
from pydantic import AwareDatetime, Field, ValidationError, field_validator, model_validator

from prfaas.errors import ConfigError
from prfaas.section import Section
from prfaas.settings import QualityName, validation_message
from prfaas.yaml_text import parse_yaml

KEY_BYTES = 32
"""Randomness of a key: so much that a plain SHA-256 of it cannot be turned back."""
MAX_FILE_BYTES = 16 << 20
EVERY_PEER = "*"


class ApiKey(Section):
    """One key of a tenant, as its hash."""

    id: str = Field(pattern=r"^[0-9a-f]{8}$", description="Its name in logs.")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", description="Of the whole key.")
    expires: AwareDatetime | None = Field(None, description="It is refused from then on.")


class Tenant(Section):
    """Whom requests are served for, and within which bounds; none: no bound of its own."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$", description="Its name.")
    keys: tuple[ApiKey, ...] = Field((), description="Any of them is good.")
    requests_per_minute: float | None = Field(None, gt=0, description="Requests let in.")
    tokens_per_minute: float | None = Field(
        None, gt=0, description="Tokens of prompts and answers."
    )
    tokens_per_day: float | None = Field(None, gt=0, description="The same over a day.")
    concurrent_requests: int | None = Field(None, gt=0, description="In flight at once.")
    priority: int = Field(0, ge=0, le=9, description="Of those who wait, the higher go first.")
    weight: float = Field(
        1.0, gt=0, le=1000, description="Share among those of one priority who wait."
    )
    kv_quality: QualityName | None = Field(
        None, description="Worst class of KV it may get; none: gateway.kv_quality_limit."
    )
    peers: tuple[str, ...] = Field(
        (EVERY_PEER,), description="Peers its prompts may go to; `*`: all, an empty list: none."
    )
    admin: bool = Field(False, description="May read `/prfaas/` and the dashboard.")

    def may_use(self, peer: str) -> bool:
        """Whether its prompts may be sent to this peer."""
        return EVERY_PEER in self.peers or peer in self.peers


class TenantFile(Section):
    """All tenants."""

    tenants_version: Literal[1] = Field(1, description="Version of this file's format.")
    tenants: tuple[Tenant, ...] = Field((), description="Each with a name of its own.")

    @field_validator("tenants")
    @classmethod
    def _names_of_their_own(cls, tenants: tuple[Tenant, ...]) -> tuple[Tenant, ...]:
        names = [tenant.name for tenant in tenants]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"named twice: {', '.join(twice)}")
        return tenants

    @model_validator(mode="after")
    def _keys_of_one_tenant(self) -> Self:
        keys = [key for tenant in self.tenants for key in tenant.keys]
        for what in ("id", "sha256"):
            if len({getattr(key, what) for key in keys}) < len(keys):
                raise ValueError(f"two keys have the same {what}")
        return self

    def tenant(self, name: str) -> Tenant:
        """Raises ConfigError where there is none of that name."""
        for tenant in self.tenants:
            if tenant.name == name:
                return tenant
        raise ConfigError(f"there is no tenant {name!r}", field="tenants")

    def with_tenant(self, changed: Tenant) -> TenantFile:
        """With this tenant in place of the one of its name, or as a new one."""
        others = [tenant for tenant in self.tenants if tenant.name != changed.name]
        return TenantFile(tenants=tuple(sorted([*others, changed], key=lambda each: each.name)))

    def without(self, name: str) -> TenantFile:
        """Raises ConfigError where there is none of that name."""
        gone = self.tenant(name)
        return TenantFile(tenants=tuple(each for each in self.tenants if each is not gone))


def new_key(expires: datetime | None = None) -> tuple[str, ApiKey]:
    """A key, which is shown once, and what is kept of it."""
    key_id = secrets.token_hex(4)
    key = f"sk-prfaas-{key_id}-{secrets.token_urlsafe(KEY_BYTES)}"
    return key, ApiKey(id=key_id, sha256=hash_of(key), expires=expires)


def hash_of(key: str) -> str:
    """What a key is found by. Headers may hold any bytes, which come as lone surrogates."""
    return hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()


def rotated(tenant: Tenant, grace: timedelta) -> tuple[str, Tenant]:
    """A new key, and the tenant with it; the keys it had are good for `grace` longer."""
    now = datetime.now(UTC).replace(microsecond=0)
    end = now + grace
    kept = [
        key.model_copy(update={"expires": end if key.expires is None else min(key.expires, end)})
        for key in tenant.keys
        if key.expires is None or key.expires > now
    ]
    key, made = new_key()
    return key, tenant.model_copy(update={"keys": (made, *kept)})


def load_tenants(path: Path) -> TenantFile:
    """Raises ConfigError naming the file and what is wrong, without the values that are wrong."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path}: larger than {MAX_FILE_BYTES} bytes", field="tenants")
        found = parse_yaml(path.read_bytes(), path, "tenants")
    except OSError as exc:
        raise ConfigError(f"cannot read {path}: {exc.strerror}", field="tenants") from exc
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: the top level must be a mapping", field="tenants")
    try:
        return TenantFile.model_validate(found)
    except ValidationError as exc:
        raise ConfigError(f"{path}: {validation_message(exc)}", field="tenants") from None


def save_tenants(path: Path, file: TenantFile) -> None:
    """Replace the file at once, so that a gateway sees the old one or the new one; mode 0600.

    Raises ConfigError where it cannot be written.
    """
    data = {"tenants_version": 1, **file.model_dump(mode="json", exclude_defaults=True)}
    text = yaml.safe_dump(data, sort_keys=False)
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w") as out:
                out.write(text)
                out.flush()
                os.fsync(out.fileno())
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as exc:
        raise ConfigError(f"cannot write {path}: {exc.strerror}", field="tenants") from exc


def edit_tenants(path: Path, change: Callable[[TenantFile], TenantFile]) -> None:
    """Read, change and write; a file that is not there yet is an empty one. Raises ConfigError."""
    file = load_tenants(path) if path.exists() else TenantFile()
    save_tenants(path, change(file))
