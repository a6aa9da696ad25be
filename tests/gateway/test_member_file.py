"""A file of engines and peers is taken whole, or refused with what is wrong in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.member_file import read_members
from prfaas.errors import ConfigError
from prfaas.following import MAX_BYTES, stamp_of

GOOD = """
engines:
  - {name: d-0, url: "http://10.0.0.1:8000", agent: "127.0.0.1:8101"}
peers:
  - {peer: p, instance: p-0, watch: "127.0.0.1:8201", link_class: lan}
"""


def test_it_has_what_the_configuration_may_have(tmp_path: Path) -> None:
    file = tmp_path / "members.yaml"
    file.write_text(GOOD)
    members = read_members(file)
    assert members.engines[0].agent == "127.0.0.1:8101"
    assert members.peers[0].link_class == "lan"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "must be a mapping"),
        ("engines: [", "is not YAML"),
        ("[]", "must be a mapping"),
        ("engine: []", "engine"),
        ("engines: [{name: d-0}]", "engines.0.url"),
        ("engines: [{name: d-0, url: u, colour: red}]", "engines.0.colour"),
        ("peers: [{peer: p, instance: i, watch: w, link_class: far}]", "peers.0.link_class"),
        ("x" * (MAX_BYTES + 1), "is larger than"),
        ("\xff", "is not YAML|must be a mapping"),
        ("engines: !!bool maybe", "is not YAML.*its tag"),
        ("engines: !!timestamp soon", "is not YAML.*its tag"),
        ("engines: " + 3000 * "[", "is not YAML"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "members.yaml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=says):
        read_members(file)


def test_no_file_is_an_error_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_members(tmp_path / "none.yaml")
    assert stamp_of(tmp_path / "none.yaml") is None


def test_a_link_that_is_moved_is_a_change(tmp_path: Path) -> None:
    """As Kubernetes replaces what it mounts."""
    for name in ("a", "b"):
        (tmp_path / name).write_text(GOOD)
    link = tmp_path / "members.yaml"
    link.symlink_to(tmp_path / "a")
    before = stamp_of(link)
    moved = tmp_path / "next"
    moved.symlink_to(tmp_path / "b")
    moved.rename(link)
    assert stamp_of(link) != before
