"""Files that are written whole, or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from os import W_OK, access
from pathlib import Path

from prfaas.errors import ConfigError


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A path to write to, beside `path` and of its kind: it takes its place at the end, at once,
    and is gone where anything is raised. What is no file (a terminal, a pipe) is written to itself.

    Raises ConfigError naming `path` where it cannot be written.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        with _named(path):
            yield path
        return
    target = path.resolve()  # a link stays one
    part = target.with_name(f"{target.stem}.part{target.suffix}")
    try:
        with _named(path):
            if target.is_dir():
                raise IsADirectoryError(0, "Is a directory")
            yield part
            part.replace(target)
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def can_hold_files(folder: Path) -> bool:
    """Whether the directory is there and ours to write, or can be made."""
    there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    return there.is_dir() and access(there, W_OK)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise ConfigError(f"cannot write {path}: {exc.strerror or exc}") from exc
