"""The store in memory keeps the contract."""

from __future__ import annotations

import pytest

from gateway.state.memory import MemoryStore
from prfaas.cluster_state import ClusterStore
from prfaas.testing.clock import ManualClock
from prfaas.testing.state_contract import ClusterStateContract


class TestMemoryStore(ClusterStateContract):
    """With a clock of its own."""

    clock = ManualClock()

    @pytest.fixture
    async def store(self) -> ClusterStore:
        return MemoryStore(self.clock)

    async def let_pass(self, seconds: float) -> None:
        self.clock.advance(seconds)

    async def forget(self, store: ClusterStore) -> None:
        assert isinstance(store, MemoryStore)
        store.forget()
