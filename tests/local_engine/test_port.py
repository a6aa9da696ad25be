"""What the engine needs of a port is what the ports offer."""

from __future__ import annotations

import inspect

import pytest

from local_engine.port import KvPort
from prfaas.testing.fake_port import FakePort
from prfaas_connect.port.engine import EnginePort


@pytest.mark.parametrize("kind", [EnginePort, FakePort])
def test_ports_have_the_members_and_signatures_the_engine_uses(kind: type) -> None:
    names = [name for name in vars(KvPort) if not name.startswith("_")]
    assert {"send", "ring_reserve", "staging"} <= set(names)
    for name in names:
        wanted, offered = vars(KvPort)[name], inspect.getattr_static(kind, name)
        assert isinstance(offered, property) == isinstance(wanted, property), name
        if not isinstance(wanted, property):
            assert list(inspect.signature(offered).parameters) == list(
                inspect.signature(wanted).parameters
            ), name
