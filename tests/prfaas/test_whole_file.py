"""A file is as it was, or as it should be; never half of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from prfaas.errors import ConfigError
from prfaas.whole_file import can_hold_files, whole_file


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def test_what_is_written_takes_the_place_of_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text("old")
    with whole_file(path) as part:
        assert part.suffix == ".html"
        part.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert names(tmp_path) == ["page.html"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_whatever_is_raised_leaves_the_old_file_and_no_other(
    error: type[BaseException], tmp_path: Path
) -> None:
    path = tmp_path / "page.html"
    path.write_text("old")

    def broken() -> None:
        with whole_file(path) as part:
            part.write_text("half")
            raise error

    with pytest.raises(error):
        broken()
    assert path.read_text() == "old"
    assert names(tmp_path) == ["page.html"]


def test_what_the_system_says_is_told_with_the_path_that_was_asked_for(tmp_path: Path) -> None:
    def write(path: Path, error: OSError | None = None) -> None:
        with whole_file(path) as part:
            part.write_text("half")
            if error is not None:
                raise error

    path = tmp_path / "none" / "page.html"
    with pytest.raises(ConfigError, match=f"cannot write {path}: No such file"):
        write(path)
    with pytest.raises(ConfigError, match="Is a directory"):
        write(tmp_path)
    with pytest.raises(ConfigError, match="No space left"):
        write(tmp_path / "x", OSError(28, "No space left on device"))
    assert names(tmp_path) == []


def test_whether_a_folder_can_be_had_is_known_before_it_is_made(tmp_path: Path) -> None:
    assert can_hold_files(tmp_path / "a" / "b")
    assert can_hold_files(tmp_path)
    (tmp_path / "file").touch()
    assert not can_hold_files(tmp_path / "file")
    assert not can_hold_files(tmp_path / "file" / "b")
    assert names(tmp_path) == ["file"]


def test_a_link_stays_one_and_what_is_no_file_is_written_to_itself(tmp_path: Path) -> None:
    real, link = tmp_path / "real.yaml", tmp_path / "link.yaml"
    real.write_text("old")
    link.symlink_to(real)
    with whole_file(link) as part:
        part.write_text("new")
    assert link.is_symlink()
    assert real.read_text() == "new"
    with whole_file(Path(os.devnull)) as part:
        assert part == Path(os.devnull)
