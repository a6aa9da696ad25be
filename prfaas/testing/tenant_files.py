"""Files of tenants for tests, with the keys that belong to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prfaas.tenants import Tenant, TenantFile, new_key, save_tenants


class TenantFixture:
    """One file and the keys of its tenants by name. `put` changes the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.keys: dict[str, str] = {}
        self._file = TenantFile()

    def put(self, name: str, **bounds: Any) -> str:
        """Add or replace a tenant, with a new key, which is returned."""
        key, kept = new_key(bounds.pop("expires", None))
        self.keys[name] = key
        self._file = self._file.with_tenant(Tenant(name=name, keys=(kept,), **bounds))
        save_tenants(self.path, self._file)
        return key

    def fill(self, count: int) -> None:
        """So many more tenants, `t0` and so on, without keys."""
        made = tuple(Tenant(name=f"t{number}") for number in range(count))
        self._file = TenantFile(tenants=(*self._file.tenants, *made))
        save_tenants(self.path, self._file)

    def remove(self, name: str) -> None:
        self._file = self._file.without(name)
        save_tenants(self.path, self._file)

    def bearer(self, name: str) -> dict[str, str]:
        """Headers with the key of this tenant."""
        return {"authorization": f"Bearer {self.keys[name]}"}

    @property
    def hashes(self) -> list[str]:
        return [key.sha256 for tenant in self._file.tenants for key in tenant.keys]
