"""Files that are written whole, or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from prfaas.errors import ConfigError


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A path to write to, beside `path` and of its kind: it takes its place at the end, at once,
    and is gone where anything is raised. What is no file (a terminal, a pipe) is written to itself.

    Raises ConfigError naming `path` where it cannot be written.
    """
    # What os.path cannot look at is not there; methods of Path raise.
    if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
        with _named(path):
            yield path
        return
    target = path.resolve()  # a link stays one
    part = target.with_name(f"{target.stem}.part{target.suffix}")
    try:
        with _named(path):
            if os.path.isdir(target):
                raise IsADirectoryError(0, "Is a directory")
            yield part
            part.replace(target)
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def can_hold_files(folder: Path) -> bool:
    """Whether the directory is there and ours to write, or can be made."""
    tried = (folder, *folder.absolute().parents)
    there = next(each for each in tried if os.path.exists(each))
    return os.path.isdir(there) and os.access(there, os.W_OK | os.X_OK)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise ConfigError(f"cannot write {path}: {exc.strerror or exc}") from exc
