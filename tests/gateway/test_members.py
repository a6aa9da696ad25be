"""Sets of engines and peers from several sources make one, or none."""

from __future__ import annotations

import pytest

from gateway.members import MAX_MEMBERS, Members, merged
from prfaas.errors import ConfigError
from prfaas.settings import EngineEndpoint, PeerEndpoint


def engine(name: str) -> EngineEndpoint:
    return EngineEndpoint(name=name, url="http://127.0.0.1:1")


def peer(instance: str, name: str = "p") -> PeerEndpoint:
    return PeerEndpoint(peer=name, instance=instance, watch="127.0.0.1:1")


def test_parts_are_put_together_in_order() -> None:
    made = merged([Members((engine("a"),)), Members((engine("b"),), (peer("0"), peer("1")))])
    assert [each.name for each in made.engines] == ["a", "b"]
    assert [each.instance for each in made.peers] == ["0", "1"]
    assert len(made) == 4


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ([Members((engine("a"),)), Members((engine("a"),))], "not a twice"),
        ([Members((), (peer("0"),)), Members((), (peer("0"),))], "not p/0 twice"),
        ([Members((engine("p/0"),), (peer("0"),))], "not p/0 twice"),
        ([Members(tuple(engine(str(n)) for n in range(MAX_MEMBERS + 1)))], "at most 1024"),
    ],
)
def test_what_cannot_be_is_refused_with_its_name(parts: list[Members], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        merged(parts)
