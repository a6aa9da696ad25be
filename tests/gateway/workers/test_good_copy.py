"""Workers read the last good text, whatever people do to the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.workers.good_copy import GoodCopy
from prfaas.errors import ConfigError


class World:
    def __init__(self, directory: Path) -> None:
        self.source, self.copy = directory / "source", directory / "copy"
        self.results: list[str] = []
        self.source.write_text("good 1")

    def made(self) -> GoodCopy:
        return GoodCopy("the file", self.source, self.copy, self.check, self.results.append)

    def check(self, file: Path) -> None:
        if not file.read_text().startswith("good"):
            raise ConfigError(f"{file}: is bad", field="x")


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def test_what_changes_is_copied_where_it_is_good(world: World) -> None:
    copy = world.made()
    assert world.copy.read_text() == "good 1"
    assert world.copy.stat().st_mode & 0o777 == 0o600
    await copy.look()
    assert (world.results, copy.published()) == ([], None)
    world.source.write_text("good 22")
    await copy.look()
    assert world.copy.read_text() == "good 22"
    assert world.results == ["loaded"]
    assert (copy.published(), copy.published()) == ("good 22", None)


@pytest.mark.parametrize("text", ["bad", None, b"\xff\xfe"])
async def test_a_bad_one_is_said_and_changes_nothing(
    world: World, text: str | bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    copy = world.made()
    if text is None:
        world.source.unlink()
    elif isinstance(text, bytes):
        world.source.write_bytes(text)
    else:
        world.source.write_text(text)
    for _ in range(2):
        await copy.look()
    assert world.copy.read_text() == "good 1"
    assert world.results == ["refused"], "once for each change"
    assert f"the file stays as it is: {'cannot read ' if text != 'bad' else ''}" in caplog.text
    assert str(world.source) in caplog.text


async def test_who_is_started_again_begins_with_the_copy(world: World) -> None:
    world.made()
    world.source.write_text("bad")
    again = world.made()
    await again.look()
    assert world.copy.read_text() == "good 1"
    world.source.write_text("good 333")
    await again.look()
    assert world.copy.read_text() == "good 333"


def test_a_bad_one_at_the_start_is_an_error(world: World) -> None:
    world.source.write_text("bad")
    with pytest.raises(ConfigError, match="source: is bad"):
        world.made()
    world.source.unlink()
    with pytest.raises(ConfigError, match="cannot read"):
        world.made()


async def test_what_another_gateway_has_is_taken_over_where_it_is_good(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    copy = world.made()
    await copy.adopt("good 4")
    assert world.copy.read_text() == "good 4"
    await copy.adopt("bad")
    assert world.copy.read_text() == "good 4"
    assert world.results == ["loaded", "refused"]
    assert "of another gateway is not taken over" in caplog.text
    assert copy.published() is None, "it is not ours to tell"
    again = world.made()
    await again.look()
    assert world.copy.read_text() == "good 4", "the file has not changed since"
    world.source.write_text("good 55")
    later = world.made()
    await later.look()
    assert world.copy.read_text() == "good 55", "what changed while nobody looked"
