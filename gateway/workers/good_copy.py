"""A file that all workers read: the last good text of one that people edit."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path

from prfaas.errors import ConfigError

logger = logging.getLogger(__name__)

LOOK_S = 0.5
"""Between two looks at the file."""


class GoodCopy:
    """Owns the copy. `run` follows the source until cancelled; a text that is no good changes
    nothing, so that a worker which starts meanwhile finds what the others have.
    """

    def __init__(
        self,
        what: str,
        source: Path | None,
        copy: Path,
        check: Callable[[Path], object],
        changed: Callable[[str], None],
    ) -> None:
        """`check` raises ConfigError for a file that is no good, and so does this one where there
        is none yet. `changed` hears `loaded` or `refused`. Without a source, texts only come by
        `take`.
        """
        self._what = what
        self._source = source
        self._copy = copy
        self._check = check
        self._changed = changed
        self._seen = copy.with_name(f"{copy.name}.seen")
        """Which state of the source was looked at last, also by who was here before."""
        self._news: str | None = None
        if source is not None and not copy.exists():
            stamp = _stamp(source)
            self._put(_text(source))
            self._note(stamp)
        self._stamp = self._noted()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Take over what has changed, where it is good."""
        if self._source is None:
            return
        stamp = await asyncio.to_thread(_stamp, self._source)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        await asyncio.to_thread(self._note, stamp)
        try:
            text = await asyncio.to_thread(_text, self._source)
            if text == await asyncio.to_thread(_text, self._copy):
                return
            await asyncio.to_thread(self._put, text)
        except ConfigError as exc:
            logger.error("%s stays as it is: %s", self._what, exc.message)
            self._changed("refused")
            return
        self._news = text
        self._changed("loaded")

    def published(self) -> str | None:
        """The text that was taken over since this was last asked."""
        news, self._news = self._news, None
        return news

    async def adopt(self, text: str) -> None:
        """Take over what another gateway has; a bad one is told and changes nothing."""
        try:
            await asyncio.to_thread(self._put, text)
        except ConfigError as exc:
            logger.error("%s of another gateway is not taken over: %s", self._what, exc.message)
            self._changed("refused")
            return
        self._changed("loaded")

    def _note(self, stamp: str) -> None:
        try:
            self._seen.write_text(stamp)
        except OSError as exc:
            logger.error("cannot write %s: %s", self._seen, exc.strerror)

    def _noted(self) -> str:
        try:
            return self._seen.read_text()
        except OSError:
            return ""

    def _put(self, text: str) -> None:
        """Raises ConfigError."""
        fresh = self._copy.with_name(f"new-{self._copy.name}")
        try:
            with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                file.write(text)
            self._check(fresh)
            fresh.replace(self._copy)
        except OSError as exc:
            raise ConfigError(f"cannot write {fresh}: {exc.strerror}") from exc
        except ConfigError as exc:
            shown = str(self._source or "it")
            raise ConfigError(exc.message.replace(str(fresh), shown), field=exc.field) from exc


def _text(path: Path) -> str:
    """Raises ConfigError."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else "it is not UTF-8"
        raise ConfigError(f"cannot read {path}: {why}") from exc


def _stamp(path: Path) -> str:
    """Changes when the file does; says so where there is none."""
    try:
        found = path.stat()
    except OSError:
        return "none"
    return f"{found.st_ino} {found.st_mtime_ns} {found.st_size}"
